"""Hybrid models: stages as megatron-core's patterns, heads over ranks, work and states."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace as Fields
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.plan.forecast.engine_memory import state_bytes
from pyrl_ext.plan.forecast.flops import model_flops
from pyrl_ext.plan.model.attention import kv_bytes_per_token
from pyrl_ext.plan.model.chunks import plan_stages
from pyrl_ext.plan.model.counts import layer_parameters, parameters
from pyrl_ext.plan.model.families.nemotron_h import KINDS
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.model.layer_kinds import LETTERS, hybrid_pattern, mamba
from pyrl_ext.plan.schema import Parallel
from tests.helpers.configs import CONFIGS, hf_of, write_sizes

HF = {name: hf_of(name) for name in ("nemotron3_nano", "qwen3_next_80b")}


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.sampled_from([None, 2, 3]), st.data())
def test_hybrid_pattern_places_layers_as_megatron_does(
    pp: int, vpp: int | None, data: st.DataObject
):
    from megatron.core.models.hybrid import hybrid_layer_allocation as theirs

    each = st.text("M*-E", max_size=5)
    number = pp * (vpp or 1)
    segments = data.draw(st.lists(each, min_size=number, max_size=number))
    layers = "".join(segments)
    layout = "|".join("t" * len(segment) for segment in segments)
    parallel = Parallel(pp=pp, vpp=vpp, pipeline_model_parallel_layout=f"E{layout}L")
    stages = plan_stages(parallel, len(layers))
    pattern = hybrid_pattern(stages, [KINDS[letter] for letter in layers])
    assert pattern == "|".join(segments) and pattern is not None
    assert theirs.get_hybrid_total_pipeline_segment_count(pattern) == number
    assert theirs.get_hybrid_total_layer_count(pattern) == len(layers)
    main = theirs.parse_hybrid_pattern(pattern).main_pattern or ""
    for rank, chunk in product(range(pp), range(vpp or 1)):
        with (
            patch("torch.distributed.get_rank", lambda group: group.rank),
            patch("torch.distributed.get_world_size", lambda group: group.size),
            patch.object(theirs, "log_on_each_pipeline_stage"),
        ):
            group: Any = Fields(rank=rank, size=pp)
            kinds, first = theirs.select_pipeline_segment(main, group, chunk if vpp else None)
        held = stages[rank][chunk].layers
        assert held == tuple(range(first, first + len(kinds)))
        assert "".join(kinds) == "".join(layers[layer] for layer in held)


def test_letters_are_those_of_megatron_and_of_the_family():
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

    assert {kind: letter for letter, kind in KINDS.items()} == LETTERS
    assert {*LETTERS.values()} <= Symbols.VALID_LAYERS
    mixers = {Symbols.MAMBA: "mamba", Symbols.ATTENTION: "attention"}
    assert {letter: KINDS[letter].mixer for letter in mixers} == mixers
    assert [KINDS[letter].feed_forward for letter in (Symbols.MLP, Symbols.MOE)] == ["mlp", "moe"]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(2, 12))
def test_StateMixer_fits_where_megatron_splits_heads(groups: int, each: int, tp: int, cp: int):
    from megatron.core.ssm import mamba_context_parallel as theirs

    heads = groups * each
    mixer = mamba(heads * tp, 4, groups * tp, 8, 4, 64)
    group: Any = Fields(size=lambda: cp, rank=lambda: 0)
    none: Any = None  # the weights, which it only keeps
    try:
        with patch.object(theirs, "HAVE_EINOPS", True):
            theirs.MambaContextParallel(
                group, heads * 4, heads, groups, 8, none, none, 3, none, none, none, False
            )
    except AssertionError:
        assert not mixer.fits(tp, cp)
    else:
        assert mixer.fits(tp, cp)
    assert not mixer.fits(heads * tp + 1, 1)


def test_published_models_have_their_totals_routers_and_states():
    nano, qwen = (read_sizes(HF[name]) for name in HF)
    assert round(parameters(nano).total / 1e9, 1) == 31.6
    assert round(parameters(nano).active / 1e9, 1) == 3.6
    assert round(parameters(qwen).total / 1e9) == 80
    assert len(nano.router_layers) == 23 and nano.router_layers[:4] == (1, 3, 6, 8)
    assert qwen.router_layers == tuple(range(48))
    assert [i for i, kind in enumerate(qwen.layer_kinds) if kind.mixer == "attention"] == [
        *range(3, 48, 4)
    ]
    assert (nano.rotary_width, qwen.rotary_width) == (0, 64)
    assert (nano.route_bytes_per_token, qwen.route_bytes_per_token) == (23 * 6, 48 * 10 * 2)


def test_an_engine_caches_keys_of_attention_alone_and_a_state_of_each_sequence():
    nano = compile_plan(CONFIGS / "nemotron3_nano.yaml")
    assert kv_bytes_per_token(nano, 1) == 6 * 2 * 2 * 2 * 128
    assert state_bytes(nano, 1) == 23 * (4 * 64 * 64 * 128 + 2 * 3 * (64 * 64 + 2 * 8 * 128))
    assert state_bytes(nano, 2) * 2 == state_bytes(nano, 1)
    qwen = compile_plan(CONFIGS / "qwen3_next_80b.yaml")
    assert kv_bytes_per_token(qwen, 1) == 12 * 2 * 2 * 2 * 256
    assert state_bytes(qwen, 1) == 36 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 + 32) * 128)
    for each in (qwen, nano):
        assert all(why.startswith("kernels.backend: auto with ") for why in each.unsupported)


def test_model_flops_of_a_hybrid_equal_a_count_by_hand():
    """Two operations for each matrix's number, and the products of the chunked scan."""
    sizes = read_sizes(
        HF["nemotron3_nano"] | {"hybrid_override_pattern": "M", "num_hidden_layers": 1}
    )
    each = model_flops(sizes)
    hidden = 2688
    inner = 64 * 64
    both = 2 * 8 * 128
    assert each.projections == 2 * hidden * (2 * inner + both + 64 + inner)
    triangle = (8 * 128 + inner) * 129 / 2
    assert each.scan == 2 * (4 * (inner + both) + triangle + 2 * inner * 128)
    assert (each.attention, each.experts) == (0, 0)
    sizes = read_sizes(HF["qwen3_next_80b"] | {"num_hidden_layers": 1})
    each = model_flops(sizes)
    mixer = sizes.state_mixer
    assert mixer is not None
    held = layer_parameters(sizes, sizes.layer_kinds[0]).tensor
    vectors = mixer.convolved * mixer.taps + mixer.vectors
    assert each.projections == 2 * (held - vectors + 2048 * (512 + 1))
    rule = 3 * 128 * 128 + 65 / 2 * 5 * 128 + 64**2 / 6
    assert each.scan == pytest.approx(2 * (4 * (4096 + 4096) + 32 * rule))
    assert each.experts == 2 * 10 * 3 * 2048 * 512


@pytest.mark.parametrize(
    ("key", "value", "dtype", "fits"),
    [
        (64, 64, "bfloat16", True),
        (128, 128, "bfloat16", True),
        (64, 128, "bfloat16", False),
        (32, 32, "bfloat16", False),
        (64, 64, "float32", False),
    ],
)
def test_vllm_for_cpus_is_refused_for_states_without_a_kernel(
    tmp_path: Path, key: int, value: int, dtype: str, fits: bool
):
    hf = hf_of("tiny_qwen3_next")
    hf |= {"linear_key_head_dim": key, "linear_value_head_dim": value}
    asked = f"rollout.dtype={dtype}", write_sizes(tmp_path, hf)
    try:
        compile_plan(CONFIGS / "tiny_qwen3_next.yaml", ("rollout.engine=vllm", *asked))
        problem = ""
    except ConfigError as error:
        problem = str(error)
    assert ("has no other kernels for gated_delta_net" in problem) != fits
