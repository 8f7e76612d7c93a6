"""A plan as verdicts and tables of text, which the terminal and the page print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic.fields import FieldInfo

from pyrl_ext.plan import rules
from pyrl_ext.plan.forecast.encoder import EncoderForecast, encoders
from pyrl_ext.plan.forecast.engine_memory import engine_memory, state_bytes
from pyrl_ext.plan.forecast.memory import StageMemory, stage_memory
from pyrl_ext.plan.forecast.parameters import (
    chunk_parameters,
    frozen_parameters,
    held_on_rank,
    published,
    published_factors,
)
from pyrl_ext.plan.forecast.step_time import StepTime, step_time
from pyrl_ext.plan.language.errors import Key, show
from pyrl_ext.plan.language.fields import Section
from pyrl_ext.plan.language.kind import WITH_ROLLOUTS, WITHOUT_ROLLOUTS
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.hardware import memory_limit
from pyrl_ext.plan.model.units import (
    amount,
    count,
    duration,
    in_units,
    scientific,
    size,
    unit_for,
)
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.schema import Config
from pyrl_ext.schedule.learning_rate import LearningRate


class Verdict(NamedTuple):
    """The answer to one question about a plan: does it hold, fit, run."""

    tone: Literal["good", "bad", "plain"]
    answer: str
    detail: str


class Table(NamedTuple):
    """Rows of text."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: tuple[str, ...] = ()
    """Columns of numbers."""
    strong: frozenset[str] = frozenset()
    """First cells of rows that sum up others."""


class Value(NamedTuple):
    """A field of the plan as text."""

    key: str
    text: str
    meaning: str
    is_default: bool


