"""A teacher on the stock server of vLLM: its log-probs of samples are those of transformers.

Needs vLLM (`make .venv/.vllm`); `make test-vllm` runs it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make .venv/.vllm", allow_module_level=True)

from pyrl_ext.parallel import topology
from pyrl_ext.parallel.ports import absence_at
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.trainer.step import RolloutStep
from pyrl_ext.trainer.teacher_servers import TeacherServers
from tests.helpers import teachers
from tests.helpers.deadline import DEADLINE
from tests.helpers.tiny import QUICK, tiny_plan

pytestmark = pytest.mark.vllm

ON_CPU = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
KEY = "secret"


class Served(NamedTuple):
    """A server of a teacher."""

    model: Any
    overrides: tuple[str, ...]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    folder = tmp_path_factory.mktemp("served")
    teacher = folder / "teacher"
    model = teachers.write_dense(teacher, head_dim=32)  # the least of vLLM's attention on CPUs
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_text(KEY)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    options = {
        "model": str(teacher),
        "served-model-name": "taught",
        "host": "127.0.0.1",
        "port": str(port),
        "api-key": KEY,
        "dtype": "float32",
        "max-model-len": "256",
        "max-num-batched-tokens": "256",
        "kv-cache-memory-bytes": str(1 << 28),
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    # not `vllm serve`: with the distribution vllm-cpu that looks for the version of "vllm"
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    command += [*flags, "--enforce-eager"]
    log = folder / "vllm.log"
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | ON_CPU)
    try:
        wait_for(address, process, log)
        own = (f"teacher.model={teacher}", f"teacher.servers=[{address}]")
        yield Served(model, (*own, f"teacher.key={folder / 'key'}"))
    finally:
        process.terminate()
        try:
            process.wait(DEADLINE)
        finally:
            process.kill()


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + DEADLINE
    while absence_at(address) is not None:
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
        time.sleep(0.5)


def test_vllm_scores_samples_as_transformers(served: Served):
    plan = tiny_plan(*QUICK, "objective=opd", *served.overrides)
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        samples = [sample.tokens.clone() for sample in rollout.samples]
        shard, _ = step.score(step.batch_of(rollout, clock), rollout.index, clock)
        found = shard.columns["teacher_logprobs"]
        rows = torch.from_numpy(shard.lengths.sample_of(shard.rows.tokens))
        for number, tokens in enumerate(samples):
            wanted = teachers.logprobs(served.model, tokens).float()
            torch.testing.assert_close(found[rows == number], wanted, atol=1e-4, rtol=0)


def test_vllm_that_takes_shorter_samples_is_refused(served: Served):
    plan = tiny_plan(*QUICK, "objective=opd", *served.overrides, "data.max_prompt_tokens=255")
    message = "taught takes 256 tokens, expected at least 262, .*--max-model-len 262"
    with topology.start(plan) as topo, pytest.raises(RuntimeError, match=message):
        TeacherServers.of(plan, topo)
