"""Renamed keys: the old name works for one version, wherever it may be written, and is named."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.language.errors import fields_of
from pyrl_ext.plan.language.renamed import MOVED, RENAMED, current, renamed_tree

REPOSITORY = Path(__file__).parents[2]
CONFIG = str(REPOSITORY / "configs/glm47.yaml")
VALUES = {"per_node": 4, "memory": 0.4, "max_running": 128, "logprobs": "processed"}
ONLY = "only this version accepts the old name"


@pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=lambda key: str(key))
def test_current_names_a_key_of_the_schema(old: tuple[str, str], new: str):
    section, name = old
    assert current(old) == (section, new)
    assert new in fields_of(section) and name not in fields_of(section)
    assert current((section, "tp")) == (section, "tp")


@pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=lambda key: str(key))
def test_compile_plan_accepts_the_old_name(tmp_path: Path, old: tuple[str, str], new: str):
    """In a file, in a parent and as an override, each with a note."""
    (section, name), value = old, VALUES[old[1]]
    config = tmp_path / "child.yaml"
    config.write_text(
        f"extends: {CONFIG}\nhardware: {{gpu: null}}\n{section}:\n  {name}: {value}\n"
    )
    if section == "hardware":
        config.write_text(f"extends: {CONFIG}\n{section}:\n  gpu: null\n  {name}: {value}\n")
    told = f"{section}.{name} was renamed to {section}.{new}; {ONLY}"
    plan = compile_plan(config)
    assert getattr(getattr(plan, section), new) == value
    assert f"{config}:4: {told}" in plan.notes
    grandchild = tmp_path / "grandchild.yaml"
    grandchild.write_text("extends: child.yaml\n")
    assert f"{config}:4: {told}" in compile_plan(grandchild).notes
    override = f"{section}.{name}={value}"
    plan = compile_plan(CONFIG, ["hardware.gpu=null", override])
    assert getattr(getattr(plan, section), new) == value
    assert f"command line: {override}: {told}" in plan.notes
    assert not any("renamed" in note for note in compile_plan(CONFIG).notes)


def test_compile_plan_merges_both_names_of_a_key(tmp_path: Path):
    (tmp_path / "parent.yaml").write_text(f"extends: {CONFIG}\nrollout: {{memory: 0.3}}\n")
    config = tmp_path / "child.yaml"
    config.write_text("extends: parent.yaml\nrollout: {gpu_memory_utilization: 0.4}\n")
    assert compile_plan(config).rollout.gpu_memory_utilization == 0.4
    assert compile_plan(config, ["rollout.memory=0.35"]).rollout.gpu_memory_utilization == 0.35


def test_compile_plan_refuses_both_names_in_one_place(tmp_path: Path):
    config = tmp_path / "both.yaml"
    config.write_text(
        f"extends: {CONFIG}\nrollout:\n  memory: 0.3\n  gpu_memory_utilization: 0.4\n"
    )
    with pytest.raises(
        ConfigError, match=r"rollout\.gpu_memory_utilization: repeated, first on li"
    ):
        compile_plan(config)
    both = ["rollout.memory=0.3", "rollout.gpu_memory_utilization=0.3"]
    with pytest.raises(ConfigError, match=r"repeats rollout\.memory=0\.3"):
        compile_plan(CONFIG, both)


def test_compile_plan_names_the_new_key_in_a_problem(tmp_path: Path):
    config = tmp_path / "wrong.yaml"
    config.write_text(f"extends: {CONFIG}\nrollout: {{memory: 2}}\n")
    with pytest.raises(ConfigError) as caught:
        compile_plan(config)
    assert f"{config}:2: rollout.gpu_memory_utilization: 2, expected at most 1" in str(caught.value)


MOVED_REWARD = "pyrl_ext.rollout.rewards:number_match"


def test_compile_plan_accepts_the_old_place_of_a_reward(tmp_path: Path):
    """In a file, as an override and in a saved plan; the reward of an earlier run is the same."""
    new = MOVED[MOVED_REWARD]
    told = f"{MOVED_REWARD} was renamed to {new}; {ONLY}"
    config = tmp_path / "child.yaml"
    config.write_text(f"extends: {CONFIG}\ndata:\n  reward: {MOVED_REWARD}\n")
    plan = compile_plan(config)
    assert plan.data.reward == new and f"{config}:3: data.reward: {told}" in plan.notes
    override = f"data.reward={MOVED_REWARD}"
    plan = compile_plan(CONFIG, [override])
    assert plan.data.reward == new and f"command line: {override}: {told}" in plan.notes
    saved = tmp_path / "plan.json"
    saved.write_text(plan.to_json().replace(f'"reward": "{new}"', f'"reward": "{MOVED_REWARD}"'))
    assert MOVED_REWARD in json.loads(saved.read_text())["data"].values()
    plan.check_resumes(Plan.read(saved))


@pytest.mark.parametrize("new", MOVED.values())
def test_moved_names_functions_that_exist(new: str):
    module, function = new.split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_main_prints_the_note(capsys: pytest.CaptureFixture[str]):
    assert main([CONFIG, "rollout.memory=0.35"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rollout.memory was renamed to rollout.gpu_memory_utilization" in said


def test_plan_reads_what_an_older_version_saved(tmp_path: Path):
    """So that its run can be resumed: the same fields, none of which differs."""
    plan = compile_plan(CONFIG, ["rollout.max_num_seqs=128"])
    tree = json.loads(plan.to_json())
    for (section, old), new in RENAMED.items():
        tree[section][old] = tree[section].pop(new)
    del tree["data"]["reward_timeout"]
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(tree))
    assert renamed_tree(tree)["rollout"]["max_num_seqs"] == 128
    assert Plan.read(saved).model_dump() == plan.model_dump()
    plan.check_resumes(Plan.read(saved))
