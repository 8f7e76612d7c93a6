"""The plan command answers at once: what it imports and how much it does are counted, not timed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pyrl_ext.plan import compile_plan
from tests.helpers.configs import REPOSITORY

pytestmark = pytest.mark.multiprocess

CONFIGS = ("tiny", "tiny_lora", "glm47", "glm47_async", "deepseek_v3", "qwen3_vl_30b")
COUNT = """\
import json, sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
from pyrl_ext.plan.__main__ import main
code = main(sys.argv[1:])
sys.setprofile(None)
print(json.dumps([calls, sorted(sys.modules)]), file=sys.stderr)
sys.exit(code)
"""
# Twice what the largest shipped config takes; a process's start and pydantic's are most of it.
MAX_CALLS = 1_000_000
# With remote engines some 50,000 requests are simulated, in a second or two.
MAX_CALLS_REMOTE = 6_000_000
MAX_MODULES = 500
HEAVY = {"torch", "transformers", "megatron", "numpy", "triton", "vllm"}


@pytest.mark.parametrize("name", CONFIGS)
def test_main_imports_little_and_does_little(name: str):
    command = [sys.executable, "-c", COUNT, f"configs/{name}.yaml"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert run.returncode == 0, run.stderr
    assert "…" not in run.stdout  # nothing is cut where the output is no terminal
    calls, modules = json.loads(run.stderr.splitlines()[-1])
    assert not HEAVY & {module.split(".")[0] for module in modules}
    assert len(modules) < MAX_MODULES
    remote = compile_plan(REPOSITORY / f"configs/{name}.yaml").remote_engines
    assert calls < (MAX_CALLS_REMOTE if remote else MAX_CALLS)
