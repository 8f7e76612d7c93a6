"""Steps that are generated while others are trained: who is trained when, and how old it is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pyrl_ext import train
from pyrl_ext.data.recordings import load_samples, save_samples
from pyrl_ext.metrics.glossary import check_names
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.pack.index import sampled_tokens
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.async_rollouts import AsyncRollouts
from pyrl_ext.rollout.distribute import RolloutRequest, RolloutSamples
from pyrl_ext.rollout.prompt_groups import Counts, Wait
from pyrl_ext.rollout.versions import spans_of
from pyrl_ext.samples import Prompt, Sample, Sampling
from pyrl_ext.schedule.look_ahead import SPARE
from tests.helpers.busy import BusyEngine
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import numbers
from tests.helpers.tiny import CONFIG, EXPERTS, QUICK, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

STEPS = 7
KEEP = 4
SIZE = 2


def plan_of(
    ahead: int, oversample: float = 1.0, ranks: int = 1, steps: int = STEPS, **rollout: Any
) -> Plan:
    sizes = (f"batching.prompts={KEEP}", f"batching.samples_per_prompt={SIZE}")
    sizes += (f"parallel.dp={ranks}",)
    plan = tiny_plan(f"steps={steps}", *sizes, f"rollout.oversample={oversample}")
    changed = plan.rollout.model_copy(update={"ahead": ahead, **rollout})
    return plan.model_copy(update={"rollout": changed})


class Run:
    """The rollouts of a run on this process, whose steps take no time."""

    def __init__(self, plan: Plan, engine: BusyEngine, group: Any = None):
        self.plan = plan
        self.engine = engine
        self.scored: set[str] = set()
        self.begun: dict[int, int] = {}  # step -> step in which it began
        self.ahead = AsyncRollouts(plan, engine, self.request_of, self.scorer, group, self.waits)
        self.step = -1
        self.others = {*threading.enumerate()}

    def request_of(self, step: int) -> RolloutRequest:
        self.begun.setdefault(step, self.step)
        asked = self.plan.prompts_asked
        prompts = [Prompt(step * asked + i, (step * asked + i + 40, 9)) for i in range(asked)]
        sampling = Sampling(6, samples_per_prompt=SIZE, step=step)
        return RolloutRequest(prompts, sampling, KEEP)

    def scorer(self, prompts: Sequence[Prompt]) -> Any:
        def score(group: list[Sample]) -> Wait:
            def wait(counts: Counts) -> list[Sample]:
                self.scored.add(threading.current_thread().name)
                return group

            return wait

        return score

    def waits(self, text: str) -> None:
        """The trainer waits for its step."""
        self.engine.let(self.step)

    def finish(self, *steps: int) -> None:
        """Wait until all groups of ``steps``, or of every step that began, are complete."""
        names = {f"rollout of step {step}" for step in steps or self.begun}
        for thread in {*threading.enumerate()} - self.others:
            if thread.name in names:
                thread.join()

    def steps(
        self, first: int = 0, before: Callable[[], None] = lambda: None
    ) -> list[tuple[RolloutSamples, dict[str, float]]]:
        found = list[tuple[RolloutSamples, dict[str, float]]]()
        for step in range(first, self.plan.steps):
            self.step = step
            before()
            self.engine.load_weights((), step)
            found.append(self.ahead.take(step))
        self.ahead.close()
        return found


def groups_of(rollout: RolloutSamples) -> list[int]:
    return [*dict.fromkeys(rollout.index.groups.tolist())]


class LossyEngine(BusyEngine):
    """The weights of version 2 do not reach it; ``cut``: no sample follows the first KEEP groups
    of a step."""

    cut = False

    def load_weights(self, named: Any, version: int, only: Any = None) -> None:
        if version != 2:
            super().load_weights(named, version, only)

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        sizes = Counter[int]()
        for sample in super().stream(prompts, sampling):
            sizes[sample.prompt_id] += 1
            yield sample
            if self.cut and [*sizes.values()].count(SIZE) == KEEP:
                return


@pytest.mark.parametrize("slower", ["engines", "trainer"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_Ahead_begins_a_step_as_late_as_the_trainer_allows(ahead: int, slower: str):
    """It waits for slow engines, which are as far ahead as they may be; fast ones are a step
    ahead."""
    steps = STEPS + SPARE * 2
    run = Run(plan_of(ahead, steps=steps), BusyEngine(ahead, held=slower == "engines"))

    def train() -> None:
        if slower == "trainer":
            run.finish()

    first = 2  # as after a resume
    found = run.steps(first, train)
    own = [[KEEP * step + i for i in range(KEEP)] for step in range(first, steps)]
    assert [groups_of(rollout) for rollout, _ in found] == own
    # step -> version
    begun = {}
    number = first
    for version in range(first, steps):
        depth = ahead  # one less after each SPARE steps
        if slower == "trainer":
            depth = max(1, ahead - (version - first) // SPARE)
        while number <= min(version + depth, steps - 1):
            begun[number], number = version, number + 1
    assert run.engine.begun == {p: begun[p // KEEP] for p in range(first * KEEP, steps * KEEP)}
    assert all(0 <= metrics["age/max"] <= ahead for _, metrics in found)
    assert found[-1][1]["age/max"] == (ahead if slower == "engines" else 1)
    assert run.scored == {"MainThread"} and "MainThread" not in run.engine.threads


def test_Ahead_stays_as_far_ahead_while_the_next_step_lacks_groups():
    """All groups of the step are there; at every other one none of the next, but those after."""
    ahead = 3
    steps = 4 * SPARE
    run = Run(plan_of(ahead, steps=steps), BusyEngine(0, held=True))

    def train() -> None:
        there = [run.step] if run.step % 2 else [run.step, run.step + 2]
        for step in there:
            run.engine.let(step)
        run.finish(*there)

    run.steps(before=train)
    assert run.begun == {step: max(0, step - ahead) for step in range(steps)}


@pytest.mark.parametrize(("stale_groups", "begun"), [("drop", [7, 4]), ("train", [7, 4, 4])])
def test_Ahead_asks_for_the_groups_that_a_step_lacks(stale_groups: str, begun: list[int]):
    """Beside the three of seven that are left of the step before; of ``drop`` in one step less."""
    run = Run(plan_of(2, 1.75, stale_groups=stale_groups), BusyEngine(0))
    run.engine.load_weights((), 0)
    run.ahead.take(0)
    run.ahead.close()
    asked = Counter(prompt // run.plan.prompts_asked for prompt in run.engine.begun)
    assert asked == dict(enumerate(begun))


@pytest.mark.parametrize(("held", "ready"), [(True, 0.75), (False, 1.0)])
def test_Ahead_counts_the_groups_that_are_there_at_once(held: bool, ready: float):
    """The three that are carried, and those of the step up to the ones that it needs."""
    run = Run(plan_of(2, 1.75, stale_groups="train"), BusyEngine(0, held=held))

    def train() -> None:
        run.engine.let(run.step - 1)
        run.finish(*([run.step - 1] if held else []))

    metrics = [metrics for _, metrics in run.steps(before=train)]
    assert [each["rollout/carried_groups"] for each in metrics] == [0] + [3] * (STEPS - 1)
    assert [each["rollout/ready"] for each in metrics[1:]] == [ready] * (STEPS - 1)


@pytest.mark.parametrize("cut", [False, True])
def test_Ahead_trains_on_every_token_or_counts_it_as_given_up(cut: bool):
    """It gives up stale groups, incomplete ones, and what the last step leaves."""
    engine = LossyEngine(0)
    engine.cut = cut
    run = Run(plan_of(2, 1.75, stale_groups="drop"), engine)
    found = run.steps(before=run.finish)
    trained = sum(sampled_tokens(s) for rollout, _ in found for s in rollout.samples)
    given_up = [metrics["rollout/aborted_tokens"] for _, metrics in found]
    assert trained + sum(given_up) == sum(map(sampled_tokens, engine.given))
    stale_groups = [metrics["rollout/stale_groups"] for _, metrics in found]
    assert stale_groups == [0] * STEPS if cut else [0, 0, 0, 0, 3, 0, 0]
    assert bool(given_up[1]) == cut and given_up[-1] > 0


@pytest.mark.parametrize("stale_groups", ["drop", "train"])
def test_Ahead_trains_every_group_once_and_no_stale_token(stale_groups: str):
    """Whatever the order in which groups become complete; those that are late are carried once."""
    carried = given_up = 0.0
    for seed in range(24):
        ahead = 1 + seed % 3
        run = Run(
            plan_of(ahead, oversample=1.75, stale_groups=stale_groups),
            BusyEngine(seed),
        )
        trained = list[int]()
        for step, (rollout, metrics) in enumerate(run.steps()):
            groups = groups_of(rollout)
            assert len(groups) == KEEP and len(rollout.index) == KEEP * SIZE
            trained += groups
            assert {g // run.plan.prompts_asked for g in groups} <= {step - 1, step}
            assert metrics["rollout/carried_groups"] == sum(
                g // run.plan.prompts_asked < step for g in groups
            )
            ages = [step - v for s in rollout.samples for *_, v in spans_of(s)]
            assert max(ages) == metrics["age/max"] <= ahead + (stale_groups == "train")
            carried += metrics["rollout/carried_groups"]
            given_up += metrics["rollout/aborted_groups"]
            mask = [s.route_mask for s in rollout.samples if s.version_spans]
            assert all(not m[:2].any() and m[2:-1].all() for m in mask)  # the seam is at token 3
            stats = rollout.index.stats()
            assert stats["route/masked"] == stats["route/fallback_rows"] == 2 * len(mask)
            assert stats["route/coverage"] == 1
        assert len({*trained}) == len(trained) == KEEP * STEPS
        assert {*trained} <= {*run.engine.begun}
        asked = len(run.engine.begun)
        assert asked <= run.plan.prompts_asked + KEEP * (STEPS - 1) + given_up
    assert carried > 0 and given_up > 0


@pytest.mark.parametrize("oversample", [1.0, 1.75])
def test_Ahead_begins_again_what_a_wrong_server_took_part_in(oversample: float):
    """In step 2 an engine turns out to be wrong; what is trained afterwards was begun after that,
    once each."""
    ahead = 1
    run = Run(plan_of(ahead, oversample, stale_groups="train"), BusyEngine(3, wrong=2))
    trained = [group for rollout, _ in run.steps(first=2) for group in groups_of(rollout)]
    assert run.engine.wrong is None
    assert len({*trained}) == len(trained) == KEEP * (STEPS - 2)
    assert {*trained} <= {*run.engine.begun}


def test_Ahead_begins_again_what_a_wrong_server_ended():
    """Samples whose first tokens are of proved weights, and the last ones are not."""
    run = Run(plan_of(1), BusyEngine(0, wrong=2, held=True))
    found = [{v for s in each.samples for *_, v in spans_of(s)} for each, _ in run.steps(first=1)]
    assert found[:2] == [{1}, {2}]


@pytest.mark.parametrize("oversample", [1.0, 1.75])
def test_again_leaves_the_step_that_was_taken(oversample: float):
    run = Run(plan_of(2, oversample, stale_groups="train"), BusyEngine(0))
    run.engine.load_weights((), 0)
    taken = groups_of(run.ahead.take(0)[0])
    run.engine.begun.clear()
    run.ahead.again()
    trained = [group for rollout, _ in run.steps(first=1) for group in groups_of(rollout)]
    assert min(run.engine.begun) == run.plan.prompts_asked
    assert not {*taken} & {*trained}


def test_again_ends_the_threads_of_what_it_gives_up():
    """Each stops at its first sample."""
    run = Run(plan_of(2), BusyEngine(0, held=True))
    run.step = 0
    run.engine.load_weights((), 0)
    run.ahead.take(0)
    run.ahead.again()
    run.steps(first=1)
    given_up = 2
    assert len(run.engine.given) == STEPS * KEEP * SIZE + given_up


def test_Ahead_keeps_recorded_routes_where_asked():
    plan = plan_of(2, second_span_routes="recorded")
    for rollout, _ in Run(plan, BusyEngine(5, longest=0.01)).steps():
        assert all(bool(s.route_mask[:-1].all()) for s in rollout.samples)


def test_Ahead_raises_what_its_threads_raise():
    run = Run(plan_of(2), BusyEngine(0, fails=5))
    with pytest.raises(ValueError, match="no paper for prompt 5"):
        run.steps()


class FailsBehind(BusyEngine):
    """The first step fails behind the groups that it needs."""

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        sizes = Counter[int]()
        for sample in super().stream(prompts, sampling):
            yield sample
            sizes[sample.prompt_id] += 1
            if sampling.step == 0 and [*sizes.values()].count(SIZE) == KEEP:
                raise ValueError("no paper behind them")


def test_Ahead_raises_what_a_thread_raises_behind_the_groups_of_its_step():
    with pytest.raises(ValueError, match="no paper behind them"):
        Run(plan_of(2, 1.75), FailsBehind(0)).steps()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_Ahead_names_what_tried_to_end_the_process(error: BaseException):
    run = Run(plan_of(2), BusyEngine(0, fails=5, error=error))
    expected = f"rollout of step 1: raised {type(error).__name__}.*expected it to return"
    with pytest.raises(RuntimeError, match=expected):
        run.steps()


def test_Ahead_drops_stale_groups_and_says_when_too_few_are_left():
    """An engine that takes no weights."""
    run = Run(plan_of(1), BusyEngine(0))
    run.engine.load_weights((), 0)
    for step in (0, 1):
        run.ahead.take(step)
    with pytest.raises(RuntimeError, match="0 of 4 groups of step 2 are left, and 4 are stale"):
        run.ahead.take(2)
    run.ahead.close()


def over_ranks(group: dist.ProcessGroup) -> None:
    """Ranks whose engines have different speeds train on the same groups."""
    rank = group.rank()
    world = group.size()
    plan = plan_of(2, 1.75, ranks=world)
    run = Run(plan, BusyEngine(rank, 0.002 + 0.01 * rank), group)
    found = run.steps()
    indices = gather_objects([groups_of(rollout) for rollout, _ in found], group)
    assert indices[0] == indices[1]
    trained = [group for step in indices[0] for group in step]
    assert len({*trained}) == len(trained) == KEEP * STEPS
    for rollout, _ in found:
        mine = {s.prompt_id for s in rollout.samples}
        assert len(mine) == KEEP // world and mine <= {*run.engine.begun}


def test_Ahead_takes_a_share_of_each_step_from_every_rank():
    run_ranks(over_ranks, 2)


def trained(folder: Path, config: Path, *overrides: str) -> list[dict[str, float]]:
    """The rows of a run, without what may depend on ``rollout.ahead``, and on its environments."""
    assert train.main([str(config), f"run={folder}", "evaluate.every=0", *overrides]) == 0
    varying = ("publish/", "age/", "rollout/ready", "rollout/stale_groups", "turns/")
    return numbers(folder, *varying, "route/changed_rows")


@pytest.mark.parametrize("form", ["concatenated", "stepwise"])
def test_train_is_the_same_at_any_ahead_with_recorded_turns(form: str, tmp_path: Path):
    stepwise = form == "stepwise"
    asked = [f"turns.form={form}", f"turns.merge={not stepwise}", "steps=2"]
    asked += [*QUICK[:2], "log.progress=false"]
    config = CONFIG.with_name("tiny_turns.yaml")
    recorded = tmp_path / "live/rollouts"
    live = trained(tmp_path / "live", config, *asked, "rollout.record=rollouts")
    samples = load_samples(recorded / "step-000001.safetensors")
    assert max(len(s.spans) for s in samples) == (1 if stepwise else 4)
    played = (*asked, "rollout.engine=recorded", f"rollout.path={recorded}", "rollout.ahead=2")
    assert trained(tmp_path / "played", config, *played) == live


def test_train_is_the_same_at_any_ahead_with_recorded_rollouts(tmp_path: Path):
    """To the last bit: the run that recorded, and runs of 0 to 3 steps ahead."""

    def run(name: str, *overrides: str) -> list[dict[str, float]]:
        return trained(tmp_path / name, CONFIG, *QUICK, "steps=4", *overrides)

    live = run("live", "rollout.record=rollouts")
    played = ("rollout.engine=recorded", f"rollout.path={tmp_path / 'live/rollouts'}")
    for ahead in (0, 1, 3):
        assert run(f"ahead-{ahead}", *played, f"rollout.ahead={ahead}") == live
    file = tmp_path / "live/rollouts/step-000003.safetensors"
    older = [replace(s, weight_version=1 + s.index % 2) for s in load_samples(file)]
    save_samples(file, [of_two_versions(s, 3) if s.prompt_id % 2 else s for s in older], step=3)
    kept = ("rollout.ahead=2", "rollout.second_span_routes=recorded")
    assert run("older", *played, *kept) == live
    row = read_rows(tmp_path / "older/metrics.jsonl")[-1]
    check_names(row)
    assert row["age/max"] == 2 and row["age/share_0"] > 0
    shares = [row[f"age/share_{age}"] for age in range(3)]
    assert sum(shares) == pytest.approx(1)
    mean = sum(age * share for age, share in enumerate(shares))
    assert row["age/mean"] == pytest.approx(mean)
    gaps = (share * row[f"age/mismatch_{age}"] for age, share in enumerate(shares))
    assert row["mismatch/abs_mean"] == pytest.approx(sum(gaps))
    assert {name for name in row if name.startswith("age/clip_fraction_")} == {
        f"age/clip_fraction_{age}" for age, share in enumerate(shares) if share
    }
    rewards = [s.reward for s in older if s.index % 2]
    assert row["age/reward_1"] == pytest.approx(sum(rewards) / len(rewards))
    save_samples(file, [other_routes(s) if s.weight_version == 1 else s for s in older], step=3)
    run("other-routes", *played, "rollout.ahead=2")
    row = read_rows(tmp_path / "other-routes/metrics.jsonl")[-1]
    assert row["route/agree_topk"] < 1 and row["age/share_1"] < 1
    with pytest.raises(AssertionError):
        run("stale", *played, "rollout.ahead=1")
    assert "groups of step 3 are left, and" in (tmp_path / "stale/error.txt").read_text()


def other_routes(sample: Sample) -> Sample:
    """Other experts than the engine chose."""
    assert sample.routes is not None
    return replace(sample, routes=(sample.routes + 1) % EXPERTS).check()


def of_two_versions(sample: Sample, newest: int) -> Sample:
    """Its first token stays what it was, the others are of version ``newest``."""
    size = sample.tokens.numel()
    seam = sample.prompt_len + 1
    if seam == size:
        return sample
    spans = ((sample.prompt_len, seam, sample.weight_version), (seam, size, newest))
    return replace(sample, version_spans=spans).check()
