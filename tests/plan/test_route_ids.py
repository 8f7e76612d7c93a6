"""One home for the type of expert ids: engines and trainer use the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.model.route_ids import route_id_bytes, route_id_dtype
from pyrl_ext.samples import route_dtype
from tests.helpers.configs import REPOSITORY, hf_of, write_sizes


@pytest.mark.parametrize(
    ("experts", "name"),
    [
        (0, "uint8"),
        (1, "uint8"),
        (256, "uint8"),
        (257, "uint16"),
        (384, "uint16"),
        (2**16, "uint16"),
    ],
)
def test_route_id_dtype_is_the_narrowest_unsigned_type(experts: int, name: str):
    dtype = getattr(torch, name)
    assert route_id_dtype(experts) == name
    assert route_dtype(experts) == dtype
    assert route_id_bytes(experts) == dtype.itemsize
    assert experts - 1 <= torch.iinfo(dtype).max


@pytest.mark.parametrize("experts", [-1, 2**16 + 1])
def test_route_id_dtype_refuses_what_16_bits_cannot_hold(experts: int):
    with pytest.raises(ValueError, match=f"{experts} experts, expected 0 to 65536"):
        route_id_dtype(experts)


@pytest.mark.parametrize("experts", [256, 384])
def test_plan_counts_the_bytes_of_the_type_that_engines_return(tmp_path: Path, experts: int):
    plan = _with_experts(tmp_path, experts)
    assert plan.sizes.route_bytes_per_token == (
        len(plan.router_layers) * plan.sizes.topk * route_dtype(experts).itemsize
    )


def _with_experts(folder: Path, experts: int) -> Plan:
    """GLM-4.7-Flash with another number of experts."""
    config = write_sizes(folder, hf_of("glm47") | {"n_routed_experts": experts})
    return compile_plan(REPOSITORY / "configs/glm47.yaml", [config, "hardware.gpu=null"])
