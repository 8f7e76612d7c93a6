"""Ctrl-C: the first one stops after the step, a second one at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyrl_ext.parallel import topology
from pyrl_ext.train.interrupt import Interrupt
from tests.helpers.tiny import CONFIG, tiny_plan

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_handled_stops_after_the_step_then_at_once(number, monkeypatch, capsys):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with topology.start(tiny_plan()):
        interrupt = Interrupt()
        with interrupt.handled():
            assert not interrupt.agreed()
            os.kill(os.getpid(), number)
            assert interrupt.agreed()
            monkeypatch.setattr(Interrupt, "SAME", 1e9)
            os.kill(os.getpid(), number)  # torchrun passes on what the terminal has sent already
            monkeypatch.setattr(Interrupt, "SAME", -1.0)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
    assert capsys.readouterr().out.count("stopping after this step, with a checkpoint") == 1
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_sigterm_while_a_run_starts_is_said(tmp_path: Path):
    """It comes while torch is imported."""
    stub = "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    (tmp_path / "torch.py").write_text(stub)
    run = [sys.executable, "-m", "pyrl_ext.train", str(CONFIG), f"run={tmp_path / 'run'}"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert done.stderr == (
        "pyrl_ext.train: ended by SIGTERM before the first step or after the last one\n"
    )
