"""vLLM with weights in 8 bits (`rollout.quantization: fp8`).

Needs vLLM (`make .venv/.vllm`), and a processor whose kernels vLLM has for it; `make test-vllm`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make .venv/.vllm", allow_module_level=True)

from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.engine_memory import FP8_BYTES, expert_weights
from pyrl_ext.plan.forecast.parameters import quantized_parameters
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.vllm import quantization
from pyrl_ext.rollout.vllm.engine import VLLMEngine
from pyrl_ext.samples import Sample, Sampling
from tests.helpers.configs import CONFIGS
from tests.helpers.ranks import run_ranks
from tests.helpers.vllm_pair import (
    BLOCK,
    NEEDS_AMX,
    WITH_VLLM,
    Pair,
    drafting_weights,
    prompts,
    random_weights,
    train_on_rank,
    wide_enough,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(),
        reason=NEEDS_AMX,
    ),
]

LARGEST = 448.0  # of e4m3
MODELS = ("tiny", "tiny_qwen3")
SCALES = ("weight_scale_inv", "w13_weight_scale_inv", "w2_weight_scale_inv")
KEPT = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")


def dequantized(matrix: Tensor) -> Tensor:
    """The matrix with the values that 8 bits and a scale for each block have."""
    found = matrix.double().clone()
    for row in range(0, matrix.shape[0], BLOCK):
        for column in range(0, matrix.shape[1], BLOCK):
            block = found[row : row + BLOCK, column : column + BLOCK]
            scale = block.abs().max().float().double() / LARGEST
            block.copy_((block / scale).float().to(torch.float8_e4m3fn).double() * scale)
    return found.float()


def as_quantized(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: weight if weight.dim() < 2 or name.endswith(KEPT) else dequantized(weight)
        for name, weight in weights.items()
    }


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Pair]:
    folder = wide_enough(tmp_path_factory.mktemp("fp8"), request.param)
    pair = Pair(folder, sampling_mask=False, quantization="fp8", dtype="bfloat16")
    yield pair
    pair.vllm.close()


def test_generate_has_the_logprobs_of_quantized_weights(pair: Pair):
    """Of those that were loaded last; what they were before they were quantized differs more."""
    sampling = Sampling(max_new_tokens=24, samples_per_prompt=4)
    exact = HFEngine(pair.config)
    for seed in (1, 2):
        weights = {n: w.bfloat16().float() for n, w in random_weights(pair.hf, seed)}
        pair.vllm.load_weights(weights.items(), version=seed)
        pair.hf.load_weights(as_quantized(weights).items(), version=seed)
        exact.load_weights(weights.items(), version=seed)
        samples = pair.vllm.generate(prompts(5, 33, 100), sampling)
        assert {sample.weight_version for sample in samples} == {seed}
        gaps = [median_gap(engine, samples) for engine in (pair.hf, exact)]
        assert gaps[0] < 0.04 and 3 * gaps[0] < gaps[1], gaps


def median_gap(engine: HFEngine, samples: list[Sample]) -> float:
    """Median difference of the log-probs [nat]: few tokens have other experts, and large ones."""
    gaps = list[Tensor]()
    for sample in samples:
        with torch.no_grad():
            logits = engine.model(sample.tokens[None]).logits[0]
        known = logits[:-1].log_softmax(-1).gather(1, sample.tokens[1:, None])[:, 0]
        gaps.append((known - sample.rollout_logprobs[1:])[sample.loss_mask[1:]].abs())
    return float(torch.cat(gaps).median())


def test_weights_have_the_bytes_of_the_plan(pair: Pair):
    plan = compile_plan(CONFIGS / "tiny.yaml", options_of(pair.config))
    weights = pair.vllm._engine.collective_rpc("get_model")[0].named_parameters()
    held = [(n, p) for n, p in weights if p.dtype == torch.float8_e4m3fn or "scale" in n]
    assert sum(p.numel() for n, p in held if "scale" not in n) == quantized_parameters(plan) > 0
    assert all(name.rpartition(".")[2] in (*quantization.MATRICES, *SCALES) for name, _ in held)


def options_of(folder: Path) -> list[str]:
    family = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    return [
        f"model.config={folder}/config.json",
        f"model.family={family}",
        f"model.tokenizer={CONFIGS}/tiny",
        "rollout.engine=vllm",
        "rollout.dtype=bfloat16",
        "rollout.quantization=fp8",
    ]


def test_load_weights_names_routers_in_8_bits(tmp_path: Path):
    """vLLM quantizes those of this family where nothing excludes them."""
    folder = wide_enough(tmp_path, "tiny_qwen3")
    options = {"quantization": quantization.METHOD}
    check_refused(
        folder, r"3 weights .*\n  model\.layers\.1\.mlp\.gate\.weight is in 8 bits", options
    )


def test_load_weights_names_layers_that_no_kernel_of_cpus_multiplies(tmp_path: Path):
    folder = wide_enough(tmp_path, "tiny", qk_rope_head_dim=16)
    check_refused(folder, "self_attn.kv_a_proj_with_mqa.weight has 48 outputs, expected a multip")


def check_refused(folder: Path, says: str, options: dict[str, Any] | None = None) -> None:
    hf = HFEngine(folder)
    way = None if options else "fp8"
    asked: dict[str, Any] = {"num_experts": 8, "layer_ids": hf.routed.layer_ids, "max_tokens": 64}
    engine = VLLMEngine(folder, dtype="bfloat16", quantization=way, options=options, **asked)
    with closing(engine):
        with pytest.raises(ValueError, match=says):
            engine.load_weights(random_weights(hf, 1), version=1)
        with pytest.raises(RuntimeError, match="left the weights incomplete"):
            engine.generate(prompts(3), Sampling(max_new_tokens=2))


def test_weights_of_narrow_experts_have_the_bytes_of_the_plan(tmp_path: Path):
    """vLLM fills their matrices up to whole blocks; and an MTP layer is quantized as well."""
    sizes = {"moe_intermediate_size": 96, "num_nextn_predict_layers": 1}
    folder = wide_enough(tmp_path, "tiny", **sizes)
    hf = HFEngine(folder)
    asked: dict[str, Any] = {"num_experts": 8, "layer_ids": hf.routed.layer_ids, "max_tokens": 64}
    engine = VLLMEngine(folder, dtype="bfloat16", quantization="fp8", draft_layers=1, **asked)
    plan = compile_plan(
        CONFIGS / "tiny.yaml",
        [*options_of(folder), "model.mtp=true", "rollout.speculation=mtp"],
    )
    with closing(engine):
        engine.load_weights(drafting_weights(hf, folder, 1).items(), version=1)
        samples = engine.generate(prompts(5), Sampling(max_new_tokens=8, samples_per_prompt=4))
        assert len(samples) == 4
        models = [engine._engine.collective_rpc(name)[0] for name in ("get_model", "_draft_model")]
        held = {p for model in models for p in model.parameters() if p.dtype == torch.float8_e4m3fn}
        experts = sum(p.numel() for p in held if p.dim() == 3)
    assert experts == round(expert_weights(plan) / FP8_BYTES)


def test_train_with_quantized_weights_replays_routes(tmp_path: Path):
    folder = wide_enough(tmp_path, "tiny")
    run = ("steps=2", "evaluate.every=0", "log.progress=false", f"run={tmp_path}/run")
    run = (*options_of(folder), *run, "rollout.check_tensors=all")
    config = CONFIGS / "tiny.yaml"
    assert run_ranks(train_on_rank, 1, config, *run, preload=WITH_VLLM) == [0]
    for row in read_rows(tmp_path / "run/metrics.jsonl"):
        assert row["publish/checked"] > 100
        assert 1e-3 < row["mismatch/abs_mean"] < 0.5 and row["route/agree_topk"] < 1
