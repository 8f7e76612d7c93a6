"""Runs with pictures whose samples come from disk: recorded rollouts, and records to learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrl_ext import train
from pyrl_ext.data.recordings import load_samples
from tests.helpers.pictures import write_run
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import numbers

pytestmark = pytest.mark.multiprocess

SFT = """
objective: sft
device: cpu
threads: 1
steps: 2
model: {{family: qwen3_vl_moe, config: {vl}/config.json, tokenizer: {vl}, dtype: float32}}
modules: {{vision: {{patches_per_microbatch: 256}}}}
batching: {{samples: 4, tokens_per_microbatch: 256}}
optimizer: {{lr: 1e-2}}
data: {{path: records.jsonl, max_tokens: 96, held_out: 2}}
evaluate: {{every: 1}}
log: {{progress: false}}
"""


def write_records(folder: Path) -> Path:
    """The prompts of `write_run`, each with an answer, and the YAML of fine-tuning on them."""
    records = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        record["messages"].append({"role": "assistant", "content": f"{number} of 8"})
    (folder / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    path = folder / "sft.yaml"
    vl = Path(__file__).parents[2] / "configs" / "tiny_vl"
    path.write_text(SFT.format(vl=vl))
    return path


def runs(group: Any, folder: str, pictures: str, records: str) -> None:
    live = ("live", "rollout.record=rollouts")
    played = ("played", "rollout.engine=recorded")
    path = f"rollout.path={folder}/live/rollouts"
    for name, *overrides in (live, (*played, path)):
        given = [pictures, f"run={folder}/{name}", "evaluate.every=0", *overrides]
        assert train.main(given) == 0
    assert train.main([records, f"run={folder}/sft"]) == 0


def test_train_learns_from_pictures_on_disk(tmp_path: Path):
    """From its recording a run has the same numbers to the last bit; fine-tuning learns its
    records. An encoder on one rank, the language model on the other."""
    pictures = write_run(tmp_path)
    run_ranks(runs, 2, str(tmp_path), str(pictures), str(write_records(tmp_path)))
    live, played = (numbers(tmp_path / name, "publish/") for name in ("live", "played"))
    assert len(live) == 2 and live == played
    samples = [
        s for file in (tmp_path / "live/rollouts").glob("*.safetensors") for s in load_samples(file)
    ]
    assert len(samples) == 16 and any(len(sample.images) == 2 for sample in samples)
    for sample in samples:
        tokens = sample.tokens[: sample.prompt_len] == 104
        assert int(tokens.sum()) == sum(image.rows for image in sample.images)
        assert all(image.patches.dtype == torch.uint8 for image in sample.images)
    learned = numbers(tmp_path / "sft")
    assert len(learned) == 3 and learned[-1]["eval_loss"] < learned[0]["eval_loss"]
