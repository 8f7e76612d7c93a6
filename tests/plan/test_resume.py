"""Which keys a resumed run may change: each key of the schema is in one table, and refusals."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.changes import FILE, PlanChange, read_changes
from pyrl_ext.plan.language.errors import Key, fields_of
from pyrl_ext.plan.plan import FREE_ON_RESUME
from pyrl_ext.plan.resume import NEVER, ON_REQUEST, is_allowed, why_never
from pyrl_ext.train import main
from tests.helpers.tiny import CONFIG

FREE_OF_MODULES = ("parallel", "patches_per_microbatch", "ranks")
LORA = CONFIG.with_name("tiny_lora.yaml")


def keys_below(section: Key) -> Iterator[Key]:
    """Every key that has a single value, entries of `modules` under the name `*`."""
    for name in fields_of(*section):
        key = (*section, name)
        if key == ("modules",):
            key = ("modules", "*")
        if fields_of(*key):
            yield from keys_below(key)
        else:
            yield key


def test_every_key_is_free_on_request_or_never():
    tables = {"free": {*FREE_ON_RESUME}, "on request": {*ON_REQUEST}, "never": {*NEVER}}
    tables["free"] |= {f"modules.*.{name}" for name in FREE_OF_MODULES}
    homeless = []
    used = set[str]()
    for key in keys_below(()):
        around = [".".join(key[:depth]) for depth in range(len(key), 0, -1)]
        places = [(entry, table) for entry in around for table in tables if entry in tables[table]]
        if not places:
            homeless.append(".".join(key))
        used |= {entry for entry, _ in places}
        assert len(places) == len({entry for entry, _ in places}), f"{key} is in two tables"
    assert not homeless, f"add to FREE_ON_RESUME, ON_REQUEST or NEVER: {homeless}"
    unknown = set[str]().union(*tables.values()) - used - {"hf", "teacher_hf"}
    assert not unknown, f"the schema has no such keys: {unknown}"


@pytest.mark.parametrize(
    ("name", "allow", "allowed"),
    [
        ("optimizer.lr", ["optimizer.lr"], True),
        ("optimizer.lr", ["optimizer"], True),
        ("optimizer.lr", ["optimizer.l", "data"], False),
        ("data.task_options.length", ["data.task_options"], True),
        ("data.shuffle", ["data"], False),
        ("modules.vision.lr", ["modules.vision.lr"], True),
        ("lora.rank", ["lora.rank"], False),
    ],
)
def test_is_allowed_knows_sections_and_what_never_changes(
    name: str, allow: list[str], allowed: bool
):
    assert is_allowed(name, allow) == allowed
    assert (why_never(name) is None) == (name not in ("data.shuffle", "lora.rank"))


def refusal_of(saved: Plan, *overrides: str, config: Path = CONFIG) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compile_plan(config, overrides).check_resumes(saved)
    return [problem.message for problem in caught.value.problems]


def test_check_resumes_says_what_differs_and_how_to_allow_it():
    saved = compile_plan(CONFIG)
    differs = "now, 0.003 in the saved plan, expected the same to resume"
    assert refusal_of(saved, "optimizer.lr=1e-4") == [
        f"optimizer.lr: 0.0001 {differs}",
        "1 key differs and may change on request. To continue with the new value, add to the same "
        "command: --allow optimizer.lr. To start afresh, use another run folder",
    ]
    two = "rollout.temperature=0.5", "optimizer.lr=1e-4"
    assert refusal_of(saved, *two, "resume_allow=[rollout]")[-1] == (
        "1 key differs and may change on request. To continue with the new value, add to the same "
        "command: --allow rollout,optimizer.lr. To start afresh, use another run folder"
    )
    assert refusal_of(saved, *two, "seed=1") == [
        "seed: 1 now, 0 in the saved plan, expected the same to resume; "
        "it orders the records and draws the samples of all steps",
        "rollout.temperature: 0.5 now, 1.0 in the saved plan, expected the same to resume",
        f"optimizer.lr: 0.0001 {differs}",
        "Set seed back to resume, or use another run folder to start afresh. To change only the "
        "others, add to the same command: --allow rollout.temperature,optimizer.lr",
    ]
    plan = compile_plan(CONFIG, [*two, "resume_allow=[rollout, optimizer.lr]"])
    assert [tuple(each) for each in plan.check_resumes(saved)] == [
        ("rollout.temperature", 1.0, 0.5),
        ("optimizer.lr", 0.003, 0.0001),
    ]


def test_check_resumes_refuses_another_rank_of_adapters_even_if_lora_is_allowed_in_the_plan():
    saved = compile_plan(LORA)
    changed = compile_plan(LORA, [f"lora.rank={saved.lora.rank * 2}"]) if saved.lora else saved
    listed = changed.model_copy(update={"resume_allow": ["lora"]})  # no rule has seen it
    with pytest.raises(ConfigError, match="the checkpoint holds factors of the old shapes"):
        listed.check_resumes(saved)


def test_train_rejects_a_key_that_never_changes(capsys: pytest.CaptureFixture[str]):
    assert main([str(CONFIG), "--allow", "optimizer.lr,optimizer.betas", "--allow", "seed"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "command line: resume_allow=[optimizer.lr,optimizer.betas,seed]: "
        "optimizer.betas, expected keys that a resumed run can change; "
        "the saved moments are means with the old decays. Use another run folder to change it",
        "command line: resume_allow=[optimizer.lr,optimizer.betas,seed]: "
        "seed, expected keys that a resumed run can change; it orders the records and draws the "
        "samples of all steps. Use another run folder to change it",
    ]


def test_model_diff_names_what_gives_other_tensors():
    plan = compile_plan(CONFIG)
    same = compile_plan(CONFIG, ["seed=3", "parallel.dp=2", "model.dtype=bfloat16", "steps=3"])
    assert same.model_diff(plan) == ()
    other = compile_plan(CONFIG.with_name("tiny_qwen3.yaml"))
    assert [each.name for each in other.model_diff(plan)] == ["model.family"]
    names = {each.name for each in compile_plan(LORA).model_diff(plan)}
    assert {"lora.rank", "lora.targets"} <= names and "lora.publish" not in names


def test_compile_plan_notes_where_a_run_starts_from():
    notes = compile_plan(CONFIG, ["init_from=runs/a", "objective.kl_coef=0.1"]).notes
    assert "init_from runs/a: a new run starts from the weights there" in notes
    assert any("the KL is to random weights (model.weights is null)" in each for each in notes)
    assert not any("starts from random weights" in each for each in notes)


def test_read_changes_returns_what_was_written_and_names_a_damaged_line(tmp_path: Path):
    assert read_changes(tmp_path) == []
    changes = [
        PlanChange.start(tmp_path, optimizer=True),
        PlanChange(
            3, "2026-11-27T18:12:31+00:00", {"optimizer.lr": [0.003, 0.001], "a": [None, 2]}
        ),
    ]
    text = "".join(each.to_json() for each in changes)
    (tmp_path / FILE).write_text(text)
    assert read_changes(tmp_path) == changes
    assert [each.text for each in changes] == [
        f"weights and optimizer state of {tmp_path}",
        "optimizer.lr 0.003 -> 0.001, a null -> 2",
    ]
    (tmp_path / FILE).write_text(text + '{"steps": 3}\n')
    with pytest.raises(ValueError, match=rf"{FILE}:3: .*expected a change of the plan"):
        read_changes(tmp_path)