class Summary:
    """A plan with its memory and time, computed once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Memory of the fullest rank of every stage."""
        return stage_memory(self.plan)

    @cached_property
    def fullest(self) -> StageMemory:
        """The stage with the highest peak."""
        return max(self.memory, key=lambda stage: stage.peak)

    @cached_property
    def limit(self) -> int | None:
        """Bytes of device memory; None if the plan does not name it."""
        return memory_limit(self.plan)

    @cached_property
    def time(self) -> StepTime | None:
        """Time of a step; None if the plan names no GPU."""
        return step_time(self.plan)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Answers: is the plan consistent, does it fit, how long does a step take, can it run."""
        number = len(rules.RULES)
        consistent = Verdict("good", "consistent", f"all {number} rules hold, every field is known")
        return (consistent, self._fits(), self._takes(), self._runs())

    def _fits(self) -> Verdict:
        stage = self.fullest
        limit = self.limit
        phase = max(reversed(stage.phases), key=stage.held)
        where = f"about {size(stage.peak)} at the peak ({phase}) of the fullest rank"
        if len(self.memory) > 1:
            where += f" of {stage.name}"
        if limit is None:
            unknown = "hardware.gpu names no device to compare with"
            return Verdict("plain", "memory", f"{where}; {unknown}")
        spare = limit - stage.peak
        where += f", of {size(limit)}"
        if spare < 0:
            return Verdict("bad", "does not fit", f"{where}: {size(-spare)} too much")
        return Verdict("good", "fits", f"{where}: {size(spare)} left")

    def _takes(self) -> Verdict:
        if self.time is None:
            return Verdict("plain", "time", "not estimated: hardware.gpu names no GPU")
        took = f"about {duration(self.time.total)} a step on {self.plan.world_size}"
        mfu = f"MFU of the update {self.time.mfu:.0%} (estimated)"
        if self.plan.remote_engines and self.plan.rollout.ahead:
            mfu += "; phases are added up, rollout.ahead overlaps them"
        return Verdict("plain", "time", f"{took} {self.plan.hardware.gpu}, {mfu}")

    def _runs(self) -> Verdict:
        missing = len(self.plan.unsupported)
        if not missing:
            return Verdict("good", "runs", "the trainer supports everything in this plan")
        return Verdict("bad", "cannot run yet", f"features without support: {missing}, see below")

    def tables(self) -> Iterator[Table]:
        """Facts, memory, time and stages."""
        yield Table("follows", ("", ""), [*facts(self.plan)])
        yield self.memory_table()
        if len(self.memory) > 1:
            yield self._stages_table()
        if self.time is not None:
            yield time_table(self.time)

    def memory_table(self) -> Table:
        """Items of the fullest stage by phase, with totals and headroom."""
        stage = self.fullest
        limit = self.limit
        unit, factor = unit_for(max(stage.peak, limit or 0))
        rows = []
        for host in (False, True):
            items = [item for item in stage.items if item.host == host]
            for item in items:
                name = f"{'' if item.exact else '~ '}{item.name}{' (host)' * host}"
                cells = (
                    in_units(item.bytes, factor) if phase in item.phases else ""
                    for phase in stage.phases
                )
                rows.append((name, *cells, item.why))
            if not items:
                continue
            total = [stage.held(phase, host) for phase in stage.phases]
            name = "together on the host" if host else "together"
            rows.append((name, *(in_units(held, factor) for held in total), ""))
            if limit is not None and not host:
                left = (in_units(limit - held, factor) for held in total)
                rows.append(("headroom", *left, f"of {size(limit)}"))
        where = (
            "" if len(self.memory) == 1 else f" of {stage.name}, the fullest of {len(self.memory)}"
        )
        return Table(
            f"memory of a rank{where} [{unit}] (~ estimated)",
            ("item", *stage.phases, "how it is counted"),
            rows,
            stage.phases,
            frozenset({"together", "together on the host"}),
        )

    def _stages_table(self) -> Table:
        """Contents and peak memory of each pipeline stage; layers are 0-based global ids."""
        plan = self.plan
        rows = []
        for stage in self.memory[: plan.parallel.pp]:
            for number, chunk in enumerate(plan.stages[stage.stage]):
                more = {"embedding": chunk.embedding, "mtp": chunk.mtp, "loss": chunk.loss}
                besides = ", ".join(name for name, present in more.items() if present)
                total = count(chunk_parameters(plan, chunk).total)
                peak = "" if number else size(stage.peak)
                rows.append((stage.name, ranges(chunk.layers), besides, total, peak))
        for stage in self.memory[plan.parallel.pp :]:
            rows.append((stage.name, "", "", "", size(stage.peak)))
        head = ("stage", "layers", "besides", "parameters", "peak memory")
        return Table("stages", head, rows, head[3:])


def time_table(time: StepTime) -> Table:
    """Time of every phase and of each kind of work in it, with the assumption behind it."""
    rows = []
    for phase in time.phases:
        rows.append((phase, *_took(time.seconds(phase), time.total), ""))
        for cost in time.costs:
            if cost.phase == phase:
                took = _took(cost.seconds, time.total)
                rows.append(
                    (f"  {cost.name}", *took, f"{amount(cost.amount, cost.unit)}: {cost.why}")
                )
    rows.append(("together", *_took(time.total, time.total), f"MFU of the update {time.mfu:.0%}"))
    strong = frozenset({*time.phases, "together"})
    head = ("phase", "time", "share", "assumed")
    return Table("time of a step (estimated)", head, rows, ("time", "share"), strong)


def _took(seconds: float, total: float) -> tuple[str, str]:
    return duration(seconds), f"{seconds / total:.0%}"


# Values -----------------------------------------------------------------------------------------


def values(plan: Plan) -> list[Value]:
    """Every field that this kind of run reads, in the order of the schema."""
    unread = WITHOUT_ROLLOUTS if plan.has_rollouts else WITH_ROLLOUTS
    found: list[Value] = []
    for name, field in Config.model_fields.items():
        found += _values((name,), getattr(plan, name), field)
    keys = [tuple(value.key.split(".")) for value in found]
    return [v for v, key in zip(found, keys, strict=True) if not {key, key[:1]} & {*unread}]


def _values(key: Key, value: object, field: FieldInfo) -> Iterator[Value]:
    """The fields of a section, of each section of a mapping, or the one field."""
    if isinstance(value, Section):
        for name, inner in type(value).model_fields.items():
            yield from _values((*key, name), getattr(value, name), inner)
    elif isinstance(value, dict) and any(isinstance(each, Section) for each in value.values()):
        for name, inner in value.items():
            yield from _values((*key, name), inner, field)
    else:
        is_default = value == field.get_default(call_default_factory=True)
        text = value if isinstance(value, str) else show(value)
        yield Value(".".join(key), text, field.description or "", is_default)


# Facts ------------------------------------------------------------------------------------------


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """(name, text) of derived numbers: ranks, groups, parameters, routes and batch sizes."""
    parallel = plan.parallel
    sizes = plan.sizes
    counts = parameters(sizes)
    expert_dp = parallel.world_size // (parallel.pp * parallel.ep * parallel.etp_size)
    replica = f"dp {parallel.dp} x tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp}"
    experts = f"ep {parallel.ep} x etp {parallel.etp_size} x dp {expert_dp}"
    if plan.world_size > parallel.world_size:
        yield "world", f"{plan.world_size} ranks"
    yield "ranks", f"{parallel.world_size} = {replica}; experts {experts}"
    for encoder in encoders(plan):
        yield encoder.name, _encoder(plan, encoder)
    kinds = plan.grids["llm"].groups.items()
    groups = ", ".join(f"{name} {len(kind)} of {len(kind[0])}" for name, kind in kinds)
    yield "groups", groups or "none: one rank"
    yield "parameters", f"{count(counts.total)}, {count(counts.active)} of them active for a token"
    routers = plan.router_layers
    yield (
        "routers",
        (
            f"{len(routers)} of {sizes.num_hidden_layers} layers ({ranges(routers)}), each picks "
            f"{sizes.topk} of {sizes.num_experts} experts"
        ),
    )
    if sizes.state_mixer is not None:
        mixers = Counter(kind.mixer for kind in sizes.layer_kinds if kind.mixer).items()
        words = ", ".join(f"{number} of {name.replace('_', ' ')}" for name, number in mixers)
        state = size(state_bytes(plan, plan.rollout.tp))
        yield "layers", f"{words}; a sequence's states are {state} on each of an engine's devices"
        if pattern := plan.derived.get("hybrid_layer_pattern"):
            yield "", pattern
    if plan.lora is not None:
        yield "adapters", _adapters(plan)
    if plan.model.freeze:
        yield "frozen", _frozen(plan)
    if plan.has_rollouts:
        yield from _rollout(plan)
    else:
        yield "step", f"{plan.samples} records of {plan.data.path}, without rollouts"
    minibatch = f"{plan.samples_per_minibatch} samples, {plan.batching.minibatches} a step"
    if plan.batching.epochs > 1:
        minibatch += f" in each of {plan.batching.epochs} epochs"
    yield "minibatch", minibatch
    for name in ("llm", *plan.modules):
        rate = plan.learning_rate(name)
        of = "" if name == "llm" else f" of {name}"
        if not rate.is_constant and (name == "llm" or plan.modules[name].lr is not None):
            yield f"lr{of}", _schedule(rate)
    yield (
        "microbatches",
        (
            f"of {plan.batching.tokens_per_microbatch:,} rows; the longest sample has "
            f"{plan.max_rows:,}, padded to a multiple of {plan.row_alignment}"
        ),
    )


def _schedule(rate: LearningRate) -> str:
    """The learning rate over the 0-based optimizer steps of a run."""
    text = scientific(rate.lr)
    if rate.warmup_steps:
        text += f", warmup {rate.warmup_steps} steps"
    if rate.schedule == "constant":
        return text
    falls = rate.schedule
    if rate.schedule == "wsd":
        falls = f"linear from step {rate.decay_begin}"
    last = scientific(rate(rate.steps))
    return f"{text}, {falls} to {last} at optimizer step {rate.steps}"


def ranges(ids: tuple[int, ...]) -> str:
    """Rising ids with runs joined: (1, 2, 3, 5) -> 1-3, 5."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][-1] == i - 1:
            runs[-1][1:] = [i]
        else:
            runs.append([i])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def _encoder(plan: Plan, encoder: EncoderForecast) -> str:
    grid = plan.grids[encoder.name]
    sizes = encoder.parallel
    place = f"ranks {grid.first}-{grid.ranks[-1]}"
    if encoder.shared:
        place += ", those of the language model's first stage, a replica on each"
    else:
        place += f" = dp {sizes.dp} x tp {sizes.tp} x pp {sizes.pp}"
    total = sum(encoder.parameters(stage).total for stage in range(sizes.pp))
    trained = "trained" if encoder.module.train else "frozen"
    return (
        f"{place}: {encoder.tower.num_hidden_layers} layers, {count(total)} parameters, {trained}"
    )


