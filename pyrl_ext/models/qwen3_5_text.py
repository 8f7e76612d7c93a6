"""Qwen3.5 (HF ``Qwen3_5ForCausalLM``): Qwen3-Next without experts, whose delta nets have their
projections in four tensors, with all heads of each part in a row."""

from __future__ import annotations

from pyrl_ext.models import qwen3
from pyrl_ext.models.qwen3_next import Projections, family_of
from pyrl_ext.plan.model.families.qwen3_next import DeltaNets


def projections(sizes: DeltaNets) -> Projections:
    heads = sizes.linear_num_value_heads
    keys = sizes.linear_num_key_heads * sizes.linear_key_head_dim
    values = heads * sizes.linear_value_head_dim
    return 1, {
        "in_proj_qkv": (keys, keys, values),
        "in_proj_z": (values,),
        "in_proj_b": (heads,),
        "in_proj_a": (heads,),
    }


FAMILY = family_of(qwen3.config, projections)
