"""The run folder: which checkpoint a run resumes from, and when it refuses to start over."""

import json
import shutil
from pathlib import Path

import pytest

from pyrl_ext.parallel.atomic_write import locked
from tests.helpers.rows import numbers
from tests.helpers.saving_runs import run
from tests.helpers.small_disk import fill, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three, tmp_path / "run")


def checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_resume_takes_the_older_checkpoint_when_the_newest_has_no_counters(three, copy, capsys):
    (copy / "checkpoints/step-3/counters.json").unlink()
    assert run(copy, "steps=3") == 0
    out = capsys.readouterr().out
    assert "step-3 has no counters.json: not whole, skipped" in out
    assert f"resuming from {copy}/checkpoints/step-2 (step 2 of 3)" in out
    assert "rows before step" not in out
    assert numbers(copy) == numbers(three)
    assert (copy / "checkpoints/step-3/counters.json").exists()


def test_resume_says_that_metrics_are_gone(copy, capsys):
    (copy / "metrics.jsonl").write_text("")
    assert run(copy, "steps=3") == 0
    said = f"{copy}/metrics.jsonl: 0 rows before step 3, expected one a step: the others are lost"
    assert said in capsys.readouterr().out


def test_check_refuses_to_start_over_unless_resume_is_never(three, copy, capsys):
    shutil.rmtree(copy / "checkpoints")
    before = (copy / "metrics.jsonl").read_bytes()
    assert run(copy, "steps=1") == 1
    error = capsys.readouterr().err
    assert "holds metrics of 3 steps but no whole checkpoint" in error and "resume=never" in error
    assert (copy / "metrics.jsonl").read_bytes() == before
    plan = json.loads((copy / "plan.json").read_bytes())  # of a run that recorded its samples
    (copy / "plan.json").write_text(json.dumps(plan | {"rollout": {"record": "samples"}}))
    for name in ("report.html", "report.csv", "samples"):
        (copy / name).mkdir()
    assert run(copy, "steps=1", "resume=never", "optimizer.lr=0.5") == 0  # also of another plan
    assert f"the earlier run moved to {copy}/before-1" in capsys.readouterr().out
    assert (copy / "before-1/metrics.jsonl").read_bytes() == before
    moved = {"report.html", "report.csv", "samples"}
    assert moved <= {path.name for path in (copy / "before-1").iterdir()}
    assert not moved & {path.name for path in copy.iterdir()}
    assert [row["step"] for row in numbers(copy)] == [0] and checkpoints(copy) == ["step-1"]
    assert run(copy, "steps=1", "resume=never") == 0
    assert checkpoints(copy / "before-2") == ["step-1"]
    assert numbers(copy) == numbers(three)[:1]


def test_check_refuses_to_start_over_beside_damaged_checkpoints(copy, capsys):
    (copy / "metrics.jsonl").unlink()
    for counters in (copy / "checkpoints").glob("*/counters.json"):
        counters.unlink()
    assert run(copy, "steps=3") == 1
    assert "holds step-3 without counters but no whole checkpoint" in capsys.readouterr().err


def test_save_keeps_the_newest_whole_checkpoint_whatever_lies_beside_it(copy):
    """A save that was killed, of a later step: it counts neither as newest nor as kept."""
    folder = copy / "checkpoints"
    shutil.copytree(folder / "step-3", folder / "step-8.writing")
    (folder / "step-abc").mkdir()
    shutil.copyfile(folder / "step-3/counters.json", folder / "step-abc/counters.json")
    assert run(copy, "steps=4", "checkpoint.keep=1") == 0
    assert checkpoints(copy) == ["step-4", "step-abc"]
    assert [row["step"] for row in numbers(copy)] == [0, 1, 2, 3]


def test_resume_past_the_last_step_says_so(copy, capsys):
    before = numbers(copy)
    assert run(copy, "steps=1") == 0
    assert "the run is past steps=1 already: nothing is trained" in capsys.readouterr().out
    assert numbers(copy) == before


def test_resume_with_another_number_of_steps_says_that_the_learning_rate_jumps(tmp_path, capsys):
    folder = tmp_path / "run"
    decays = "optimizer.schedule=linear"
    assert run(folder, "steps=1", decays) == 0
    assert run(folder, "steps=2", decays) == 0
    line = "the linear schedule ends at step 2 now, at 1 when the checkpoint was written: "
    assert line in capsys.readouterr().out
    assert run(folder, "steps=2", decays) == 0
    assert "schedule ends at" not in capsys.readouterr().out


def test_resume_leaves_an_equal_plan_alone_and_survives_a_full_disk(three, tmp_path, capsys):
    with small_disk(tmp_path / "disk", "64m") as disk:
        folder = shutil.copytree(three, disk / "run")
        saved = (folder / "plan.json").read_text()
        fill(disk)
        assert run(folder, "steps=4") == 1  # whichever file comes first
        error = capsys.readouterr().err
        assert "No space left" in error and str(folder) in error
        assert (folder / "plan.json").read_text() == saved
        (disk / "filler").unlink()
        assert run(folder, "steps=4") == 0
        written = (folder / "plan.json").stat()
        assert run(folder, "steps=4") == 0
        assert (folder / "plan.json").stat().st_mtime_ns == written.st_mtime_ns
        assert (folder / "plan.json").stat().st_ino == written.st_ino


def test_resume_sets_the_error_of_an_earlier_start_aside(copy):
    for number in (1, 2):
        (copy / "error.txt").write_text(f"failure {number}")
        assert run(copy, f"steps={3 + number}") == 0
        assert not (copy / "error.txt").exists()
        assert (copy / f"error-{number}.txt").read_text() == f"failure {number}"
    assert run(copy, "steps=1", "resume=never") == 0
    assert (copy / "before-1/error-2.txt").exists() and not [*copy.glob("error*")]


def test_check_names_a_plan_that_is_no_mapping(copy, capsys):
    (copy / "plan.json").write_text("[]")
    assert run(copy, "steps=4") == 2
    assert "plan.json" in (error := capsys.readouterr().err) and "not a saved plan" in error


def test_resume_names_a_row_of_text(copy, capsys):
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": "four"}\n')
    assert run(copy, "steps=4") == 1
    assert "metrics.jsonl:4: step is 'four', not a number" in capsys.readouterr().err


def test_resume_names_a_damaged_checkpoint_and_the_one_to_use(three, copy, capsys):
    file = copy / "checkpoints/step-3/__0_0.distcp"
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)
    assert run(copy, "steps=4") == 1
    error = capsys.readouterr().err
    assert f"{file}: its sha256 is " in error
    assert f"{copy}/checkpoints/step-2, can be used: move {file.parent} away" in error
    file.parent.rename(copy / "away")
    assert run(copy, "steps=3") == 0
    assert numbers(copy) == numbers(three)


def test_train_refuses_a_folder_that_a_second_process_uses(copy, capsys):
    before = (copy / "metrics.jsonl").read_bytes()
    with locked(copy, is_main=True):
        assert run(copy, "steps=4") == 1
    assert "in use by pid " in capsys.readouterr().err
    assert (copy / "metrics.jsonl").read_bytes() == before
    assert not (copy / "error.txt").exists()  # the folder is the other's
