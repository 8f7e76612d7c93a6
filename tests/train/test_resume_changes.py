"""A run that goes on with a changed plan, and one that starts from the weights of another."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from pyrl_ext.plan.changes import FILE, read_changes
from pyrl_ext.tools.report.events import events
from pyrl_ext.tools.report.state import Folder
from tests.helpers import passes
from tests.helpers.checkpoints import content
from tests.helpers.configs import hf_of, write_sizes
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import numbers
from tests.helpers.saving_runs import run
from tests.helpers.tiny import CONFIG, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

ROOT = Path(__file__).parents[2]
MOMENTS = ("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")


@pytest.fixture
def two(three: Path, tmp_path: Path) -> Path:
    """The folder of that run as it was after two steps."""
    folder = shutil.copytree(three, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints/step-3")
    return folder


# Resuming ----------------------------------------------------------------------------------------


def test_resume_uses_and_records_an_allowed_lr(three, two, capsys):
    changed = ("optimizer.lr=1e-4", "--allow", "optimizer.lr")
    assert run(two, "steps=4", *changed) == 0
    assert (
        f"changed on request: optimizer.lr 0.003 -> 0.0001 (recorded in {two / FILE})\n"
        in capsys.readouterr().out
    )
    rows = numbers(two)
    assert [row["lr"] for row in rows] == [0.003, 0.003, 0.0001, 0.0001]
    before = numbers(three)
    assert rows[:2] == before[:2] and rows[2]["reward"] == before[2]["reward"]
    assert rows[2]["loss"] != before[2]["loss"]  # after the first of its two updates
    saved = json.loads((two / "plan.json").read_bytes())
    assert (saved["optimizer"]["lr"], saved["resume_allow"]) == (1e-4, ["optimizer.lr"])
    (change,) = read_changes(two)
    assert (change.step, change.changed) == (2, {"optimizer.lr": [0.003, 0.0001]})
    assert (2, "plan changed", f"{change.text} ({change.time})") in [
        (event.step, event.name, event.detail) for event in events(0, Folder(two))
    ]
    assert run(two, "steps=5", *changed) == 0  # the same plan: nothing changes again
    assert "changed on request" not in capsys.readouterr().out and read_changes(two) == [change]
    assert run(two, "steps=5", "resume=never") == 0  # the record is the earlier run's
    assert (two / "before-1" / FILE).exists() and not (two / FILE).exists()


def test_resume_without_permission_says_what_differs_and_how_to_allow_it(two, capsys):
    plan = (two / "plan.json").read_bytes()
    changed = "optimizer.lr=1e-4", "objective.entropy_coef=0.1"
    assert run(two, "steps=4", *changed) == 2
    assert capsys.readouterr().err.splitlines()[-3:] == [
        f"{CONFIG}: objective.entropy_coef: 0.1 now, 0.02 in the saved plan, expected the same to "
        "resume",
        f"{CONFIG}: optimizer.lr: 0.0001 now, 0.003 in the saved plan, expected the same to resume",
        f"{CONFIG}: 2 keys differ and may change on request. To continue with the new values, add "
        "to the same command: --allow objective.entropy_coef,optimizer.lr. To start afresh, use "
        "another run folder",
    ]
    assert (two / "plan.json").read_bytes() == plan and not (two / FILE).exists()
    assert run(two, "steps=3", *changed, "--allow", "objective.entropy_coef,optimizer.lr") == 0
    assert [row["lr"] for row in numbers(two)] == [0.003, 0.003, 0.0001]


def test_resume_never_changes_what_the_checkpoint_depends_on(two, capsys):
    assert run(two, "steps=4", "seed=3", "optimizer.lr=1e-4", "--allow", "optimizer.lr") == 2
    error = capsys.readouterr().err
    assert "seed: 3 now, 0 in the saved plan, expected the same to resume; it orders the" in error
    assert "Set seed back to resume, or use another run folder" in error
    assert run(two, "steps=4", "seed=3", "--allow", "seed") == 2
    assert "seed, expected keys that a resumed run can change; it orders" in capsys.readouterr().err


def test_resume_follows_the_advice_of_troubleshooting(two, capsys):
    """The row about a gradient that is not finite: its arguments after those of the run."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `the gradient norm of up")]
    (advice,) = re.findall(r"`(optimizer\.lr=[^`]+ --allow [^`]+)`", row)
    assert run(two, "steps=4", *advice.split()) == 0
    assert f"resuming from {two}/checkpoints/step-2" in capsys.readouterr().out
    lr = [row["lr"] for row in numbers(two)]
    assert lr[:2] == [0.003] * 2 and lr[2] == lr[3] < 0.003


