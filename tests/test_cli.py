"""`pyrl`: one name for all commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import FAMILIES
from benchmarks.run import TABLES
from pyrl_ext import __version__
from pyrl_ext.cli import COMMANDS, main
from pyrl_ext.parallel.user_code import load_function

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_main_runs_every_command(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert "usage: python -m pyrl_ext" in capsys.readouterr().out


def test_main_names_the_command_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pyrl"])
    for name in ("plan", "train", "report", "doctor"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: pyrl {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_main_helps_without_importing_torch(name: str):
    """In words as they are typed, without the backticks of docstrings."""
    script = (
        "import sys; sys.argv[0] = 'pyrl'; from pyrl_ext.cli import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "except SystemExit as stopped: sys.exit(stopped.code + 100 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: pyrl {name} ")
    assert "`" not in done.stdout and "python -m" not in done.stdout


@pytest.mark.parametrize("name", ["plan", "train", "serve"])
@pytest.mark.parametrize("words", [["--optimizer.lr", "1e-6"], ["--optimizer.lr=1e-6"]])
def test_main_says_how_a_key_is_written(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        main([name, str(ROOT / "configs/tiny.yaml"), *words])
    assert stopped.value.code == 2
    said = f"{words[0]}: a key of the config has no dashes. Write optimizer.lr=1e-6"
    assert said in capsys.readouterr().err


def test_main_returns_the_exit_code_of_the_command(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(ROOT / "configs/tiny.yaml")]) == 0
    assert main(["plan", str(ROOT / "configs/tiny.yaml"), "parallel.tp=3"]) == 2
    assert "3 does not divide" in capsys.readouterr().err


def test_main_finds_functions_in_the_folder_it_is_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As `python -m` does; a script's folder comes first on the path otherwise."""
    (tmp_path / "my_rewards.py").write_text("def close(prompt, text, tokens): return 1.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    config = str(ROOT / "configs/tiny.yaml")
    assert main(["plan", config]) == 0
    assert load_function("data.reward", "my_rewards:close", 3)(None, "", [])
    assert main(["plan", config]) == 0 and sys.path.count(str(tmp_path)) == 1


def test_main_says_that_ctrl_c_stopped_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """While a command imports what it needs, too, which takes seconds."""
    (tmp_path / "slow.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "plan", ("slow", ""))
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "\npyrl plan: stopped by Ctrl-C\n"


def test_main_says_the_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pyrl_ext {__version__}\n"


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_main_ends_without_a_traceback_when_nobody_reads(unbuffered: list[str]):
    """As in `pyrl --help | head -1`: the reader closes the pipe before the command writes."""
    reader, writer = os.pipe()
    os.close(reader)
    script = "import sys; from pyrl_ext.cli import main; sys.exit(main(['--help']))"
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, *unbuffered, "-c", script],
            cwd=ROOT,
            env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_main_raises_a_broken_pipe_that_is_not_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A connection to an engine, for instance."""
    (tmp_path / "broken.py").write_text("raise BrokenPipeError('engine')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "plan", ("broken", ""))
    with pytest.raises(BrokenPipeError, match="engine"):
        main(["plan"])


def test_main_refuses_an_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: pyrl COMMAND" in capsys.readouterr().err
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


# the last word of each: what does not hold
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("plan", 0),
        ("plan stepss=3", 2),
        ("train stepss=3", 2),
        ("serve stepss=3", 2),
    ],
)
def test_main_imports_no_torch_to_say_whether_a_plan_holds(words: str, code: int):
    name, *broken = words.split()
    script = (
        "import sys; from pyrl_ext.cli import main; "
        f"code = main([{name!r}, 'configs/tiny.yaml', *{broken}]); "
        "sys.exit(code + 100 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert ("Did you mean steps?" in done.stderr) == bool(broken)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gater_rows"], "gater_rows: not a family of benchmarks. Did you mean gather_rows?"),
        (["swiglu", "nothing_like_it"], "nothing_like_it: not a family of benchmarks. --list"),
        (["swiglu", "layer"], "layer: a table, expected as the only one"),
        ([], "no FAMILY, expected one or several. --list names them"),
        (["swiglu", "layout", "--json", "x.json"], "--json, --plot: 2 families, expected one"),
    ],
)
def test_bench_refuses_wrong_arguments_without_importing_torch(arguments: list[str], said: str):
    """Counted, not timed: torch and megatron are the seconds that an error would take."""
    script = (
        "import sys; from pyrl_ext.cli import main\n"
        f"try: main(['bench', *{arguments}])\n"
        "except SystemExit as stopped: sys.exit(stopped.code + 100 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr


def test_bench_lists_families_and_tables_without_importing_torch():
    script = (
        "import sys; from pyrl_ext.cli import main; "
        "sys.exit(main(['bench', '--list']) + 100 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert {*lines} == {*FAMILIES, *TABLES} and all(lines.values())
