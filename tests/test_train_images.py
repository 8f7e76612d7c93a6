"""`python -m pyrl_ext.train` on prompts with images, from the YAML file on: an encoder on ranks
behind those of the language model."""

import os
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext import train
from pyrl_ext.metrics.glossary import check_names
from pyrl_ext.metrics.sinks import read_rows
from tests.helpers.pictures import write_run
from tests.helpers.ranks import run_ranks

STAGES = "parallel.pipeline_model_parallel_layout=Ett|t|t|L"
RUNS = {  # ranks -> (encoder -> language model, what its run changes), one after the other
    2: [("1 -> 1", ()), ("resumed", ("steps=1",)), ("resumed", ())],
    3: [
        ("dp2 -> 1", ("modules.vision.parallel.dp=2",)),
        ("1 -> dp2", ("parallel.dp=2",)),
        ("1 -> pp2 vpp2", ("parallel.pp=2", "parallel.vpp=2", STAGES)),
        ("resumed", ("parallel.tp=2", "steps=3")),
    ],
}


def numbers(folder: Path) -> list[dict[str, Any]]:
    rows = read_rows(folder / "metrics.jsonl")
    check_names(set().union(*rows))
    return [{k: v for k, v in r.items() if "time/" not in k and k != "tokens_per_s"} for r in rows]


def runs(group: Any, config: Path, layouts: list[tuple[str, tuple[str, ...]]]) -> list[int]:
    """Exit code of each run."""
    os.environ["WORLD_SIZE"] = str(group.size())
    return [train.main([str(config), f"run={config.parent / n}", *more]) for n, more in layouts]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    config = write_run(tmp_path_factory.mktemp("pictures"))
    for size, layouts in RUNS.items():
        codes = run_ranks(runs, size, config, layouts)
        assert codes == [[0] * len(layouts)] * size
    return {name: numbers(config.parent / name) for each in RUNS.values() for name, _ in each}


def test_train_with_an_encoder_has_the_same_numbers_in_every_layout(found):
    """Also where a run went on under another layout of either module."""
    first, *others = found.values()
    assert [row["step"] for row in first] == [0, 1, 2]
    for row in first[:2]:
        assert row["grad_norm"] > 0 and row["mismatch/max"] < 1e-4
        assert row["route/agree_topk"] == 1
    for rows in others:
        for one, two in zip(first, rows, strict=False):
            for name in ("reward", "loss", "grad_norm", "policy/entropy", "eval_reward"):
                if name in one:
                    assert two[name] == pytest.approx(one[name], abs=2e-5), (name, one["step"])
    assert [row["step"] for row in found["resumed"]] == [0, 1, 2, 3]
