"""Generation of further steps while the trainer works: a thread for each step, over one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch.distributed as dist

from pyrl_ext.pack.index import sampled_tokens
from pyrl_ext.parallel.collective_errors import agreeing
from pyrl_ext.parallel.user_code import describe
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.distribute import RolloutRequest, RolloutSamples, join_on_ranks, part_of
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.prompt_groups import Counts, Group, Groups, Score
from pyrl_ext.rollout.turns.turn_stats import dropped_metrics
from pyrl_ext.rollout.versions import need_versions, newest, oldest_trained, with_newest_routes
from pyrl_ext.samples import Prompt, Sample
from pyrl_ext.schedule.look_ahead import LookAhead

_POLL_SECONDS = 0.5  # in which Ctrl-C is noticed
_CLOSE_SECONDS = 10.0


@dataclass
class _Job:
    """The groups that were begun for one step, on this rank.

    Attributes:
        done: complete groups that no step has taken, in the order in which they became complete
        left: groups that no step has taken, complete or not
        over: its thread has ended
    """

    request: RolloutRequest
    groups: Groups
    left: int
    done: list[Group] = field(default_factory=list[Group])
    counts: Counts = field(default_factory=Counts)
    error: Exception | None = None
    over: bool = False
    stopped: bool = False

    def take(self, group: Group) -> None:
        """Take a complete group off."""
        self.done = [each for each in self.done if each is not group]
        self.left -= 1


class AsyncRollouts:
    """Rollouts of the steps up to ``lookahead`` ahead of the one that is trained.

    A step begins to generate right after a publish, at the earliest after that of version step -
    lookahead, so its tokens are at most so many versions old: it is the capacity rule
    ``(ahead + version + 1) groups - accepted - running`` in whole steps. Older samples teach less,
    so no more steps are ahead than the trainer needs (`LookAhead`). Engines bound how many requests
    run at once.

    With ``rollout.oversample`` the groups that are not among the first complete ones go on, and
    the next step takes those that are complete by then before its own; a group is carried once. One
    step of ``ahead`` is kept for that, unless ``rollout.stale_groups`` is train.

    All communication is in the caller's thread, and so is every call of a built-in reward; those in
    workers begin as soon as a group is complete.

    Args:
        request_of: step -> all prompts of the step, and how they are sampled.
        scorer: scores groups of these prompts.
        group: ranks of the trainer; None: this process alone.
        show: takes a line of text as groups come.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        request_of: Callable[[int], RolloutRequest],
        scorer: Callable[[Sequence[Prompt]], Score],
        group: dist.ProcessGroup | None = None,
        show: Callable[[str], None] | None = None,
    ):
        if not engine.capabilities.concurrent:
            raise ValueError(
                f"rollout.ahead: {plan.rollout.ahead} with the {plan.rollout.engine} engine "
                "colocated with the trainer, expected remote engines (rollout.servers)"
            )
        self.plan = plan
        self.engine = engine
        self.group = group
        self.show = show
        self.request_of = request_of
        self.scorer = scorer
        self.carries = plan.prompts_asked > plan.batching.prompts
        spare = self.carries and plan.rollout.stale_groups == "drop"
        self.lookahead = plan.rollout.ahead - spare
        self._jobs: dict[int, _Job] = {}
        self._first = self._next = 0  # step that was not taken, and that has not begun
        self._look = LookAhead()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def take(self, step: int) -> tuple[RolloutSamples, dict[str, float]]:
        """The scored samples of ``step``, and metrics; further steps go on in their threads.

        Communicates: as `generate_on_ranks`. Raises: as it does.
        """
        numbers = [step - 1, step] if self.carries and step else [step]
        with agreeing("AsyncRollouts.take", "steps", self.group) as doing:
            doing.append(step)
            self._begin_until(step)
            requests = [self.request_of(number) for number in numbers]
        whole = replace(
            requests[-1], prompts=[*chain.from_iterable(each.prompts for each in requests)]
        )
        _, owns, label = part_of(whole, self.group, self.plan.engine_of_rank)

        def complete() -> tuple[list[Sample], Counts]:
            groups, counts = self._complete(step, label)
            samples = [sample for group in groups for sample in group.scored(counts)]
            need_versions(samples, self._oldest(step), step)
            if self.plan.rollout.second_span_routes == "masked":
                samples = [*map(with_newest_routes, samples)]
            return samples, counts

        depths = self.plan.num_mtp_layers
        while True:
            rollout = join_on_ranks(complete, whole, self.group, owns, depths)
            # the trainer waits for this proof only where it trains on what it is about
            if rollout.counts["max_version"] < step or not self.engine.samples_stale():
                break
            self.again()
        self._first = step + 1
        return rollout, dropped_metrics(rollout.counts) | self._metrics(rollout.counts)

    def again(self) -> None:
        """Begin all steps again that were not taken, and give up what there is of them."""
        with self._changed:
            for job in self._jobs.values():
                job.stopped = True
            self._jobs.clear()
        for step in range(self._first, self._next):
            self._begin(step, self._first)

    def close(self) -> None:
        """Stop all threads, and close the engine."""
        with self._changed:
            for job in self._jobs.values():
                job.stopped = True
            self._changed.notify_all()
        self.engine.close()
        end = time.monotonic() + _CLOSE_SECONDS  # of all threads together
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _begin_until(self, step: int) -> None:
        """Begin ``step``, and those after it that may begin now."""
        self._first = step
        self._next = max(step, self._next)
        end = self._end(step)
        for number in range(self._next, end):
            self._begin(number, step)
        self._next = max(self._next, end)

    def _end(self, step: int) -> int:
        """The steps before this one begin now."""
        complete = partial(self._is_complete, now=step)
        with self._changed:
            end = self._look.end(step, self._next, self.lookahead, complete)
        return min(end, self.plan.steps)

    def _is_complete(self, step: int, now: int) -> bool:
        """True if the groups of the steps from ``now`` to ``step`` are all there."""
        job = self._jobs.get(step)
        done = sum(len(job.done) for number, job in self._jobs.items() if number <= step)
        return job is not None and done >= job.request.keep * (step - now + 1)

    def _begin(self, step: int, now: int) -> None:
        """Begin the groups of ``step``: those that the step lacks, less the carried ones."""
        part, _, _ = part_of(self.request_of(step), self.group, self.plan.engine_of_rank)
        carried = 0
        if self.carries:
            with self._changed:
                carried = sum(job.left for job in self._jobs.values()) - part.keep * (step - now)
        prompts = part.prompts[: len(part.prompts) - max(0, carried)]
        part = replace(part, prompts=prompts)
        size = part.sampling.samples_per_prompt
        job = _Job(part, Groups(size, len(prompts), self.scorer(prompts)), len(prompts))
        self._jobs[step] = job
        name = f"rollout of step {step}"
        thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def _run(self, job: _Job) -> None:
        """Take what the engine generates for a step, until all of it is complete."""
        groups = job.groups
        try:
            if not job.request.prompts:
                return
            with closing(job.request.events(self.engine, job.counts)) as events:
                for event in events:
                    with self._changed:
                        before = groups.complete
                        groups.add(event)
                        if groups.complete > before:
                            job.done += groups.kept
                            groups.kept = []
                            self._changed.notify_all()
                        if groups.complete == groups.keep or job.stopped:
                            break
        except BaseException as error:  # SystemExit would end this thread alone, and in silence
            where = threading.current_thread().name
            text = f"{where}: raised {describe(error)}, expected it to return"
            job.error = error if isinstance(error, Exception) else RuntimeError(text)
        finally:
            with self._changed:
                job.over = True
                self._changed.notify_all()

    def _complete(self, step: int, label: str) -> tuple[list[Group], Counts]:
        """The groups of this rank that ``step`` is trained on, and counts."""
        keep = self._jobs[step].request.keep
        counts = Counts()
        with self._changed:
            counts["ready"] = min(keep, len(self._candidates(step, counts)))
            while len(found := self._candidates(step, counts)) < keep or not self._ended(step):
                self._need_more(step, len(found), counts)
                if self.show is not None:
                    self.show(f"{label}: {len(found)} of {keep} groups")
                self._changed.wait(_POLL_SECONDS)
            chosen = found[:keep]
            for job, group in chosen:
                job.take(group)
            counts["carried"] = sum(job is not self._jobs[step] for job, _ in chosen)
            counts.add(self._jobs[step].counts)
            carried = self.carries and step + 1 < self.plan.steps
            for number in [n for n in self._jobs if n < step + (not carried)]:
                self._drop(self._jobs.pop(number), counts)
        for sample in chain.from_iterable(group.samples for _, group in chosen):
            counts["max_version"] = max(counts["max_version"], newest(sample))
            ages = step - sample.versions[sample.loss_mask]
            counts["age_tokens"] += len(ages)
            counts["ages"] += int(ages.sum())
            counts["max_age"] = max(counts["max_age"], *ages.tolist(), 0)
        return [group for _, group in chosen], counts

    def _oldest(self, step: int) -> int | None:
        """The oldest version whose tokens ``step`` is trained on; None: any."""
        rollout = self.plan.rollout
        return step - rollout.ahead if rollout.stale_groups == "drop" else None

    def _ended(self, step: int) -> bool:
        """True if the counts of a step are known; groups that are carried may go on."""
        return self.carries or self._jobs[step].over

    def _candidates(self, step: int, counts: Counts) -> list[tuple[_Job, Group]]:
        """Complete groups of this and earlier steps; stale ones are dropped and counted.

        Raises: what a thread raised.
        """
        oldest = self._oldest(step)
        found = list[tuple[_Job, Group]]()
        for job in (self._jobs[number] for number in sorted(self._jobs) if number <= step):
            if job.error is not None:
                raise job.error
            for group in [*job.done]:
                versions = [v for v in map(oldest_trained, group.samples) if v is not None]
                if oldest is None or min(versions, default=oldest) >= oldest:
                    found.append((job, group))
                    continue
                job.take(group)
                counts["stale"] += 1
                counts["discarded"] += sum(map(sampled_tokens, group.samples))
        return found

    def _need_more(self, step: int, found: int, counts: Counts) -> None:
        """Raise that no more groups will come."""
        if all(job.over for number, job in self._jobs.items() if number <= step):
            keep = self._jobs[step].request.keep
            raise RuntimeError(
                f"rollout.ahead: {found} of {keep} groups of step {step} are left, and "
                f"{counts['stale']:.0f} are stale, with tokens more than {self.plan.rollout.ahead} "
                "versions old, expected all of them. Raise rollout.ahead, or set "
                "rollout.stale_groups: train"
            )

    def _drop(self, job: _Job, counts: Counts) -> None:
        """Give up the groups that are left."""
        job.stopped = True
        counts["given_up"] += job.left
        complete = [group.samples for group in job.done]
        parts = chain(complete, *job.groups.begun.values())
        counts["discarded"] += sum(map(sampled_tokens, chain.from_iterable(parts)))
        job.left = 0

    def _metrics(self, counts: Counts) -> dict[str, float]:
        metrics = {
            "age/mean": counts["ages"] / max(1, counts["age_tokens"]),
            "age/max": counts["max_age"],
            "rollout/ready": counts["ready"] / self.plan.batching.prompts,
            "rollout/stale_groups": counts["stale"],
        }
        if self.carries:
            metrics |= {
                "rollout/carried_groups": counts["carried"],
                "rollout/aborted_groups": counts["given_up"],
                "rollout/aborted_tokens": counts["discarded"],
            }
        return metrics
