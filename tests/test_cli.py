"""`pyrl`: one name for all commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from pyrl_ext.cli import COMMANDS, main

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


def test_main_returns_the_exit_code_of_the_command(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(ROOT / "configs/tiny.yaml")]) == 0
    assert main(["plan", str(ROOT / "configs/tiny.yaml"), "parallel.tp=3"]) == 2
    assert "3 does not divide" in capsys.readouterr().err


def test_main_refuses_an_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: pyrl COMMAND" in capsys.readouterr().err
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_main_imports_no_torch_for_a_plan():
    code = (
        "import sys; from pyrl_ext.cli import main; main(['plan', 'configs/tiny.yaml']); "
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0
