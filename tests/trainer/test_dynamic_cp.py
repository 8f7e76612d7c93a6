"""Dynamic context parallelism: one answer for samples of any lengths, and bad samples refused on
every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.rollout.distribute import RolloutSamples
from pyrl_ext.samples import Sample
from pyrl_ext.trainer.step import RolloutStep
from tests.helpers import passes
from tests.helpers.passes import WholeBatch
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import make_sample
from tests.helpers.tiny import LAYERS, random_routes, tiny_plan
from tests.parity import BOUNDS

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# One answer --------------------------------------------------------------------------------------

LIMIT = 24
LAYOUTS = {
    2: [("parallel.dp=2", "parallel.ep=2", "parallel.dynamic_cp=2")],
    4: [
        ("parallel.dp=4", "parallel.dynamic_cp=4"),
        ("parallel.dp=2", "parallel.pp=2", "parallel.vpp=2", "parallel.dynamic_cp=2"),
    ],
}
Lengths = list[tuple[int, int]]


@st.composite
def lengths(draw: st.DrawFn, longest: int) -> Lengths:
    """(tokens of the prompt, of the response) of a minibatch: uneven, equal, or one much longer."""
    kind = draw(st.sampled_from(["any", "equal", "one long", "short"]))
    number = draw(st.integers(1, 12))
    most = {"any": longest, "equal": 12, "one long": 4, "short": 2}[kind]
    rows = draw(st.lists(st.integers(1, most), min_size=number, max_size=number))
    rows = [rows[0]] * number if kind == "equal" else rows
    if kind == "one long":
        rows[draw(st.integers(0, number - 1))] = longest
    prompts = [draw(st.one_of(st.just(1), st.integers(1, n))) for n in rows]
    return [(prompt, n + 1 - prompt) for prompt, n in zip(prompts, rows, strict=True)]


def examples(number: int, longest: int) -> list[Lengths]:
    """The same lengths in every run of the tests."""
    found: list[Lengths] = []

    @settings(
        max_examples=3 * number,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],  # on a busy machine
    )
    @given(lengths(longest))
    def collect(each: Lengths) -> None:
        if each not in found:
            found.append(each)

    collect()
    return found[:number]


def batch_of(example: Lengths) -> WholeBatch:
    g = torch.Generator().manual_seed(len(example))
    seqlens = tuple(prompt + response - 1 for prompt, response in example)
    rows = sum(seqlens)
    tokens = torch.randint(3, 128, (rows + 1,), generator=g)
    trained = [torch.arange(n) >= p - 1 for n, (p, _) in zip(seqlens, example, strict=True)]
    return WholeBatch(
        seqlens=seqlens,
        tokens=tokens[:-1],
        targets=tokens[1:],
        loss_mask=torch.cat(trained),
        rollout_logprobs=-4 - torch.rand(rows, generator=g),
        advantages=torch.randn(rows, generator=g),
        routes=random_routes(rows, g),
        layer_ids=LAYERS,
        route_mask=torch.rand(rows, generator=g) >= 0.1,
        old_logprobs=-4 - torch.rand(rows, generator=g),
    )


@dataclass
class Answer:
    """Loss, gradient norm and gradients by name of a minibatch."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    sizes: set[int]


def answers(layout: tuple[str, ...], drawn: list[Lengths]) -> Iterator[Answer]:
    """The answer to every example; the weights stay as they are, at a learning rate of 0."""
    overrides = ("optimizer.lr=0", f"batching.tokens_per_microbatch={LIMIT}", *layout)
    if not layout:
        overrides = (*overrides[:1], "batching.tokens_per_microbatch=1024")
    plan = tiny_plan(*overrides, "data.max_prompt_tokens=4", "rollout.max_new_tokens=4")
    loss = build_loss(plan.objective)
    with passes.built(plan) as policy:
        scheduler = Scheduler(plan)
        for example in drawn:
            batch = batch_of(example)
            schedule = scheduler.schedule(batch.seqlens)
            sizes = {g.cp_size for groups in schedule.microbatches for g in groups if g.samples}
            found = passes.accumulate(policy, batch, schedule, loss)["loss"]
            gradients = {name: grad.clone() for name, grad in policy.gradients()}
            yield Answer(found, policy.step_optimizer()["grad_norm"], gradients, sizes)


