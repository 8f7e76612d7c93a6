"""A plan names the package of TransformerEngine that is missing, and imports none."""

import sys

import pytest

from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.plan.rules.te import INSTALL
from tests.helpers.configs import CONFIGS, hf_of, install, write_sizes

TINY = CONFIGS / "tiny.yaml"
TE = ("device=cuda", "model.backend=te")


PACKAGE = (
    "transformer_engine/__init__.py",
    "transformer_engine/pytorch/fp8.py",
    "transformer_engine_torch.py",
)


@pytest.mark.parametrize(
    ("version", "without", "problem"),
    [
        ("2.20.2", "", None),
        ("2.14.0", "", None),
        ("2.13.9", "", "transformer-engine 2.13.9, expected 2.14 to before 3.0"),
        ("3.0.0", "", "transformer-engine 3.0.0, expected 2.14 to before 3.0"),
        ("2.20.2", "transformer_engine_torch.py", "transformer_engine_torch is not installed"),
        ("2.20.2", "transformer_engine/pytorch/fp8.py", "silently uses other layers"),
    ],
)
def test_te_problems_name_the_package_and_the_command(
    tmp_path, monkeypatch, version, without, problem
):
    if "transformer_engine" in sys.modules:
        pytest.skip("TransformerEngine is imported in this process")
    monkeypatch.syspath_prepend(str(tmp_path))
    files = [file for file in PACKAGE if file != without]
    install(tmp_path, "transformer-engine", version, *files)
    found = [each for each in compile_plan(TINY, TE).unsupported if "model.backend" in each]
    assert len(found) == (problem is not None), found
    if problem:
        assert problem in found[0] and INSTALL in found[0]


def test_te_problems_without_any_package():
    if "transformer_engine" in sys.modules:
        pytest.skip("TransformerEngine is imported in this process")
    (found,) = (x for x in compile_plan(TINY, TE).unsupported if "model.backend" in x)
    assert "transformer_engine is not installed" in found and INSTALL in found
    assert not any("backend" in each for each in compile_plan(TINY, TE[:1]).unsupported)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        # what a rank holds whole, over 4 ranks: a quarter of it is no multiple, and need not be
        ({"q_lora_rank": 48, "kv_lora_rank": 16}, None),
        ({"q_lora_rank": 40}, "q_lora_rank 40"),
        ({"kv_lora_rank": 40, "qk_rope_head_dim": 24}, "kv_lora_rank 40"),
        ({"qk_rope_head_dim": 8}, "kv_lora_rank + qk_rope_head_dim 40"),
        ({"hidden_size": 72}, "hidden_size 72"),
        # what ranks split
        ({"intermediate_size": 96}, "intermediate_size 96 / tp 4"),
        ({"moe_intermediate_size": 32}, "moe_intermediate_size * n_shared_experts 32 / tp 4"),
    ],
    ids=str,
)
def test_fp8_widths_are_those_of_a_rank(tmp_path, changes, problem):
    wide = {"moe_intermediate_size": 64, "intermediate_size": 192}
    ranks = ("parallel.tp=4", "parallel.ep=4", "parallel.etp=1")
    given = (write_sizes(tmp_path, hf_of() | wide | changes), "model.dtype=bfloat16", *ranks)
    given = (*TE, *given, "model.fp8=tensorwise", "batching.tokens_per_microbatch=512")
    if problem is None:
        assert compile_plan(TINY, given).model.fp8 == "tensorwise"
        return
    with pytest.raises(ConfigError) as caught:
        compile_plan(TINY, given)
    assert f"model.fp8=tensorwise: tensorwise with {problem} (" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "fp8_param",
        "fp8_output_proj",
        "fp8_amax_history_len",
        "apply_rope_fusion",
        "tp_comm_overlap",
        "mla_down_proj_fusion",
        "moe_router_fusion",
        "moe_router_padding_for_quantization",
        "use_transformer_engine_op_fuser",
        "cuda_graph_impl",
        "fp8_dot_product_attention",
        "attention_backend",
        "fp8_recipe",
        "moe_grouped_gemm",
        "cp_comm_type",
        "fused_single_qkv_rope",
        "fp8_multi_head_attention",
        "qk_clip",
    ],
)
def test_megatron_fields_that_te_cannot_have_are_refused_with_the_reason(name):
    words = rf"model\.megatron\.{name}=true: true, expected it (left out|unset); "
    with pytest.raises(ConfigError, match=words):
        compile_plan(TINY, (*TE, f"model.megatron.{name}=true"))
