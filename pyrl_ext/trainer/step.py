"""Step: one step of a run in its phases, which training, measuring and benchmarks all drive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain

import numpy as np
import torch

from pyrl_ext.data.files import DataError
from pyrl_ext.data.mixed_prompts import MixedPrompts
from pyrl_ext.data.prompt_dataset import build_source, image_scale
from pyrl_ext.data.tokenizer import check_same_tokens, load_tokenizer
from pyrl_ext.loss.inputs import AdvantageFn, LossFn
from pyrl_ext.loss.registry import build_advantage, build_loss
from pyrl_ext.metrics.mismatch import mismatch
from pyrl_ext.ops.tensors import dtype_of
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.delivery import TransferStats
from pyrl_ext.pack.exchange import shard_batch, step_digest
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.collective_errors import agreeing, gather_objects
from pyrl_ext.parallel.reduce import sum_over_ranks
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.phases import OFFLOADED
from pyrl_ext.rollout.distribute import RolloutSamples
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.rollouts import Rollouts
from pyrl_ext.samples import Sample
from pyrl_ext.trainer.policy import Policy, Scores
from pyrl_ext.trainer.staleness import ages_of, by_age
from pyrl_ext.trainer.teacher_kl import teacher_kl_by_source
from pyrl_ext.trainer.teacher_servers import TeacherServers
from pyrl_ext.trainer.token_weights import shaped, weigh_tokens
from pyrl_ext.weights.check import check_batch, full_check, gaps, mismatch_limit, sync_weights

Phase = Callable[[str], AbstractContextManager[object]]
Metrics = dict[str, float]

# metric of an update -> the name of its mean over the updates of a step's last epoch
_OF_LAST_EPOCH = {
    "policy/ppo_kl": "policy/last_epoch/ppo_kl",
    "policy/clip_fraction": "policy/last_epoch/clip_fraction",
}


@dataclass
class Step(ABC):
    """The parts of a run that a step needs, and the step's phases in their order.

    A step is `sync_weights`, `take`, `onload`, `batch_of`, `score`, `update`. Each method takes
    ``phase``, a function that surrounds a named phase, such as a `Clock`. Every method is a
    collective over all ranks.

    Args:
        reference: frozen copy of the initial policy, or with `objective.reference_refresh` of the
            policy of an earlier step; None: nothing is compared with it, or the policy's base,
            without its adapters, is the reference.
        advantage: of the samples.
    """

    plan: Plan
    topo: Topology
    policy: Policy
    reference: Policy | None
    advantage: AdvantageFn
    loss: LossFn
    moved: TransferStats = field(default_factory=TransferStats, init=False)
    weighed: Metrics = field(default_factory=dict[str, float], init=False)
    evaluated: dict[str, list[Sample]] = field(default_factory=dict[str, list[Sample]], init=False)
    """set of held-out prompts -> samples of this rank in the last evaluation"""

    @cached_property
    def scheduler(self) -> Scheduler:
        """The schedules of the plan's minibatches."""
        return Scheduler(self.plan)

    @property
    def engine(self) -> Engine | None:
        """The rollout engine of this rank."""
        return None

    def close(self) -> None:  # noqa: B027 (some steps have none)
        """Stop the background work of the trainer."""

    def recover(self) -> None:
        """After a failure: stop the engine, and have the whole trainer on the device, to save it.

        Raises: FloatingPointError as `Policy.need_finite`.
        """
        self.close()
        self.policy.onload()
        if self.policy.reference is not None:  # checkpoints hold it
            self.policy.reference.onload()
        self.policy.need_finite()

    def sync_weights(self, version: int, phase: Phase) -> Metrics:
        """Send the weights to whatever generates samples."""
        return {}

    @abstractmethod
    def take(self, number: int, phase: Phase) -> RolloutSamples:
        """The samples of step ``number``."""

    @abstractmethod
    def evaluate(self, phase: Phase) -> Metrics:
        """Metrics of the held-out data, whose samples are in `evaluated`."""

    def onload(self, phase: Phase) -> Metrics:
        """Bring the trainer back onto the device."""
        return {}

    def batch_of(
        self, rollout: RolloutSamples, phase: Phase, minibatches: int | None = None
    ) -> BatchShard:
        """The rows that this rank computes, checked, with their advantages.

        Args:
            rollout:     its samples are dropped once they are rows.
            minibatches: number of minibatches; None: the plan's.

        Raises: on every rank, if the samples of one are wrong.
        """
        index = rollout.index
        group = self.topo.world
        with phase("time/exchange"):
            with agreeing("Step.batch_of", "samples or schedules", group) as doing:
                schedules = self.scheduler.minibatches(index, minibatches)
                doing.append(step_digest(index, schedules))
                batches = [self._rows_of(rollout)]
            rollout.samples.clear()
            rollout.dropped.clear()
            plan = self.plan
            topo = self.topo
            waiting = partial(phase, "time/exchange")
            # popped, so that nothing here keeps the batch
            taught = bool(plan.teacher.servers)
            shard, self.moved = shard_batch(
                batches.pop(), index, schedules, plan, topo, waiting, taught
            )
        return shard

    def _rows_of(self, rollout: RolloutSamples) -> Batch | None:
        """The samples that this rank owns, as rows."""
        plan = self.plan
        mine = rollout.index.owned_by(self.topo.rank)
        advantages = shaped(rollout.index, plan).advantages(self.advantage)
        lengths = [sample.tokens.numel() - 1 for sample in rollout.samples]
        if (known := rollout.index.seqlens[mine].tolist()) != lengths:
            raise ValueError(
                f"Step.batch_of: {len(lengths)} samples with {sum(lengths)} rows, expected the "
                f"{len(known)} with {sum(known)} that all ranks know, each as long; other ranks "
                "would read rows of other samples"
            )
        if not lengths:
            return None
        batch = Batch.for_plan(plan, rollout.samples, advantages[mine])
        if not rollout.teacher_logprobs:
            return batch
        return replace(batch, teacher_logprobs=torch.cat([*rollout.teacher_logprobs]))

    def score(
        self, shard: BatchShard, index: BatchIndex, phase: Phase, check: bool = False
    ) -> tuple[BatchShard, Scores | None]:
        """The rows with what the loss needs of forward passes before the update, and the policy's
        scores; None: it was not asked.

        Args:
            check: stop the run if trainer and engine disagree about the tokens.
        """
        return shard, None

    def update(self, shard: BatchShard, phase: Phase) -> Metrics:
        """In each epoch one optimizer step a minibatch; returns the mean of their metrics, and of
        the last epoch, if there are several, those of `_OF_LAST_EPOCH`.

        A minibatch without loss tokens on any rank (`objective.overlong_filter`) is no update:
        weights, optimizer and learning rate stay as they are, and a line on the terminal says so.
        """
        epochs = self.plan.batching.epochs
        rows = list[Metrics]()
        last = list[Metrics]()
        self.policy.scored = None
        with phase("time/update"):
            self._report_empty(shard)
            for _ in range(epochs):  # every one reads the same rows
                last = self._epoch(shard)
                rows += last
            shard.wait(len(shard.schedule) - 1)  # also rows of minibatches that nothing read
        metrics = _means(rows)
        if epochs > 1:
            end = _means(last)
            metrics |= {name: end[each] for each, name in _OF_LAST_EPOCH.items() if each in end}
        skipped = epochs * len(shard.minibatches) - len(rows)
        return metrics | {"policy/skipped_updates": skipped}

    def _epoch(self, shard: BatchShard) -> list[Metrics]:
        """One pass over the minibatches in order; returns the metrics of each update."""
        return [
            self.policy.update(shard.minibatch(place), self.loss)
            for place, (tokens, *_) in enumerate(shard.loss_tokens)
            if tokens
        ]

    def _report_empty(self, shard: BatchShard) -> None:
        """Print a line for each minibatch without loss tokens."""
        if not self.topo.is_main:
            return
        number = len(shard.minibatches)
        for place, (tokens, *_) in enumerate(shard.loss_tokens, start=1):
            if not tokens:
                which = f"step {self.policy.step}: minibatch {place} of {number}"
                print(f"{which} has no loss tokens, no update", flush=True)

    @abstractmethod
    def metrics(self, index: BatchIndex, shard: BatchShard, old: Scores | None) -> Metrics:
        """Metrics of the step's samples and of where they were computed.

        Args:
            old: what `score` returned.
        """