def compare(group: Any, drawn: list[Lengths], file: Path) -> list[set[int]]:
    """Compares every layout with one process; returns the group sizes of each."""
    used = []
    wanted = torch.load(file, weights_only=False)
    for layout in LAYOUTS[group.size()]:
        used.append(set[int]())
        for example, got, want in zip(drawn, answers(layout, drawn), wanted, strict=True):
            used[-1] |= got.sizes
            assert abs(got.loss - want.loss) <= BOUNDS["loss"], (layout, example)
            assert abs(got.norm / want.norm - 1) <= BOUNDS["grad norm"], (layout, example)
            assert got.gradients.keys() == want.gradients.keys()
            for name, grad in want.gradients.items():
                # that of a query which sees one key is rounding alone
                scale = max(float(grad.norm()), 1e-3 * want.norm)
                off = float((got.gradients[name] - grad).norm()) / scale
                assert off <= BOUNDS["grad"], (layout, example, name, off)
    return used


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_update_has_one_answer_for_samples_of_any_lengths(ranks: int, tmp_path: Path):
    drawn = examples(10 if ranks == 2 else 6, longest=2 * LIMIT)
    assert any(len(each) < ranks for each in drawn)
    torch.save(list(answers((), drawn)), tmp_path / "wanted.pt")
    for used in run_ranks(compare, ranks, drawn, tmp_path / "wanted.pt")[0]:
        assert {1, 2} <= used  # several sizes


# Bad samples -------------------------------------------------------------------------------------


def rollout_of(samples: list[Sample], owners: list[int], rank: int) -> RolloutSamples:
    """The samples, each owned by a rank, as `generate_on_ranks` returns them."""
    parts = [[s for s, o in zip(samples, owners, strict=True) if o == r] for r in range(2)]
    index = [BatchIndex.of(part, owner) for owner, part in enumerate(parts)]
    groups = list(dict.fromkeys(s.prompt_id for s in samples))
    return RolloutSamples(BatchIndex.joined(index, groups), parts[rank])


def sample(prompt: int, prompt_len: int, response_len: int) -> Sample:
    found = make_sample(prompt, 0, prompt_len, response_len, num_experts=8)
    none = torch.zeros(len(found.tokens), dtype=torch.bool)
    return replace(found, routes=None, layer_ids=(), route_mask=none)


def good(rank: int) -> RolloutSamples:
    return rollout_of([sample(i, 3, 5) for i in range(4)], [0, 1, 0, 1], rank)


def too_long(rank: int) -> RolloutSamples:
    return rollout_of([sample(0, 3, 5), sample(1, 20, 40)], [0, 1], rank)


def without_response(rank: int) -> RolloutSamples:
    return rollout_of([sample(0, 3, 5), sample(1, 4, 0)], [0, 1], rank)


def without_rows(rank: int) -> RolloutSamples:
    return rollout_of([sample(0, 3, 5), sample(1, 1, 0)], [0, 1], rank)


def other_lengths(rank: int) -> RolloutSamples:
    """Rank 1 believes that a sample of rank 0 is a row longer; the schedules are the same."""
    found = good(rank)
    seqlens = found.index.seqlens + np.array([rank, 0, 0, 0], np.int32)
    return replace(found, index=replace(found.index, seqlens=seqlens))


def other_samples(rank: int) -> RolloutSamples:
    """Rank 1 holds a shorter sample than all ranks know."""
    found = good(rank)
    return replace(found, samples=[sample(1, 3, 4), *found.samples[1:]] if rank else found.samples)


LONG = "sample 1 has 59 tokens, expected at most 48: max_tokens_per_rank (24) on the largest group"
EMPTY = (
    "rank 1: ValueError: Sample(prompt 1, sample 0): prompt_len 4 of 4 tokens, expected at least"
)
LACKS = "rank 1: ValueError: Step.batch_of: 2 samples with 13 rows, expected the 2 with 14 that all"
BAD: list[tuple[Callable[[int], RolloutSamples], str]] = [
    (too_long, LONG),
    (without_response, EMPTY),
    (without_rows, "sample 1 has 0 tokens, expected at least 1"),
    (other_lengths, "ranks [1] got other samples or schedules than rank 0"),
    (other_samples, LACKS),
]


def bad_samples(group: Any) -> list[str]:
    """The messages of every rank; the ranks go on after each, and train."""
    small = (f"batching.tokens_per_microbatch={LIMIT}", "replay=off", *LAYOUTS[2][0])
    short = ("data.max_prompt_tokens=4", "rollout.max_new_tokens=4", "batching.prompts=2")
    plan = tiny_plan(*small, *short)
    clock = Clock()
    rank = group.rank()
    messages = []
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        for make, _ in BAD:
            with pytest.raises(RuntimeError) as caught:
                step.batch_of(make(rank), clock, minibatches=1)
            messages.append(str(caught.value))
        for found in (good(rank), rollout_of([sample(7, 3, 30)], [1], rank)):  # 1 sample, 2 ranks
            shard = step.batch_of(found, clock, minibatches=1)
            shard, _ = step.score(shard, found.index, clock)
            assert step.update(shard, clock)["grad_norm"] >= 0
            assert len(shard.rows.tokens)  # both ranks compute
    return messages


def test_batch_of_refuses_bad_samples_on_every_rank():
    for messages in run_ranks(bad_samples, 2):
        for message, (_, expected) in zip(messages, BAD, strict=True):
            assert expected in message