def _adapters(plan: Plan) -> str:
    """Size of the adapters, and what a weight sync sends."""
    text = f"{count(published_factors(plan).numbers)} numbers; the base is frozen"
    if plan.lora_publish is None:
        return text
    width = plan.engine_bytes
    sent = width * published(plan).numbers
    whole = width * parameters(plan.sizes).total
    return f"{text}; published by {plan.lora_publish}: {size(sent)} of {size(whole)} of all weights"


def _frozen(plan: Plan) -> str:
    """The numbers that `model.freeze` names, and what a weight sync sends."""
    whole = ModelChunk(True, tuple(range(plan.sizes.num_hidden_layers)), plan.num_mtp_layers, True)
    number = frozen_parameters(plan, whole).total
    text = f"{count(number)} parameters in {len(plan.frozen)} tensors, by model.freeze"
    if not plan.has_rollouts or plan.sends_all:
        return text
    width = plan.engine_bytes
    sent = size(width * published(plan).numbers)
    everything = size(width * parameters(plan.sizes).total)
    return f"{text}; a weight sync sends {sent} of {everything} after the first one"


def _driven_by(plan: Plan) -> str:
    """Lines on the environments, or on the agent."""
    if not plan.turns.by_source:
        return plan.turns.name
    return ", ".join(f"{each.name} for {source}" for source, each in plan.environments.items())