def test_resume_keeps_its_place_in_the_schedule_with_other_epochs(two):
    """Two steps of two updates each are as far as two of four."""
    epochs = ("batching.epochs=2", "--allow", "batching.epochs")
    assert run(two, "steps=3", *epochs) == 0
    counters = json.loads((two / "checkpoints/step-3/counters.json").read_bytes())
    assert (counters["step"], counters["updates"]) == (3, 12)


# Starting from another run -----------------------------------------------------------------------


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's model."""
    return {k: t for k, t in content(folder).items() if not k.startswith("optimizer")}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys() and found
    for key, tensor in found.items():
        assert tensor.dtype == wanted[key].dtype and torch.equal(tensor, wanted[key]), key


def test_init_from_starts_a_new_run_from_the_newest_checkpoint(three, tmp_path, capsys):
    folder = tmp_path / "new"
    newest = three / "checkpoints/step-3"
    options = f"init_from={three}", "init_optimizer=true", "seed=5", "optimizer.lr=0"
    assert run(folder, "steps=2", *options) == 0
    out = capsys.readouterr().out
    said = f"step 0 starts from: weights and optimizer state of {newest} (recorded in"
    assert said in out and "resuming" not in out
    assert [row["step"] for row in numbers(folder)] == [0, 1]
    assert_equal(model_of(folder / "checkpoints/step-1"), model_of(newest))  # lr is 0
    counters = json.loads((folder / "checkpoints/step-2/counters.json").read_bytes())
    assert (counters["step"], counters["updates"]) == (2, 4)
    assert content(folder / "checkpoints/step-2")["optimizer"] == {"step": 6 + 4}
    (change,) = read_changes(folder)
    assert (change.step, change.init_from, change.init_optimizer) == (0, str(newest), True)
    assert "started from" in [event.name for event in events(0, Folder(folder))]
    assert run(folder, "steps=3", *options) == 0  # the same command resumes
    assert f"resuming from {folder}/checkpoints/step-2" in capsys.readouterr().out
    assert read_changes(folder) == [change]


def start(group, source, folder, optimizer, *overrides):
    with passes.built(tiny_plan(*overrides)) as policy:
        policy.start_from(source, optimizer)
        policy.save(folder)
        return policy.step, policy.updates


@pytest.mark.parametrize("optimizer", [True, False])
def test_start_from_takes_every_bit_under_another_layout(three, tmp_path, optimizer):
    source = three / "checkpoints/step-2"
    layout = "parallel.dp=2", "parallel.ep=2", "optimizer.distributed=true"
    folder = tmp_path / "step-0"
    assert run_ranks(start, 2, source, folder, optimizer, *layout) == [(0, 0)] * 2
    wanted = dict(content(source))
    found = dict(content(folder))
    steps = wanted.pop("optimizer"), found.pop("optimizer")
    assert steps == ({"step": 4}, {"step": 4 if optimizer else 0})
    moments = [key for key in wanted if key.startswith(MOMENTS)]
    assert len(moments) > 50 and any(wanted[key].any() for key in moments)
    if not optimizer:
        wanted |= {key: torch.zeros_like(wanted[key]) for key in moments}
    assert_equal(found, wanted)


