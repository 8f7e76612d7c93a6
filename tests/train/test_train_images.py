"""`python -m pyrl_ext.train` on prompts with images, from the YAML file on: an encoder on ranks
behind those of the language model."""

import os
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext import train
from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.parallel import topology
from pyrl_ext.plan import compile_plan
from tests.helpers.pictures import write_run
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import numbers

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

STAGES = "parallel.pipeline_model_parallel_layout=Ett|t|t|L"
RUNS = {  # ranks -> (encoder -> language model, what its run changes), one after the other
    2: [("1 -> 1", ()), ("two hosts", ()), ("resumed", ("steps=1",)), ("resumed", ())],
    3: [
        ("1 -> dp2", ("parallel.dp=2",)),
        ("1 -> pp2 vpp2", ("parallel.pp=2", "parallel.vpp=2", STAGES)),
        ("resumed", ("parallel.tp=2", "steps=3")),
    ],
}


def runs(group: Any, config: Path, layouts: list[tuple[str, tuple[str, ...]]]) -> list[int]:
    """Exit code of each run."""
    os.environ["WORLD_SIZE"] = str(group.size())
    codes = list[int]()
    host_key = topology.host_key
    for name, more in layouts:
        topology.host_key = group.rank if name == "two hosts" else host_key
        codes.append(train.main([str(config), f"run={config.parent / name}", *more]))
    return codes


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


def test_train_moves_every_patch_to_an_encoder_once(found, tmp_path):
    """Between hosts, in 8 bits: 3 channels, 2 times, 4 x 4 pixels, 4 patches a row."""
    prompts = build_source(compile_plan(write_run(tmp_path), [])).prompts
    for row in found["two hosts"][:2]:
        rows = sum(image.rows for p in prompts.take(row["step"], 4) for image in p.images)
        assert rows and row["batch/moved_bytes/images"] == 2 * 4 * rows * 3 * 2 * 4 * 4
        assert row["batch/shared_bytes"] == 0
    assert all(row["batch/moved_bytes/images"] == 0 for row in found["1 -> 1"][:2])
