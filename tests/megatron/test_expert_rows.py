"""Tokens to the rows of their experts and back, against megatron's permutation."""

from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron import cpu
from pyrl_ext.megatron.expert_rows import RowDispatcher
from pyrl_ext.ops import expert_rows, gather_rows, invert_rows, sum_rows
from pyrl_ext.replay import routed_experts
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.policy import Policy, Scores
from tests.helpers import passes
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import random_batch, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def random_map(tokens, experts, top_k, device="cpu", crowded=False):
    """A routing map; ``crowded``: the last experts get no token."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    scores -= crowded * (torch.arange(experts) >= top_k + 1).float()
    ids = scores.topk(top_k).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, ids, True).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (50, 8, 3), (7, 4, 4), (300, 64, 6)], ids=str)
def test_expert_rows_are_megatrons_permutation(shape, crowded, device):
    tokens, experts, top_k = shape
    top_k -= crowded and top_k == experts
    if not top_k:
        return
    routing_map = random_map(tokens, experts, top_k, device, crowded)
    x = torch.randn(tokens, 5, dtype=torch.float64, device=device)
    probs = torch.rand(tokens, experts, device=device)
    theirs, their_probs, their_rows, *_ = permute(
        x, routing_map, probs, num_out_tokens=tokens * top_k
    )
    weights, rows, inverse, places, counts = expert_rows(routing_map, probs, top_k)
    assert torch.equal(rows, their_rows) and torch.equal(counts, routing_map.sum(0))
    assert their_probs is not None and torch.equal(weights, their_probs)
    assert torch.equal(probs.flatten()[places], their_probs)
    for ours, expected in zip(inverse, invert_rows(rows.cpu(), tokens), strict=True):
        assert torch.equal(ours.cpu(), expected)
    ours = gather_rows(x, rows, x.new_zeros(5), inverse)
    assert torch.equal(ours, theirs)
    back = unpermute(theirs, their_rows, x.shape, routing_map=routing_map)
    torch.testing.assert_close(sum_rows(ours, rows, inverse), back)


@needs_gpu
def test_expert_rows_do_not_wait_for_the_device():
    routing_map = random_map(50, 8, 3, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        expert_rows(routing_map, torch.rand(50, 8, device="cuda"), 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Named(TorchDispatchMode):
    """Notes the operators that are called with more than ``size`` elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, Tensor) and arg.numel() > self.size for arg in args):
            self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_RowDispatcher_takes_the_place_of_sorting_and_scattered_sums():
    with passes.built(plan := tiny_plan()) as policy:
        layers = [m for chunk in policy.llm.chunks for m in chunk.modules()]
        dispatchers = [m.token_dispatcher for m in layers if hasattr(m, "token_dispatcher")]
        assert len(dispatchers) == 3 and {type(d) for d in dispatchers} == {RowDispatcher}
        batch = random_batch(unrouted=0.0)
        schedule = plan_microbatches(batch.seqlens, 1, plan.batching.tokens_per_microbatch, 1)
        with Named(sum(batch.seqlens)) as called:
            passes.update(policy, batch, schedule, build_loss(plan.objective))
        assert not any(hasattr(d, "d2h_event") for d in dispatchers)  # nothing to wait for
    assert {"pyrl_ext::sum_rows", "pyrl_ext::expert_rows"} <= called.names
    assert not called.names & {"aten::sort", "aten::index_add_", "aten::scatter_add"}


EP2 = ("parallel.dp=2", "parallel.ep=2")
SPREAD = {
    "ep2 recompute": (*EP2, "model.recompute=full"),
    "tp2 ep2": ("parallel.tp=2", "parallel.ep=2", "parallel.etp=1"),
    "tp2 etp2": ("parallel.tp=2",),
}


class Passes(NamedTuple):
    """Scores, metrics and gradients of two passes, and the waits for the device in them."""

    scores: Scores
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    waits: int


def two_passes(policy: Policy, unrouted: float) -> Passes:
    plan = policy.plan
    topo = policy.topo
    batch = random_batch(unrouted=unrouted)
    sizes = topo.dp_size, 64, plan.row_alignment, topo.cp_size
    schedule = plan_microbatches(batch.seqlens, *sizes)
    with patch.object(cpu._Ordered, "synchronize", autospec=True) as waits:
        scores = passes.scores(policy, batch, schedule)
        weighed = passes.weighed(policy, replace(batch, old_logprobs=scores.logprobs), schedule)
        metrics = policy.accumulate(weighed, build_loss(plan.objective))
    return Passes(scores, metrics, dict(policy.gradients()), waits.call_count)


def spread_on_rank(group: Any) -> dict[str, list[int]]:
    waits = {}
    for name, layout in SPREAD.items():
        with passes.built(tiny_plan(*layout)) as policy:
            known = two_passes(policy, 0.0)
            with patch.object(routed_experts, "_sent", return_value=None):
                waited = two_passes(policy, 0.0)
            assert torch.equal(known.scores.logprobs, waited.scores.logprobs), name
            assert known.metrics == waited.metrics, name
            for key, gradient in waited.gradients.items():
                assert torch.equal(known.gradients[key], gradient), (name, key)
            waits[name] = [known.waits, waited.waits, two_passes(policy, 0.3).waits]
    return waits


def test_RowDispatcher_waits_for_no_sizes_that_replay_knows():
    """The same bits as with the wait, under recomputation too; where one token on one rank has no
    route all ranks wait, as the routers choose then."""
    for waits in run_ranks(spread_on_rank, 2):
        for name, (known, waited, chosen) in waits.items():
            assert not known and waited and chosen, name