def test_start_from_keeps_the_precision_of_weights_in_bfloat16(three, tmp_path):
    """The weights that the optimizer steps stay float32; those of the model are rounded."""
    source = three / "checkpoints/step-2"
    start(None, source, tmp_path / "step-0", False, "model.dtype=bfloat16")
    wanted = content(source)
    found = content(tmp_path / "step-0")
    for key, tensor in found.items():
        if key.startswith("optimizer.state.param."):
            assert torch.equal(tensor, wanted[key]), key
        elif not key.startswith("optimizer"):
            assert torch.equal(tensor, wanted[key].to(tensor.dtype)), key
    assert any(tensor.dtype == torch.bfloat16 for tensor in model_of(tmp_path / "step-0").values())


def test_init_from_refuses_another_model(three, tmp_path, capsys):
    newest = three / "checkpoints/step-3"
    sizes = write_sizes(tmp_path, hf_of() | {"moe_intermediate_size": 48})
    assert run(tmp_path / "a", "steps=1", f"init_from={three}", sizes) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"{CONFIG}: init_from: {newest} holds another model, expected the same; "
        f"hf.moe_intermediate_size: 48 now, {hf_of()['moe_intermediate_size']} in the saved plan"
    )
    assert run(tmp_path / "b", "steps=1", f"init_from={newest}", "lora={rank: 4, alpha: 8}") == 2
    assert "lora.rank: 4 now, null in the saved plan" in capsys.readouterr().err


def test_init_from_refuses_to_train_what_the_other_run_froze(tmp_path, capsys):
    """It may freeze more; a resumed run freezes the same."""
    gates = "'*.mlp.gate.weight'"
    first = tmp_path / "first"
    assert run(first, "steps=1", f"model.freeze=[{gates}]") == 0
    assert run(first, "steps=2", "--allow", "model.freeze") == 2
    assert "the optimizer state of the weights that were trained" in capsys.readouterr().err
    assert run(tmp_path / "a", "steps=1", f"init_from={first}") == 2
    assert (
        "step-1 is of a run with model.freeze ['*.mlp.gate.weight'], expected it to have trained "
        "all that this run trains; it has no optimizer state of decoder.layers.1.mlp.router.weight "
        "(3 tensors)"
    ) in capsys.readouterr().err
    more = f"model.freeze=[{gates}, model.norm.weight]"
    assert run(tmp_path / "b", "steps=1", f"init_from={first}", more) == 0


def test_init_from_refuses_the_state_of_another_optimizer(three, tmp_path, capsys):
    newest = three / "checkpoints/step-3"
    options = (f"init_from={three}", "optimizer.name=muon", "init_optimizer=true")
    assert run(tmp_path / "a", "steps=1", *options) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"{CONFIG}: init_from: {newest} holds the optimizer state of adamw, expected that of muon. "
        "Leave init_optimizer out to start from its weights alone"
    )


def test_init_from_refuses_what_is_no_checkpoint_of_another_run(two, tmp_path, capsys):
    assert run(tmp_path / "a", "steps=1", f"init_from={tmp_path / 'none'}") == 2
    error = capsys.readouterr().err
    assert f"init_from: {tmp_path / 'none'} is not a folder, expected a run folder" in error
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").touch()
    assert run(tmp_path / "a", "steps=1", f"init_from={tmp_path / 'hf'}") == 2
    assert "It holds a Hugging Face model: name it as model.weights" in capsys.readouterr().err
    assert run(two, "steps=1", f"init_from={two}", "resume=never") == 2
    assert "step-2 is a checkpoint of this run, expected one of" in capsys.readouterr().err
    assert (two / "checkpoints/step-2").exists()
    assert run(two, "steps=3", f"init_from={tmp_path}") == 2  # it has checkpoints already
    assert "a run reads it once, before its first step" in capsys.readouterr().err
