"""The objective in a plan: presets, contradictions, old names."""

from pathlib import Path

import pytest

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.schema.objective import Objective, presets, with_preset
from pyrl_ext.plan.schema.turns import Turns
from tests.helpers.configs import CONFIGS


def plan_of(*overrides: str, config: str = "glm47.yaml") -> Plan:
    return compile_plan(CONFIGS / config, overrides)


def written(folder: Path, objective: str) -> Path:
    path = folder / "run.yaml"
    lines = (CONFIGS / "tiny.yaml").read_text().split("\nobjective:")
    rest = lines[1].partition("\n\n")[2]
    text = lines[0].replace("tiny/config.json", str(CONFIGS / "tiny/config.json"))
    text = text.replace("tokenizer: tiny", f"tokenizer: {CONFIGS / 'tiny'}")
    path.write_text(f"{text}\nobjective: {objective}\n\n{rest}")
    return path


def test_compile_plan_takes_a_preset_by_its_name_alone(tmp_path):
    objective = compile_plan(written(tmp_path, "gspo")).objective
    want = Objective.model_validate({"preset": "gspo"} | presets()["gspo"])
    assert objective == want and objective.ratio == "sequence" and objective.clip_high == 4e-4


@pytest.mark.parametrize("name", presets())
def test_compile_plan_takes_every_preset(name, tmp_path):
    teacher = ["teacher.model=zai-org/GLM-4.7"] if "distill_coef" in presets()[name] else []
    plan = compile_plan(written(tmp_path, name), teacher)
    assert plan.objective == Objective.model_validate(with_preset({"preset": name}))
    assert not any("in place of" in note for note in plan.notes)


def test_compile_plan_notes_what_overrides_a_preset():
    plan = plan_of("objective.preset=gspo")
    assert plan.objective.clip_low == 0.2 and plan.objective.ratio == "sequence"
    assert "objective.clip_low: 0.2 in place of 0.0003, the value of preset gspo" in plan.notes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["preset=dpao"], "objective.preset=dpao: 'dpao', expected grpo, dapo, dr_grpo, gspo"),
        (["loss=pppo"], "pppo, expected ppo, cispo, sapo, gmpo, dppo, reinforce, sft, or module"),
        (["advantage=gae"], "gae, expected grpo, rloo, opo, reinforce_pp"),
        (["loss=cispo", "dual_clip=3.0"], "3.0 with loss cispo, expected it left out; only ppo"),
        (["loss=gmpo", "ratio=sequence"], "sequence with loss gmpo, expected it left out"),
        (["loss=reinforce", "anchor=rollout"], "rollout with loss reinforce"),
        (["anchor=rollout"], "rollout with tis_cap 2, expected only one of them"),
        (["tis_cap=null", "tis_floor=0.5"], "0.5 without tis_cap, expected it left out"),
        (["tis_floor=3.0"], "3 with upper bound 2, expected less than that"),
        (["mask_ratio=[2.0,1.0]"], "2 with upper bound 1"),
        (["reduction_constant=5"], "5 without reduction: sequence_sum"),
        (["leave_one_out=true", "advantage=rloo"], "True without advantage: grpo"),
        (["kl_weight=detached"], "detached with kl_gradient reverse, expected ratio or none"),
    ],
)
def test_compile_plan_refuses_parts_that_contradict(overrides, message):
    with pytest.raises(ConfigError) as caught:
        plan_of(*(f"objective.{each}" for each in overrides))
    assert message in str(caught.value)


@pytest.mark.parametrize("part", ["ratio=sequence", "loss=gmpo", "opsm=0.1"])
def test_compile_plan_refuses_sums_over_samples_in_chunks(part):
    plan_of(f"objective.{part}", "parallel.cp=2", "parallel.dp=4")  # exact over several ranks
    with pytest.raises(
        ConfigError, match=r"true with objective.loss \w+, ratio \w+ and opsm .* whole seq"
    ):
        plan_of(f"objective.{part}", "logprob.loss_in_chunk=true")


def test_compile_plan_notes_that_k3_by_itself_descends_the_forward_kl():
    direct = ("objective.kl_coef=0.1", "objective.kl_gradient=direct", "objective.kl_weight=none")
    assert any("descends the forward KL" in note for note in plan_of(*direct).notes)
    assert not any("forward KL" in note for note in plan_of(direct[0]).notes)


def test_most_sampled_of_turns_is_bounded_by_the_trajectory():
    turns = Turns(environment="guess", max_turns=3, max_tokens=64)
    assert Turns().most_sampled(8) == 8 and turns.most_sampled(8) == 24
    assert turns.most_sampled(40) == 64