@dataclass
class RolloutStep(Step):
    """A step on samples that an engine generates and a reward scores.

    Args:
        teachers: frozen models whose log-probs of the samples are in the advantages, by their
            names in the plan.
        teacher_servers: servers of the teacher; None: it is not on servers.
    """

    rollouts: Rollouts
    teachers: Mapping[str, Policy] = field(default_factory=dict[str, "Policy"])
    teacher_servers: TeacherServers | None = None
    number: int = field(default=0, init=False)  # of the step that is trained
    _sent: bool = field(default=False, init=False)  # the engine has all weights
    _closed: bool = field(default=False, init=False)

    @classmethod
    def build(
        cls,
        plan: Plan,
        topo: Topology,
        show: Callable[[str], None] | None = None,
        trainable: bool = True,
        initial: bool = True,
    ) -> RolloutStep:
        """Everything the plan names; bad prompts, rewards or losses fail before a model is built,
        and the engine comes before the trainer, so that it starts on an empty GPU, and the trainer
        on the stream that the engine leaves current (`need_stream`).

        Args:
            show: takes a line of text as samples come.
            trainable: False: without optimizer and reference, to evaluate alone.
            initial: False: the weights are loaded later.
        """
        source = build_source(plan)
        if plan.modules:
            image_scale(plan)
        advantage = build_advantage(plan.objective)
        loss = build_loss(plan.objective)
        plans = plan.teacher_plans if trainable else {}
        servers = None
        if trainable:
            for name, folder in plan.teacher_folders.items():
                check_same_tokens(source.tokenizer, load_tokenizer(folder), name)
            servers = TeacherServers.of(plan, topo)
        rollouts = Rollouts(plan, topo, source, show)
        try:
            rollouts.make_room()
            policy = Policy.build(plan, topo, trainable=trainable, initial=initial, offloads=True)
            reference = None
            rollouts.engine.score_canaries = partial(score_canaries, policy)
            if plan.objective.kl_coef and plan.lora is None and trainable:
                reference = Policy.build(plan, topo, trainable=False, offloads=True)
                if plan.objective.reference_refresh:
                    policy.reference = reference
            teachers: dict[str, Policy] = {}
            for name, of_teacher in plans.items():
                layout = of_teacher.parallel  # of the trainer, but a dense teacher has no experts
                place = replace(topo, ep_size=layout.ep, etp_size=layout.etp_size)
                teachers[name] = Policy.build(of_teacher, place, trainable=False, offloads=True)
        except BaseException:
            rollouts.close()
            raise
        policy.level_starts = {name: task.starts for name, task in source.rising.items()}
        parts = (policy, reference, advantage, loss, rollouts, teachers, servers)
        return cls(plan, topo, *parts)

    @property
    def engine(self) -> Engine:
        """See `Step.engine`."""
        return self.rollouts.engine

    def close(self) -> None:
        """Close the engine, and stop the workers of user code."""
        if not self._closed:
            self._closed = True
            self.rollouts.close()

    def sync_weights(self, version: int, phase: Phase) -> Metrics:
        """Send the weights to the engine and offload what ``rollout.offload_trainer`` names (the
        weights last: the engine reads them)."""
        rollout = self.plan.rollout
        freed = 0
        parts = OFFLOADED[rollout.offload_trainer]
        with phase("time/publish"):
            if "weights" in parts:
                with phase("time/offload"):
                    freed += sum(each.offload("weights") for each in self._frozen)
            for part in parts:
                if part != "weights":
                    with phase("time/offload"):
                        freed += self.policy.offload(part)
            metrics = self._send(version)
            if "weights" in parts:
                with phase("time/offload"):
                    freed += self.policy.offload("weights")
        metrics |= self.rollouts.engine.metrics()
        return metrics | {"memory/offloaded": freed} if parts else metrics

    def _send(self, version: int) -> Metrics:
        """Send the weights, or, to an engine that has the others, those that steps change."""
        plan = self.plan
        tensors = self.policy.tensors
        only = None
        if self._sent and not plan.sends_all:
            only = tensors.changing
        move = tensors.move_seen(self._engine_dtype)
        self._sent = False
        metrics = sync_weights(
            self.engine,
            tensors.published(self.policy.live(), only, move),
            tensors.engine_names,
            version,
            dtype=self._engine_dtype,
            # factors are few bytes, and the base that stays in the engine is compared once
            check="all" if plan.lora_publish == "adapter" else plan.rollout.check_tensors,
            seed=plan.seed,
            only=only,
        )
        self._sent = True
        return metrics | move.metrics() if move is not None else metrics

    def take(self, number: int, phase: Phase) -> RolloutSamples:
        """The scored samples of step ``number``."""
        self.number = number
        with phase("time/rollout"):
            return self.rollouts.train(number)

    def batch_of(
        self, rollout: RolloutSamples, phase: Phase, minibatches: int | None = None
    ) -> BatchShard:
        """See `Step.batch_of`; a teacher on servers scores the samples of this rank before."""
        if self.teacher_servers is not None:
            with phase("time/teacher_logprobs"):
                scored = self.teacher_servers.logprobs(rollout, self.topo)
            rollout = replace(rollout, teacher_logprobs=scored)
        return super().batch_of(rollout, phase, minibatches)

    def _rows_of(self, rollout: RolloutSamples) -> Batch | None:
        """See `Step._rows_of`; the teachers must have every token of the samples."""
        for name, teacher in self.teachers.items():
            size = teacher.plan.sizes.vocab_size
            largest = max((int(sample.tokens.max()) for sample in rollout.samples), default=0)
            if largest >= size:
                raise DataError(
                    f"teacher {name}: a sample has token {largest}, expected ids below {size}, its "
                    "vocab_size; the policy drew an id of its padding. Use a teacher whose "
                    "vocabulary is padded as far, or a policy that does not draw such ids"
                )
        return super()._rows_of(rollout)

    def evaluate(self, phase: Phase) -> Metrics:
        """Rewards, pass@k and lengths on each set of held-out prompts."""
        with phase("time/eval"):
            results, self.evaluated = self.rollouts.evaluate()
        metrics: Metrics = {}
        for name, result in results.items():
            metrics |= result.metrics(name)
        return metrics

    def onload(self, phase: Phase) -> Metrics:
        """Put the engine to sleep and bring the trainer back onto the device."""
        sleeps = self.plan.engine_sleeps
        metrics = {}
        if sleeps or self.plan.rollout.offload_trainer != "none":
            with phase("time/onload"):
                if sleeps:
                    metrics["memory/engine_slept"] = self.rollouts.sleep()
                for each in (*self._frozen, self.policy):  # last what comes behind the passes
                    each.onload()
        return metrics

    def score(
        self, shard: BatchShard, index: BatchIndex, phase: Phase, check: bool = False
    ) -> tuple[BatchShard, Scores | None]:
        """Score the rows with the policy, the reference and the teacher.

        Args:
            check: stop the run if trainer and engine disagree about the tokens.

        Returns: the rows with their log-probs and weights, and the policy's scores; None where
            nothing needs them before the update (`Plan.scores_in_update`).
        """
        in_update = self.plan.scores_in_update
        old = None
        columns: dict[str, torch.Tensor] = {}
        if check or not in_update:
            with phase("time/old_logprobs"):
                replay = self.plan.replay
                every = self.plan.scores_every_row
                old = self.policy.scores(shard, replay.old, replay.of_trainer, every)
            if check:
                self._check_batch(shard, old)
            if old.recorded is not None:
                shard = shard.with_routes(self.plan.router_layers, *old.recorded)
            if not in_update:
                columns["old_logprobs"] = old.logprobs
        self.rollouts.samples_stale()  # before the weights change; the rows are of proved ones
        if self.plan.objective.kl_coef:
            with phase("time/ref_logprobs"):
                self._refresh_reference()
                columns["ref_logprobs"] = self._reference_scores(shard).logprobs
        if self.teachers:
            with phase("time/teacher_logprobs"):
                if self.plan.objective.compares_distributions:
                    shard = self._with_teacher_states(shard)
                else:
                    columns["teacher_logprobs"] = self._teacher_logprobs(shard, index)
        if shard.role.last_stage:
            if self.plan.rollout.ahead:
                columns["ages"] = ages_of(shard, self.number, self.plan)
            shard = shard.with_columns(**columns)
        shard, self.weighed = weigh_tokens(shard, index, self.plan, self.topo, self.advantage)
        prompts = self.rollouts.source.prompts
        if self.plan.objective.teaches_sampled and isinstance(prompts, MixedPrompts):
            self.weighed |= teacher_kl_by_source(shard, index, prompts.source_of, self.topo)
        return shard, old

    def metrics(self, index: BatchIndex, shard: BatchShard, old: Scores | None) -> Metrics:
        """Metrics of the step: samples, moved bytes, trainer against engine, seconds of replay."""
        metrics = index.stats() | self.rollouts.dropped
        old = old or self.policy.scored
        if old is not None:  # None: no sample has a loss token, so no pass read any
            metrics |= compare(shard, old, self.topo)
            if self.plan.rollout.ahead:
                metrics |= by_age(shard, old, index, self.number, self.plan, self.topo)
        if self.plan.objective.advantage == "none":  # no group lacks a gradient
            metrics.pop("rollout/flat_groups")
        metrics |= self.moved.metrics(self.topo) | self.weighed
        metrics |= self.rollouts.engine.metrics()  # with what came after the publish
        if self.plan.replay.enabled:
            policies = [p for p in (self.policy, self.reference) if p is not None]
            seconds = (p.module.replay.clock.take() for p in policies)
            metrics["time/replay"] = sum(sum(each.values()) for each in seconds)
        return metrics

    @property
    def _frozen(self) -> list[Policy]:
        """The models that no step changes."""
        reference = [] if self.reference is None else [self.reference]
        return [*reference, *self.teachers.values()]

    def _refresh_reference(self) -> None:
        """Give the reference the policy's weights, if a refresh is due before this step's update. A
        checkpoint of the same step has the same weights: a resumed run may refresh it again."""
        every = self.plan.objective.reference_refresh
        if self.reference is None or not every or not self.number or self.number % every:
            return
        self.reference.take_weights(self.policy)
        if self.topo.is_main:
            print(f"step {self.number}: the reference takes the policy's weights", flush=True)

    def _teacher_logprobs(self, shard: BatchShard, index: BatchIndex) -> torch.Tensor:
        """[N] float32, of each row under the teacher of its source; empty before the last stage."""
        every = self.plan.scores_every_row
        scored = [
            (name, teacher.scores(shard, False, every=every))
            for name, teacher in self.teachers.items()
        ]
        found = scored[0][1].logprobs
        prompts = self.rollouts.source.prompts
        if len(scored) == 1 or not shard.role.last_stage:
            return found
        assert isinstance(prompts, MixedPrompts)  # others have one teacher
        of_sample = [
            self.plan.teachers[prompts.source_of(group)] for group in index.groups.tolist()
        ]
        of_row = np.array(of_sample)[shard.lengths.sample_of(shard.rows.tokens)]
        for name, scores in scored[1:]:
            found = torch.where(torch.from_numpy(of_row == name), scores.logprobs, found)
        return found

    def _with_teacher_states(self, shard: BatchShard) -> BatchShard:
        """With the hidden states of the rows and the LM head of the teacher on the last stage."""
        (teacher,) = self.teachers.values()  # a rule refuses several
        found = teacher.hidden_states(shard, self.plan.vocab_columns)
        if found is None:
            return shard
        hidden, head = found
        return replace(shard.with_columns(teacher_hidden=hidden), teacher_head=head)

    def _reference_scores(self, shard: BatchShard) -> Scores:
        replay = self.plan.replay.reference
        adapters = self.policy.module.adapters
        every = self.plan.scores_every_row
        if self.reference is not None:
            return self.reference.scores(shard, replay, every=every)
        assert adapters is not None
        with adapters.off():
            return self.policy.scores(shard, replay, every=every)

    @property
    def _engine_dtype(self) -> torch.dtype:
        return dtype_of(self.plan.rollout_dtype)

    def _check_batch(self, shard: BatchShard, old: Scores) -> None:
        """Stop before the update if trainer and engine disagree about the tokens of the step."""
        plan = self.plan
        policy = self.policy
        check_batch(
            shard,
            old.logprobs,
            mismatch_limit(plan),
            partial(
                full_check,
                self.rollouts.engine,
                lambda: policy.tensors.published(policy.live()),
                policy.tensors.engine_names,
                policy.step,
                dtype=self._engine_dtype,
                slept=plan.engine_sleeps,
            ),
            step=policy.step,
            agreement={layer: found.fraction for layer, found in old.agreement.items()},
            topo=self.topo,
        )


