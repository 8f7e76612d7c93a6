"""The memory forecast of a plan with an encoder, on its own and on shared ranks, against steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyrl_ext.parallel import topology
from pyrl_ext.plan import compile_plan
from tests.helpers.configs import CONFIGS
from tests.helpers.measured_step import measure, report
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

TINY_VL = CONFIGS / "tiny_vl.yaml"
SHORT = ("log.progress=false", "objective.kl_coef=0.1", "batching.prompts=4")
OWN = ("modules.vision.ranks=own", "modules.vision.parallel.pp=2")
LAYOUTS = {1: {"shared": ()}, 3: {"own": OWN, "frozen": (*OWN, "modules.vision.train=false")}}


def measured(group: Any) -> dict[str, dict[str, Any]]:
    torch.use_deterministic_algorithms(False)  # else operators save more
    found = {}
    for name, words in LAYOUTS[group.size()].items():
        plan = compile_plan(TINY_VL, (*SHORT, *words))
        with topology.start(plan) as topo:
            found[name] = report(topo, *measure(plan, topo))
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[dict[str, Any]]]:
    found = {size: run_ranks(measured, size) for size in LAYOUTS}
    return {name: [r[name] for r in found[n]] for n, names in LAYOUTS.items() for name in names}


@pytest.mark.parametrize("name", ["shared", "own", "frozen"])
def test_stage_memory_predicts_every_module(ranks: Any, name: str):
    found = ranks[name]
    assert [each["module"] for each in found] == ["llm", "vision", "vision"][: len(found)]
    assert [each["stage"] for each in found] == [*range(len(found))]
    for each in found:
        # the plan counts microbatches in flight, of which these steps have one
        flying = [1, 3, 2][each["rank"]] if name == "own" else 1
        for item, row in each["items"].items():
            if item == "activations":
                small = 4096  # a frozen tower's zeros
                assert row["predicted"] / flying == pytest.approx(
                    row["measured"], rel=0.25, abs=small
                ), each["rank"]
            else:
                assert row["predicted"] == row["measured"] > 0, (each["rank"], item)
        for phase in ("logprobs", "update"):
            assert each["phases"][phase]["seconds"] > 0


def test_stage_memory_has_the_items_of_each_module(ranks: Any):
    state = {"weights", "gradients", "optimizer", "reference"}
    both = {*ranks["shared"][0]["items"]}
    assert both >= {*state, *(f"{name} of vision" for name in state), "patches of the batch"}
    llm, first, last = ({*each["items"]} for each in ranks["own"])
    assert llm >= {*state, "routes", "engine weights"} and "patches of the batch" not in llm
    assert first == {*state, "activations", "patches of the batch"}
    assert last == {*state, "activations"}
    _, first, last = ({*each["items"]} for each in ranks["frozen"])
    assert "patches of the batch" in first and not {"gradients", "optimizer"} & (first | last)
