"""The smallest config that compiles, and the problems of one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyrl_ext.plan import ConfigError, compile_plan

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "configs/tiny/config.json"

SMALL = """\
device: cpu
steps: 10
run: runs/x
model: {family: glm4_moe_lite, config: config.json, tokenizer: owner/name}
batching: {prompts: 4, samples_per_prompt: 2, tokens_per_microbatch: 64}
rollout: {engine: hf, max_new_tokens: 4}
optimizer: {lr: 1e-3}
data: {task: copy, max_prompt_tokens: 8}
"""


def problems_of(path: Path | str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compile_plan(path, overrides)
    return str(caught.value).splitlines()
