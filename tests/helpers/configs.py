"""The shipped configs, the smallest one that compiles, and the problems of one that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.plan import ConfigError, compile_plan

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
TINY = CONFIGS / "tiny/config.json"

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


def install(folder: Path, name: str, version: str, *files: str) -> None:
    """Write the files that pip writes of a package; they fail where they are imported."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("raise AssertionError('imported')")
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def hf_of(name: str = "tiny") -> dict[str, Any]:
    """HF config of a shipped model."""
    return json.loads((CONFIGS / name / "config.json").read_text())


def write_sizes(folder: Path, hf: dict[str, Any]) -> str:
    """Write ``hf`` to config.json of ``folder``; the override that chooses it."""
    (folder / "config.json").write_text(json.dumps(hf))
    return f"model.config={folder}/config.json"
