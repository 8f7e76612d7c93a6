"""The section `lora`: an optional section of the language, and what a plan says of adapters."""

from __future__ import annotations

from pathlib import Path

from pyrl_ext.plan import Plan, compile_plan
from tests.helpers.configs import REPOSITORY

TINY = REPOSITORY / "configs/tiny.yaml"
ON = ("lora.rank=8", "lora.alpha=16")


def test_compile_plan_takes_an_optional_section_and_leaves_it_out(tmp_path: Path):
    assert compile_plan(TINY).lora is None
    parent = tmp_path / "parent.yaml"
    parent.write_text(f"extends: {TINY}\nlora: {{rank: 4, expert_rank: 2, alpha: 8}}\n")
    plan = compile_plan(parent, ["lora.alpha=16"])
    lora = plan.lora
    assert lora is not None
    assert (lora.rank_of(False), lora.rank_of(True)) == (4, 2)
    assert (lora.scale_of(False), lora.scale_of(True)) == (4, 8)
    assert Plan.from_json(plan.to_json()) == plan
    assert compile_plan(parent, ["lora=null"]).lora is None
    child = tmp_path / "child.yaml"
    child.write_text("extends: parent.yaml\nlora: null\n")
    assert compile_plan(child).lora is None


def test_diff_of_plans_names_what_lora_changes():
    plain, tuned = compile_plan(TINY), compile_plan(TINY, ON)
    assert "lora.rank: 8 now, null in the saved plan" in [str(d) for d in tuned.diff(plain)]
    assert not tuned.diff(compile_plan(TINY, [*ON, "lora.publish=merge"]))
