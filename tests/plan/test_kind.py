"""Runs with and without rollouts: which keys each takes, and what their plans show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.flops import update_flops
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.workload import step_samples
from pyrl_ext.plan.language.errors import fields_of
from pyrl_ext.plan.language.kind import REQUIRED, WITH_ROLLOUTS, WITHOUT_ROLLOUTS
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html.page import plan_page
from tests.helpers.configs import REPOSITORY, problems_of
from tests.helpers.plan_pages import printed, time_of

SFT, TINY = (REPOSITORY / f"configs/{name}.yaml" for name in ("tiny_sft", "tiny"))


def sft(*overrides: str) -> Plan:
    return compile_plan(SFT, overrides)


def test_REQUIRED_keys_and_those_of_both_kinds_exist_and_are_read():
    for key in (*WITH_ROLLOUTS, *WITHOUT_ROLLOUTS, *REQUIRED[True], *REQUIRED[False]):
        assert key[-1] in fields_of(*key[:-1]), key
    for rollouts, unread in ((True, WITHOUT_ROLLOUTS), (False, WITH_ROLLOUTS)):
        assert not {*REQUIRED[rollouts]} & {*unread}
        assert not {key[:1] for key in REQUIRED[rollouts]} & {*unread}


def test_compile_plan_takes_objective_sft_for_its_loss(tmp_path: Path):
    plan = sft()
    assert (plan.objective.loss, plan.has_rollouts, plan.replay.enabled) == ("sft", False, False)
    assert (plan.samples, plan.samples_per_minibatch, plan.longest) == (32, 16, 191)
    assert plan.records_path == str(REPOSITORY / "configs/data/countdown.jsonl")
    for other in (sft("objective=sft"), sft("objective.loss=sft"), sft("objective.mtp_coef=0.1")):
        assert other.fingerprint == plan.fingerprint
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {SFT}\nobjective: {{mtp_coef: 0.2}}\nseed: 1\n")
    objective = compile_plan(child).objective
    assert (objective.loss, objective.mtp_coef) == ("sft", 0.2)
    with_rollouts = compile_plan(TINY)
    assert with_rollouts.has_rollouts and with_rollouts.replay.enabled
    assert Plan.from_json(plan.to_json()) == plan


def test_compile_plan_gives_a_loss_of_the_user_over_records_no_rollouts():
    plan = sft("objective=configs.examples.loss:tapered")
    assert not plan.has_rollouts and not plan.replay.enabled
    found = problems_of(SFT, "objective=grpo")
    assert any("only a run without rollouts (objective: sft) reads it" in line for line in found)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.engine=hf",), "rollout: set, expected it left out; only a run with rollouts"),
        (("replay=on",), "set, expected it left out; only a run with rollouts reads it"),
        (("objective.clip_low=0.1",), "0.1, expected it left out; only a run with rollouts reads"),
        (("data.task=copy",), "'copy', expected it left out; only a run with rollouts reads it"),
        (("batching.samples=0",), "0, expected at least 1; records of data.path per step"),
        (("batching.samples=200000",), "200000, expected at most 131072"),
        (("data.max_tokens=600",), "600, expected at most max_position_embeddings 512"),
        (("data.held_out=0",), "0 with evaluate.every 10, expected at least 1. Use every: 0"),
    ],
)
def test_compile_plan_refuses_what_a_run_without_rollouts_cannot_take(overrides, message):
    found = problems_of(SFT, *overrides)
    assert any(message in line for line in found), found
    assert len(found) <= 2


def test_stage_memory_and_step_time_without_rollouts_are_of_the_update_alone():
    plan = sft("device=cuda", "hardware.gpu=H100", "estimate.spread=1.2")
    (stage,) = stage_memory(plan)
    assert stage.phases == ("update",) == tuple({p for i in stage.items for p in i.phases})
    assert not {"engine", "publish", "forward pass", "routes"} & {i.name for i in stage.items}
    time = time_of(plan)
    assert {cost.phase for cost in time.costs} == {"update"}
    assert time.total == time.seconds("update")
    samples = step_samples(plan)
    assert len(samples) == 32 and max(s.prompt + s.response for s in samples) <= 192
    assert time.model_flops == update_flops(plan)
    with_rollouts = time_of(compile_plan(TINY, ["device=cuda", "hardware.gpu=H100"]))
    assert {"old_logprobs", "rollout"} < {cost.phase for cost in with_rollouts.costs}


def test_plan_page_of_a_run_without_rollouts_speaks_of_records_alone():
    plan = sft("device=cuda", "hardware.gpu=H100")
    everything = "\n".join(printed(plan, 200, everything=True))
    assert "32 records of data/countdown.jsonl, without rollouts" in everything
    page = re.sub(r"<(script|style)>.*?</\1>", "", plan_page(plan), flags=re.DOTALL)
    for text in (everything, page):
        assert not re.search(r"rollout(?!s)|publish|kl_coef|replay|(?<!mer-)engine(?!s)", text)
    with_rollouts = "\n".join(printed(compile_plan(TINY), 200, everything=True))
    assert "data.max_prompt_tokens=" in with_rollouts
    assert "data.max_tokens=" not in with_rollouts
