"""The process of an engine: it ends with its trainer, and says why it cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from pyrl_ext.rollout.process.client import ProcessEngine
from tests.helpers.configs import REPOSITORY
from tests.helpers.deadline import DEADLINE
from tests.helpers.sleeper import unbuildable

pytestmark = pytest.mark.multiprocess

PARENT = """
import sys, time
from pyrl_ext.rollout.process.client import ProcessEngine

engine = ProcessEngine(time.sleep, (3600,), transport="shm", log=sys.argv[1])
print(engine.process.pid, flush=True)
time.sleep(3600)
"""


def test_server_ends_when_its_trainer_is_killed(tmp_path: Path):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert trainer.stdout is not None
    child = os.pidfd_open(int(trainer.stdout.readline()))
    assert wait([child], timeout=0.2) == []
    trainer.kill()
    assert wait([child], timeout=DEADLINE) == [child]
    os.close(child)
    trainer.communicate()


def test_server_reports_why_an_engine_cannot_be_built(tmp_path: Path):
    engine = ProcessEngine(unbuildable, ("no such model",), transport="shm", log=tmp_path / "log")
    with pytest.raises(RuntimeError, match="ImportError: no such model"):
        _ = engine.capabilities
    engine.close()
