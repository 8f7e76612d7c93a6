"""A run of a small model on prompts with pictures: its files and its YAML."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pyrl_ext.samples import Prompt
from tests.helpers.configs import CONFIGS

YAML = """
device: cpu
threads: 1
steps: 2
run: {folder}/run
model: {{family: qwen3_vl_moe, config: {vl}/config.json, tokenizer: {vl}, dtype: float32}}
modules: {{vision: {{patches_per_microbatch: 256}}}}
batching: {{prompts: 4, samples_per_prompt: 2, minibatches: 2, tokens_per_microbatch: 256}}
rollout: {{engine: hf, max_new_tokens: 5}}
replay: on
objective: {{kl_coef: 0.1}}
optimizer: {{lr: 3e-3}}
data:
  prompts: {folder}/prompts.jsonl
  eval_prompts: {folder}/prompts.jsonl
  reward: tests.helpers.pictures:even
  max_prompt_tokens: 80
evaluate: {{every: 1, prompts: 3}}
checkpoint: {{every: 1, keep: 9}}
log: {{progress: false}}
"""
SIZES = ((8, 8), (48, 48), (), (24, 16, 48, 40), (64, 48), (16, 16), (), (40, 56))


def even(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """Share of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


ASKED = "PYRL_TEST_ASKED"  # environment variable: a file that exists once Ctrl-C was sent


def even_after_ctrl_c(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """`even`; the first reward sends Ctrl-C to the trainer, the parent of this worker process."""
    try:
        os.close(os.open(os.environ[ASKED], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return even(prompt, text, tokens)
    os.kill(os.getppid(), signal.SIGINT)
    return even(prompt, text, tokens)


def write_run(folder: Path) -> Path:
    """Prompts with 0, 1 and 2 pictures, and the YAML of a run on them."""
    draw = np.random.default_rng(0)
    records = list[Any]()
    for number, sizes in enumerate(SIZES):
        parts: list[dict[str, str]] = [{"type": "text", "text": f"{number} "}]
        for at in range(0, len(sizes), 2):
            name = f"{number}-{at}.png"
            pixels = draw.integers(0, 256, (sizes[at], sizes[at + 1], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name)
            parts.append({"type": "image", "image": name})
        records.append({"messages": [{"role": "user", "content": parts}], "answer": "1"})
    lines = "".join(json.dumps(each) + "\n" for each in records)
    (folder / "prompts.jsonl").write_text(lines)
    path = folder / "pictures.yaml"
    path.write_text(YAML.format(folder=folder, vl=CONFIGS / "tiny_vl"))
    return path
