"""transformers + peft and the trainer compute the same with the same adapter, for every family."""

import warnings

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from pyrl_ext.models.peft_folder import CONFIG as CONFIG_FILE
from pyrl_ext.models.peft_folder import TENSORS, read_adapter, save_adapter
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.tools import export
from pyrl_ext.tools.exported import factors
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.configs import hf_of
from tests.helpers.lora import adapters_of, draw_b
from tests.helpers.models import (
    DEEPSEEK,
    GLM,
    HF,
    LLAMA,
    MINIMAX,
    MIXTRAL,
    MOONLIGHT,
    QWEN2,
    QWEN3_SMALL,
    exact_logprobs,
    plan_of,
    write_model,
)
from tests.helpers.tiny import random_batch

pytestmark = pytest.mark.multiprocess

LITE = hf_of()
CASES = {  # model, overrides
    "GLM-4.7-Flash": (LITE, ()),
    "GLM-4.7": (GLM, ("lora.expert_rank=8",)),
    "DeepSeek-V3": (DEEPSEEK, ()),
    "Moonlight": (MOONLIGHT, ("lora.experts=none",)),
    "Qwen3-30B": (HF, ("lora.expert_rank=8",)),
    "Qwen3-30B, shared": (HF, ("lora.experts=shared_outer",)),
    "Qwen3-8B": (QWEN3_SMALL, ()),
    "Llama": (LLAMA, ()),
    "Qwen2": (QWEN2, ()),
    "MiniMax-M2": (MINIMAX, ("lora.expert_rank=8",)),
    "Mixtral": (MIXTRAL, ("lora.expert_rank=8",)),
    "Mixtral, shared": (MIXTRAL, ("lora.experts=shared_outer",)),
}


def logprobs_of(policy, plan, batch):
    schedule = plan_microbatches(batch.seqlens, 1, 128, plan.row_alignment)
    return passes.scores(policy, batch, schedule, replay=False).logprobs


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_is_the_same_in_peft(name, tmp_path):
    hf, overrides = CASES[name]
    write_model(tmp_path / "base", hf)
    lora = ("replay=off", "lora.rank=4", "lora.alpha=8", *overrides)
    plan = plan_of(tmp_path / "base", *lora)
    batch = random_batch(5)
    folder = tmp_path / "adapter"
    with passes.built(plan) as policy:
        draw_b(policy.llm)
        ours = logprobs_of(policy, plan, batch)
        with adapters_of(policy.llm).off():
            base = logprobs_of(policy, plan, batch)
        save_adapter(folder, factors(policy), plan, policy.topo)
        drawn = {n: t.clone() for n, t in factors(policy)}
        again = plan_of(tmp_path / "base", *lora, f"lora.weights={folder}")
        started = Policy.build(again, policy.topo, trainable=False)
        assert all(t.equal(drawn[n]) for n, t in factors(started))
    exact = {"dtype": torch.float64, "experts_implementation": "eager"}  # no grouped products
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **exact).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        theirs = PeftModel.from_pretrained(model, folder).eval()
    assert (ours - base).abs().max() > 0.05
    # processors round float32 differently: up to 1.0014e-5 was seen, with AMX
    torch.testing.assert_close(ours, exact_logprobs(theirs, batch), atol=2e-5, rtol=0)
    theirs.save_pretrained(tmp_path / "again")
    assert plan.lora is not None
    table = adapters_of(started.llm).table
    saved_by_peft = read_adapter(tmp_path / "again", plan.lora, plan.sizes, table, ())
    assert all(torch.equal(saved_by_peft[n], tensor) for n, tensor in drawn.items())


def test_export_writes_the_adapters_of_a_run_or_its_merged_model(tmp_path, capfd):
    write_model(tmp_path / "base", HF)
    lora = ("lora.rank=4", "lora.alpha=8")
    run = tmp_path / "run"
    batch = random_batch(5)
    with passes.built(plan := plan_of(tmp_path / "base", "replay=off", *lora)) as policy:
        draw_b(policy.llm)
        ours = logprobs_of(policy, plan, batch)
        policy.save(run / "checkpoints/step-0")
        save_adapter(tmp_path / "wanted", factors(policy), plan, policy.topo)
        whole = Policy.build(plan_of(tmp_path / "base", "replay=off"), policy.topo)
        whole.save(tmp_path / "whole/checkpoints/step-0")
    assert export.main([str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    for file in (CONFIG_FILE, TENSORS):
        assert (tmp_path / "adapter" / file).read_bytes() == (
            tmp_path / "wanted" / file
        ).read_bytes()
    assert export.main([str(run), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(ours, exact_logprobs(merged, batch), atol=1e-5, rtol=0)
    assert export.main([str(tmp_path / "whole"), str(tmp_path / "none"), "--adapter"]) == 1
    assert "step-0 has no adapters" in capfd.readouterr().err
