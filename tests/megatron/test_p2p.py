"""Pipeline stages exchange tensors of any lengths, and no host waits for its device."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron.p2p import KnownShapes
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.trainer.policy import Policy
from tests import parity
from tests.helpers import passes
from tests.helpers.ranks import run_ranks
from tests.helpers.traffic import counted
from tests.parity import compiled

pytestmark = pytest.mark.multiprocess

SPLIT = "parallel.pipeline_model_parallel_layout"
LAYOUTS = {  # rows of every depth go from the MTP layers to the loss
    "pp3": ("parallel.pp=3", f"{SPLIT}=Ett|ttm|L"),
    "pp3 vpp2": ("parallel.pp=3", "parallel.vpp=2", f"{SPLIT}=Et|t|t|t|m|L"),
}


class Seen(NamedTuple):
    """A scoring and a training pass, and what they did."""

    logprobs: torch.Tensor
    metrics: dict[str, float]
    waits: int
    """For the whole device."""
    sent: Counter[torch.dtype]
    """Messages to other stages, by type."""


def passes_of(policy: Policy) -> Seen:
    batch = parity.batches(policy.plan, mtp_routes=False)[0]
    waits = list[Any]()
    schedule = Scheduler(policy.plan).schedule(batch.seqlens)
    with counted() as traffic, patch.object(torch.cuda, "synchronize", lambda *_: waits.append(_)):
        found = passes.scores(policy, batch, schedule)
        metrics = passes.accumulate(policy, batch, schedule, build_loss(policy.plan.objective))
    sent = Counter(dtype for c in traffic.calls if c.name == "send" for dtype in c.dtypes)
    return Seen(found.logprobs, metrics, len(waits), sent)


def on_rank(group: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, overrides in LAYOUTS.items():
        plan = compiled("glm mtp", folder, overrides)
        with passes.built(plan) as policy:
            known = passes_of(policy)
            policy.llm.load_initial_weights()  # the pass before moved the routers' bias
            theirs = P2PCommunicator._communicate_shapes
            with patch.object(KnownShapes, "_communicate_shapes", theirs):
                found[name] = known, passes_of(policy)
            wrong = KnownShapes(policy.topo.groups.pp, policy.llm.config, 2, lambda *_: (3, 1, 8))
            with pytest.raises(RuntimeError, match=r"sends \[4, 1, 8\], expected \(3, 1, 8\)"):
                if policy.topo.is_first_stage:
                    wrong._communicate_shapes(torch.empty(4, 1, 8), None, False, False)
                else:
                    wrong._communicate_shapes(None, torch.empty(4, 1, 8), False, False)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_rank, 3, tmp_path_factory.mktemp("p2p"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_KnownShapes_lets_no_stage_wait_for_its_device(ranks: list[Any], name: str):
    for rank in ranks:
        known, asking = rank[name]
        assert torch.equal(known.logprobs, asking.logprobs) and known.metrics == asking.metrics
        assert known.waits == 0 and set(known.sent) == {torch.float32}
        # megatron's own: before every tensor a message with its shape, and a wait
        assert asking.sent == known.sent + Counter({torch.int64: known.sent.total()})
        assert asking.waits >= known.sent.total()
