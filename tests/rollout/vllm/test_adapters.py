"""vLLM applies LoRA adapters from memory as transformers does, or refuses them by name.

Needs vLLM (`make .venv/.vllm`); `make test-vllm` runs it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make .venv/.vllm", allow_module_level=True)

from vllm import envs

from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.vllm.engine import VLLMEngine
from pyrl_ext.samples import Sampling
from tests.helpers.adapters import factors_of, logits, random_tensors
from tests.helpers.configs import hf_of, write_sizes
from tests.helpers.vllm_pair import CONFIGS, prompts

pytestmark = pytest.mark.vllm

DENSE = Lora(rank=4, alpha=6, experts="none")


def started(
    config: Path, hf: HFEngine, lora: Lora, dtype: str = "float32", **more: Any
) -> VLLMEngine:
    """vLLM, which prefills long prompts in parts."""
    return VLLMEngine(
        config,
        num_experts=8 if hf.routed.layer_ids else 0,
        layer_ids=hf.routed.layer_ids,
        max_tokens=256,
        max_num_seqs=16,
        lora=lora,
        dtype=dtype,
        options={"max_num_batched_tokens": 64} | more,
    )


def apart(vllm: VLLMEngine, hf: HFEngine) -> float:
    """Largest difference of log-probs of what vLLM samples."""
    found = []
    for sample in vllm.generate(prompts(5, 33, 150), Sampling(8, samples_per_prompt=2)):
        theirs = logits(hf, sample.tokens[None])[0].log_softmax(-1)[:-1]
        gap = theirs.gather(1, sample.tokens[1:, None])[:, 0] - sample.rollout_logprobs[1:]
        found.append(gap[sample.loss_mask[1:]].abs().max())
    return float(torch.stack(found).max())


@pytest.mark.parametrize("model", ["tiny", "tiny_qwen3"])
def test_adapters_from_memory_are_those_of_transformers(model: str):
    hf = HFEngine(CONFIGS / model, lora=DENSE)
    vllm = started(CONFIGS / model, hf, DENSE)
    whole = random_tensors(hf, 0)
    for engine in (hf, vllm):
        engine.load_weights(whole.items(), 0)
    assert apart(vllm, hf) < 2e-5
    factors = factors_of(random_tensors(hf, 1))
    hf.load_weights(factors.items(), 1, only=factors.keys())
    assert apart(vllm, hf) > 0.1  # vLLM has the earlier ones
    vllm.load_weights(factors.items(), 1, only=factors.keys())
    assert apart(vllm, hf) < 2e-5  # under a new name, so nothing comes from the prefix cache
    assert vllm.checksums(list(hf.shapes())) == hf.checksums(list(hf.shapes()))
    before = vllm.checksums()
    vllm.load_weights((whole | factors).items(), 2)  # all, into modules with adapters
    assert vllm.checksums() == before and apart(vllm, hf) < 2e-5

    part = dict(list(factors.items())[1:])
    with pytest.raises(ValueError, match=r"1 factors are not sent, .*lora_A.* two versions"):
        vllm.load_weights(part.items(), 3, only=part.keys())
    with pytest.raises(RuntimeError, match="loading version 3 failed"):
        vllm.generate(prompts(5), Sampling(2))
    vllm.load_weights((whole | factors).items(), 4)
    vllm._engine.collective_rpc(drop)
    with pytest.raises(RuntimeError, match=r"adapters of loads \[\[None\]\], expected those of"):
        vllm.generate(prompts(5), Sampling(2))
    vllm.close()


def drop(worker: Any) -> None:
    worker.model_runner.lora_manager.remove_all_adapters()


def test_adapters_that_the_build_cannot_apply_are_refused():
    hf = HFEngine(CONFIGS / "tiny")
    with pytest.raises(ValueError, match=r"48 adapters of routed experts, .*build for CPUs lacks"):
        started(CONFIGS / "tiny", hf, Lora(rank=4, alpha=6, targets=["up_proj", "down_proj"]))
    with pytest.raises(ValueError, match="rank 600, expected at most 512"):
        started(CONFIGS / "tiny", hf, Lora(rank=600, alpha=6, experts="none"))


def test_adapters_that_latent_attention_reads_past_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a CPU its kernel takes one shape only (bfloat16 where AMX is), and our engine switches it
    off unless told."""
    wide = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    write_sizes(tmp_path, hf_of() | wide)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    envs.disable_envs_cache()  # an engine that started keeps what it read
    with pytest.raises(ValueError, match="4 adapters that vLLM would not apply") as refused:
        started(tmp_path, HFEngine(tmp_path), DENSE, "bfloat16")
    envs.disable_envs_cache()
    message = "layers.0.self_attn.kv_b_proj: vLLM's latent attention silently reads its weight"
    assert message in str(refused.value)