def _teacher(plan: Plan, name: str, teacher: Plan) -> str:
    """Whom a teacher teaches, where it lives, and what it holds there."""
    taught = [source for source, own in plan.teachers.items() if source and own == name]
    of_sources = f" of {', '.join(taught)}" if taught else ""
    stages = range(teacher.parallel.pp)
    held = max(held_on_rank(teacher, stage) for stage in stages) * teacher.weight_bytes
    device = "GPU" if plan.device == "cuda" else "rank"
    return f"{name}{of_sources}, on the trainer's ranks, {size(held)} a {device}"


def _rollout(plan: Plan) -> Iterator[tuple[str, str]]:
    """The engine, the environment, and a step's samples."""
    rollout = plan.rollout
    turns = plan.turns
    where = "in the trainer's process"
    if plan.remote_engines:
        where = f"remote, {plan.num_engines} of tp {rollout.tp}"
    elif plan.transport != "inprocess":
        where = f"in a separate process, weights by {plan.transport}"
    yield "engine", f"{rollout.engine}, {where}" if rollout.engine != "recorded" else "recorded"
    if memory := engine_memory(plan):
        yield (
            "",
            (
                f"on each GPU {size(memory.weights)} of weights, and a KV cache for "
                f"{memory.tokens:,} tokens ({memory.tokens // memory.sample:,} of the longest "
                "samples)"
            ),
        )
    if weights := plan.source_weights:
        whole = sum(weights.values())
        shares = [f"{weight / whole:.0%} {name}" for name, weight in weights.items()]
        yield "prompts", ", ".join(shares)
    if plan.replay.enabled:
        width = plan.sizes.route_bytes_per_token
        most = size(width * plan.max_rows * plan.samples)
        yield "routes", f"{width} bytes a token, at most {most} a step"
    if turns.kind is not None:
        yield (
            turns.kind,
            (
                f"{_driven_by(plan)}: at most {turns.max_turns} turns of {rollout.max_new_tokens} "
                f"tokens, {turns.max_tokens:,} tokens in all; {turns.form}"
            ),
        )
    if servers := plan.teacher.servers:
        more = f" and {len(servers) - 1} more" if len(servers) > 1 else ""
        sent = f"{plan.samples} samples of at most {plan.longest + 1:,} tokens a step"
        yield "teacher", f"{plan.teacher.model} on {servers[0]}{more}, which score {sent}"
    group = plan.batching.samples_per_prompt
    yield "rollout step", f"{plan.samples} samples in groups of {group}"
    for name, teacher in plan.teacher_plans.items():
        yield "teacher", _teacher(plan, name, teacher)
