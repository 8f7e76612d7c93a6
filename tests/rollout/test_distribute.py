"""Rollouts over ranks: shares of prompts, groups that are kept, failures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrl_ext.data.rewards import Scorer, WorkerReward
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.rollout.distribute import RolloutRequest, RolloutSamples, generate_on_ranks
from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.rollout.prompt_groups import Counts, Wait, as_they_are
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.engines import assert_same, random_sample
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


class Seeded(Engine):
    """An engine whose samples are a function of prompt and index; one rank may fail.

    Sample i of prompt p comes at the time p * step % 11 + 4 * i. `open` counts streams that are not
    closed, `given` the samples of the last one.
    """

    def __init__(self, fails: bool = False, step: int = 0):
        self.fails = fails
        self.step = step
        self.asked = self.open = self.given = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(routes=True)

    def load_weights(self, named: Any, version: int, only: Any = None) -> None: ...

    def checksums(self, names: Any) -> dict[str, int]:
        return {}

    def stream(self, prompts: Any, sampling: Sampling) -> Generator[Sample, None, None]:
        self.asked = len(prompts)
        self.given = 0
        if self.fails:
            raise ValueError("out of paper")
        group = range(sampling.samples_per_prompt)
        jobs = [(p.id * self.step % 11 + 4 * i, p.id, i) for p in prompts for i in group]
        self.open += 1
        try:
            for _, prompt, index in sorted(jobs):
                self.given += 1
                yield random_sample(prompt, index, 5 + prompt % 3)
        finally:
            self.open -= 1

    def sleep(self) -> int:
        return 0

    def close(self) -> None: ...


def scored(samples: list[Sample]) -> list[Sample]:
    return [dataclasses.replace(s, reward=float(s.prompt_id)) for s in samples]


def scores(samples: list[Sample]) -> Wait:
    return as_they_are(scored(samples))


PAIRS = Sampling(4, samples_per_prompt=2)


def expected(*ids: int) -> list[Sample]:
    return scored([random_sample(i, j, 5 + i % 3) for i in ids for j in range(2)])


def asked(
    ids: Sequence[int], keep: int | None = None, sampling: Sampling = PAIRS
) -> RolloutRequest:
    return RolloutRequest(
        [Prompt(i, (1,)) for i in ids], sampling, len(ids) if keep is None else keep
    )


def test_generate_on_ranks_runs_in_one_process():
    lines: list[str] = []
    got = generate_on_ranks(Seeded(step=5), asked(range(5)), scores, show=lines.append)
    assert_same(got.samples, expected(*range(5)))
    assert got.index.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert got.counts["discarded"] == 0 and len(lines) == 10
    assert lines[-1].startswith("rollout: 10 samples, 5 of 5 groups, ")
    with pytest.raises(ValueError, match="out of paper"):
        generate_on_ranks(Seeded(True), asked(range(5)))


@pytest.mark.parametrize("keep", [1, 2, 4, 7])
def test_generate_on_ranks_keeps_the_groups_that_are_complete_first(keep: int):
    """Groups finish in the order of their places, which here is that of id * 5 modulo 11."""
    ids = range(7)
    order = sorted(ids, key=lambda i: (i * 5 % 11, i))
    engine = Seeded(step=5)
    judged = []

    def judge(group: list[Sample]) -> Wait:
        judged.append([(s.prompt_id, s.index) for s in group])
        return scores(group)

    rollout = generate_on_ranks(engine, asked(ids, keep), judge)
    got = rollout.samples
    assert_same(got, expected(*sorted(order[:keep])))
    assert judged == [[(i, 0), (i, 1)] for i in order[:keep]]
    kept = sum(len(s.tokens) - s.prompt_len for s in got)
    whole = list(islice(Seeded(step=5).stream(asked(ids).prompts, PAIRS), engine.given))
    assert rollout.counts["discarded"] == sum(len(s.tokens) - s.prompt_len for s in whole) - kept
    assert engine.open == 0 and (engine.given < 14 or keep == 7)


def test_generate_on_ranks_closes_the_stream_when_a_reward_fails():
    engine = Seeded(step=5)
    with pytest.raises(ZeroDivisionError):
        generate_on_ranks(engine, asked(range(5)), judge_fails)
    assert engine.open == 0 and engine.given == 2


def judge_fails(samples: list[Sample]) -> Wait:
    raise ZeroDivisionError(f"{len(samples)} samples")


def test_generate_on_ranks_waits_for_rewards_after_the_last_response():
    """Every group begins to be scored when it is complete; they are waited for in this order."""
    engine = Seeded(step=5)
    begun = list[int]()
    waited = list[int]()

    def judge(group: list[Sample]) -> Wait:
        begun.append(engine.given)

        def wait(counts: Counts) -> list[Sample]:
            assert engine.given == 10 and len(begun) == 5
            waited.append(group[0].prompt_id)
            counts["responses"] += 2
            counts["dropped/error"] += 1
            return scored(group[:1])

        return wait

    request = dataclasses.replace(asked(range(5)), min_share=0.5)
    got = generate_on_ranks(engine, request, judge)
    order = sorted(range(5), key=lambda i: i * 5 % 11)
    assert waited == order and begun[0] < 10
    assert [s.prompt_id for s in got.samples] == [*range(5)]
    assert got.counts["responses"] == 10 and got.counts["dropped/error"] == 5
    message = (
        "5 of 10 responses have a reward, expected at least data.reward_min_share 0.6 of them; for "
        r"the others: the reward function raised an error \(5\). The first of each kind is named"
    )
    begun.clear()
    with pytest.raises(RuntimeError, match=message):
        generate_on_ranks(engine, dataclasses.replace(request, min_share=0.6), judge)


def whole(rollout: RolloutSamples, group: dist.ProcessGroup) -> list[Sample]:
    """The samples of all ranks in the order of the index, and that the index describes them."""
    index = rollout.index
    found: list[Sample | None] = [None] * len(index)
    for owner, samples in enumerate(gather_objects(rollout.samples, group)):
        for i, sample in zip(index.owned_by(owner), samples, strict=True):
            found[i] = sample
    samples = [sample for sample in found if sample is not None]
    assert len(samples) == len(index)
    assert [s.prompt_id for s in samples] == index.groups.tolist()
    assert [s.reward for s in samples] == index.rewards.tolist()
    assert [s.tokens.numel() - 1 for s in samples] == index.seqlens.tolist()
    return samples


def over_ranks(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    ranks = group.size()
    everything = asked(range(7))
    engine = Seeded()
    got = generate_on_ranks(engine, everything, scores, group)
    assert engine.asked == len(range(rank, 7, ranks))
    assert_same(got.samples, expected(*range(rank, 7, ranks)))
    assert got.index.owners.tolist() == [i % ranks for i in range(7) for _ in range(2)]
    assert_same(whole(got, group), expected(*range(7)))
    few = generate_on_ranks(engine, asked([0]), scores, group)
    assert_same(whole(few, group), expected(0))
    message = f"1 of {ranks} ranks failed.*\n  rank 1: ValueError: out of paper"
    with pytest.raises(RuntimeError, match=message):
        generate_on_ranks(Seeded(rank == 1), everything, scores, group)
    with pytest.raises(RuntimeError, match="rank 2: ZeroDivisionError"):
        generate_on_ranks(engine, everything, scores if rank < 2 else judge_fails, group)
    with pytest.raises(RuntimeError, match=r"ranks \[2\] got other prompts"):
        generate_on_ranks(engine, asked(range(7 if rank < 2 else 6)), None, group)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] got other prompts"):
        generate_on_ranks(engine, asked(range(7), 5 if rank == 1 else 6), None, group)
    assert_same(generate_on_ranks(engine, everything, scores, group).samples, got.samples)
    own_quotas(group)
    components(group)


def components(group: dist.ProcessGroup) -> None:
    """Every rank knows all components, and fails where a sample of one rank lacks one."""

    def in_parts(samples: list[Sample], lacks: int = -1) -> Wait:
        parts = [{"even": 1.0 - s.prompt_id % 2, "place": float(s.index)} for s in samples]
        for sample, each in zip(samples, parts, strict=True):
            if (sample.prompt_id, sample.index) == (lacks, 1):
                del each["even"]
        pairs = zip(scored(samples), parts, strict=True)
        return as_they_are([dataclasses.replace(s, components=each) for s, each in pairs])

    stats = generate_on_ranks(Seeded(), asked(range(7)), in_parts, group).index.stats()
    assert stats["reward/even"] == pytest.approx(4 / 7) and stats["reward/place"] == 0.5
    for lacks in (4, 5):  # in a share of two groups, and of two
        with pytest.raises(RuntimeError, match=rf"prompt {lacks}, sample 1\): reward with comp"):
            generate_on_ranks(Seeded(), asked(range(7)), partial(in_parts, lacks=lacks), group)


def own_quotas(group: dist.ProcessGroup) -> None:
    """Each engine's first groups are kept, however late the others are."""
    rank = group.rank()
    ranks = group.size()
    kept = []
    for other in range(ranks):
        share = sorted(range(other, 10, ranks), key=lambda i: i * 5 % 11)
        kept += share[: len(range(other, 7, ranks))]
    for slow in range(ranks):
        engine = Seeded(step=5)
        time.sleep(0.2 * (rank == slow))
        got = generate_on_ranks(engine, asked(range(10), 7), scores, group)
        assert_same(whole(got, group), expected(*sorted(kept)))
        assert got.counts["discarded"] > 0 and engine.open == 0
    # two have no quota
    got = generate_on_ranks(Seeded(step=5), asked(range(4), 1), scores, group)
    assert_same(whole(got, group), expected(0))


