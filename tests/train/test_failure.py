"""The end of a failed run: a message, and never exit code 0."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyrl_ext import train
from pyrl_ext.ops import _native
from pyrl_ext.parallel.atomic_write import FolderError
from pyrl_ext.train.failure import report_failure, report_stop
from tests.helpers.tiny import CONFIG, QUICK, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

ROOT = Path(__file__).parents[2]
LEAVES = """
import ctypes, os, sys
def by_sys(prompt, text, tokens): sys.exit(0)
def by_os(prompt, text, tokens): os._exit(0)
def by_number(prompt, text, tokens): os._exit(7)
def by_crash(prompt, text, tokens): ctypes.string_at(0)
def after_fork(prompt, text, tokens):
    if (child := os.fork()) == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return 1.0
def by_deleting(prompt, text, tokens):
    import shutil
    shutil.rmtree(os.path.join(os.path.dirname(__file__), "leaves:by_deleting"), ignore_errors=True)
    return 1.0
"""


# A process imports what a run needs and forks for each run, which is then the main program of its
# process and ends as that does.
FORKS = """
import json, os, runpy, sys
import pyrl_ext.rollout.hf.engine, pyrl_ext.train.loop

folder, *command = sys.argv[1:]
sys.path.insert(0, folder)
codes = {}
for reward in json.loads(sys.stdin.read()):
    if (child := os.fork()) == 0:
        os.dup2(os.open(f"{folder}/{reward}.txt", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv = ["train", *command, f"run={folder}/{reward}", f"data.reward={reward}"]
        runpy.run_module("pyrl_ext.train", run_name="__main__")
        sys.exit("the module came to its end")
    codes[reward] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""
ENDS = {
    "leaves:by_sys": (1, "raised SystemExit: 0 ("),
    "leaves:by_os": (1, "leaves:by_os(prompt 0, sample 0, completion"),
    "leaves:by_number": (1, "its worker process ended with exit code 7"),
    "leaves:by_crash": (1, 'leaves.py", line 6 in by_crash'),
    "leaves:after_fork": (0, ""),
    "leaves:by_deleting": (1, "metrics.jsonl: was deleted while the run wrote to it, expected"),
    "leaves_at_import:fn": (1, "its worker process ended with exit code 0 as it was loaded"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Reward -> exit code and stderr of the training command with it."""
    folder = tmp_path_factory.mktemp("leaves")
    (folder / "leaves.py").write_text(LEAVES)
    (folder / "leaves_at_import.py").write_text("import os\nos._exit(0)\ndef fn(*_): ...\n")
    data = ("data.task=null", "data.task_options={}", "data.prompts=data/arithmetic.jsonl")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            FORKS,
            str(folder),
            str(CONFIG),
            *QUICK,
            *data,
            "evaluate.every=0",
            "steps=1",
        ],
        cwd=ROOT,
        input=json.dumps([*ENDS]),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    codes = json.loads(done.stdout.splitlines()[-1])
    return {
        reward: (code, (folder / f"{reward}.txt").read_text()) for reward, code in codes.items()
    }


@pytest.mark.parametrize("reward", ENDS)
def test_train_exits_0_only_after_the_last_step(ended, reward):
    code, said = ENDS[reward]
    found, stderr = ended[reward]
    assert found == code, stderr
    assert said in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("name", ["/dev/null", "{}/file/run", "{}/" + "x" * 300])
def test_train_names_a_run_folder_that_cannot_be_made(tmp_path, capsys, name):
    (tmp_path / "file").touch()
    folder = name.format(tmp_path)
    assert train.main([str(CONFIG), f"run={folder}", *QUICK, "steps=1"]) == 1
    error = capsys.readouterr().err
    assert repr(folder) in error and "cannot be written" in error and "Traceback" not in error


def test_train_refuses_an_extension_of_other_sources(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_native, "C", _native.Outdated("_C.so: built from a, expected b"))
    assert train.main([str(CONFIG), f"run={tmp_path}", *QUICK, "steps=1"]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("error: _C.so: built from a, expected b\n") and "most recent" not in error
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "metrics.jsonl/",
            "metrics.jsonl: cannot be read (Is a directory), expected",
        ),
        ("checkpoints", "checkpoints: a file, expected the folder of checkpoints. Move it away"),
    ],
)
def test_train_names_what_is_in_the_way_in_the_run_folder(tmp_path, capsys, name, said):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / name
    path.mkdir() if name.endswith("/") else path.touch()
    assert train.main([str(CONFIG), f"run={tmp_path / 'run'}", *QUICK, "steps=1"]) == 1
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_report_failure_of_a_run_folder_is_the_main_ranks(tmp_path, capsys, monkeypatch):
    for rank, said in (("0", "error: in use\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        report_failure(tmp_path, FolderError("in use"))
        assert capsys.readouterr().err == said
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ValueError("bad luck"), SystemExit(0), KeyError("colour")])
def test_report_failure_writes_the_traceback_or_says_why_not(tmp_path, capsys, error):
    report_failure(tmp_path / "run", error)
    assert type(error).__name__ in (tmp_path / "run/error.txt").read_text()
    message = "exit was called with 0" if isinstance(error, SystemExit) else str(error)
    assert message in capsys.readouterr().err
    report_failure(Path("/dev/null/run"), error)
    assert "no traceback in the run folder" in capsys.readouterr().err


def test_report_failure_keeps_the_traceback_when_stderr_is_closed(tmp_path, monkeypatch):
    closed = (tmp_path / "stderr").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    report_failure(tmp_path, ValueError("the reason"))
    assert "the reason" in (tmp_path / "error.txt").read_text()


def test_report_stop_names_the_checkpoint_or_says_that_there_is_none(tmp_path, capsys):
    plan = tiny_plan(f"run={tmp_path}")
    report_stop(plan, KeyboardInterrupt())
    start = "no step is finished: the same command starts from the beginning\n"
    assert capsys.readouterr().out.endswith(start)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    report_stop(plan, KeyboardInterrupt())
    assert "there is no checkpoint: with resume=never" in capsys.readouterr().out
    checkpoint = tmp_path / "checkpoints/step-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "counters.json").touch()
    report_stop(plan, KeyboardInterrupt())
    assert capsys.readouterr().out.endswith(f"the same command resumes from {checkpoint}\n")
    report_stop(tiny_plan(f"run={tmp_path}", "resume=never"), KeyboardInterrupt())
    assert "the same command without resume=never resumes" in capsys.readouterr().out


def test_report_failure_shortens_and_escapes_a_message(tmp_path, capsys):
    report_failure(tmp_path, ValueError("\ud800" + "x" * 5_000_000))
    assert len(capsys.readouterr().err) < 5000
    assert "\\ud800x" in (tmp_path / "error.txt").read_text()


@pytest.mark.parametrize("text", ["abc", "", "-1"])
def test_train_names_a_world_size_that_is_no_number(tmp_path, capsys, monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    assert train.main([str(CONFIG), f"run={tmp_path}", *QUICK, "steps=1"]) == 2
    assert f"WORLD_SIZE={text!r}, expected a number" in capsys.readouterr().err