def _means(rows: Sequence[Metrics]) -> Metrics:
    """The mean of each metric over the rows that have it."""
    found = {name: [row[name] for row in rows if name in row] for name in chain(*rows)}
    return {name: sum(values) / len(values) for name, values in found.items()}


def compare(shard: BatchShard, old: Scores, topo: Topology) -> Metrics:
    """Differences of trainer and engine in log-probs and routes of the same tokens."""
    none = torch.empty(0)
    tokens = sum(counts[0] for counts in shard.loss_tokens)
    rollout = shard.columns.get("rollout_logprobs", none)
    mask = shard.columns["loss_mask_0"] if shard.role.last_stage else none.bool()
    metrics = mismatch(old.logprobs, rollout, mask, topo) if tokens else {}
    if old.agreement:
        share, exact, count = (sum(x) for x in zip(*old.agreement.values(), strict=True))
        metrics |= {"route/agree_topk": share / count, "route/exact_set": exact / count}
        for layer, agreement in old.agreement.items():
            metrics[f"route/agree_topk/layer_{layer}"] = agreement.fraction
    return metrics


def score_canaries(
    policy: Policy, samples: Sequence[Sample]
) -> list[tuple[float, Mapping[int, float]]]:
    """One forward a sample, with its routes forced and counted against the routers' own.

    Args:
        samples: of the first rank; those of others are ignored

    Returns: as `rollout.engine.ScoreCanaries` says, the same on every rank.
    Communicates: the samples' tokens and routes to the ranks that compute them, and the scores.
    """
    given = samples if policy.topo.rank == 0 else ()
    count, *_ = gather_objects(len(given), policy.topo.world)
    return [_score(policy, given[n : n + 1]) for n in range(count)]


def _score(policy: Policy, samples: Sequence[Sample]) -> tuple[float, Mapping[int, float]]:
    plan = policy.plan
    topo = policy.topo
    index, *_ = gather_objects(BatchIndex.of(samples, 0, plan.num_mtp_layers), topo.world)
    batch = None
    schedules = Scheduler(plan).minibatches(index, 1)
    if samples:
        batch = Batch.for_plan(plan, samples, torch.zeros(len(samples)))
    shard, _ = shard_batch(batch, index, schedules, plan, topo)
    scores = policy.scores(shard, replay=plan.replay.of_engine)
    gap, counted = gaps(shard, scores.logprobs, int(index.versions[0]))
    total, number = sum_over_ranks(torch.stack([gap.sum(), counted]), topo).tolist()
    missed = {layer: 1 - found.fraction for layer, found in scores.agreement.items()}
    return total / number, missed