def test_generate_on_ranks_shares_prompts_and_errors():
    run_ranks(over_ranks, 3)


class Collective(Seeded):
    """An engine that several ranks hold: each of its samples is a sum over them, as in tensor
    parallel layers. It may fail on this rank, after so many samples."""

    def __init__(self, holders: Any, samples: int | None = None, step: int = 5):
        super().__init__(step=step)
        self.holders = holders
        self.samples = samples

    def stream(self, prompts: Any, sampling: Sampling) -> Generator[Sample, None, None]:
        with closing(super().stream(prompts, sampling)) as samples:
            for sample in samples:
                present = torch.ones(1)
                dist.all_reduce(present, group=self.holders)
                assert int(present) == self.holders.size()
                if self.given - 1 == self.samples:
                    raise ValueError("out of ink")
                yield sample


ENGINES = (0, 0, 1, 1)  # by rank


class Held:
    """Rollouts of seven prompts over two engines, each of which two ranks hold."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        first = self.rank // 2 * 2
        self.holders: Any = dist.new_group([first, first + 1], use_local_synchronization=True)

    def generate(self, engine: Engine, judge: Any) -> RolloutSamples:
        request = asked(range(7), 5)
        return generate_on_ranks(engine, request, judge, self.group, ENGINES, holders=self.holders)

    def fails(self, message: str, engine: Seeded | None = None, judge: Any = scores) -> None:
        """On every rank, after which no stream is open."""
        engine = engine or Collective(self.holders)
        with pytest.raises(RuntimeError, match=message):
            self.generate(engine, judge)
        assert engine.open == 0


def judge_sleeps(samples: list[Sample]) -> Wait:
    """A reward that is over its time limit."""
    prompts = [Prompt(i, (1,)) for i in range(7)]
    with closing(WorkerReward("tests.helpers.user_rewards:sleeps", 0.2)) as reward:
        return as_they_are(Scorer(prompts, reward, str, ())(samples)(Counts()))


def failures_of_one_holder(group: dist.ProcessGroup) -> list[int]:
    """Prompts of the groups that this rank scored, in a rollout in which nothing fails."""
    held = Held(group)
    judged = list[int]()

    def judge(samples: list[Sample]) -> Wait:
        judged.append(samples[0].prompt_id)
        return scores(samples)

    got = held.generate(Collective(held.holders), judge)
    kept = sorted({*got.index.groups.tolist()})
    assert_same(whole(got, group), expected(*kept))
    assert {*got.index.owners.tolist()} == {0, 2}
    for rank in range(4):
        failing = judge_fails if rank == held.rank else scores
        late = judge_sleeps if rank == held.rank else scores
        if rank in (1, 3):  # the first rank of the engine scores
            again = held.generate(Collective(held.holders), failing)
            assert_same(whole(again, group), expected(*kept))
        else:
            failed = f"1 of 4 ranks failed.*\n  rank {rank}: "
            held.fails(f"{failed}ZeroDivisionError", judge=failing)
            held.fails(rf"{failed}.* no result after 0\.2 s", judge=late)
        broken = Collective(held.holders, samples=3 if rank == held.rank else None)
        held.fails(f"1 of 4 ranks failed.*\n  rank {rank}: ValueError: out of ink", broken)
    message = r"2 of 4 ranks failed.*\n  rank 2: .*ranks \[2, 3\] of one engine got samples of"
    held.fails(message, Collective(held.holders, step=3 if held.rank == 3 else 5))
    return judged


def test_generate_on_ranks_leaves_an_engine_of_two_ranks_together():
    """A reward or an engine that fails on one of them ends the rollout on all ranks; one rank of
    each engine scores."""
    judged = run_ranks(failures_of_one_holder, 4)
    assert judged[1] == judged[3] == []
    assert len(judged[0]) == 3 and len(judged[2]) == 2
    assert len({*judged[0], *judged[2]}) == 5
