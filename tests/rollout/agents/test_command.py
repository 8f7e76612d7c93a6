"""A program of any language as an agent, from the config to the samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyrl_ext import train
from pyrl_ext.data.recordings import load_samples
from tests.helpers.agent_program import SAY
from tests.helpers.guess_calls import write_config
from tests.helpers.rows import rows_of

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# no package: what a program in another language would do
PROGRAM = (
    SAY
    + """
prompt = json.loads(sys.stdin.readline())
assert prompt["text"] == os.environ["PYRL_PROMPT"]

messages = [{"role": "user", "content": prompt["text"]}]
said = say(messages)
again = say([*messages, said, {"role": "user", "content": "+"}])
print("some noise")
print(json.dumps({"first": 0.5 * (said["content"] == str(prompt["answer"])), "again": 0.25}))
"""
)


def test_a_command_is_trained_on(tmp_path: Path):
    program = tmp_path / "agent.py"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    config = write_config(tmp_path, "run", 1, command=[str(program)], timeout=120.0)
    few = "batching.prompts=4", "batching.samples_per_prompt=4", "batching.minibatches=1"
    assert train.main([str(config), *few]) == 0
    (row,) = [row for row in rows_of(tmp_path / "run") if "reward" in row]
    assert row["turns/dropped"] == 0 and row["turns/mean"] == 2 and row["reward"] >= 0.25
    (file,) = (tmp_path / "run-samples").glob("*.safetensors")
    samples = load_samples(file)
    assert samples and all(len(sample.spans) == 2 for sample in samples)
    assert {name for sample in samples for name in sample.components} == {"again", "first"}
