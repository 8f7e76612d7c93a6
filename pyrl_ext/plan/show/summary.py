"""Verdicts, facts and values of a plan as text, for the terminal and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic.fields import FieldInfo

from pyrl_ext.plan import rules
from pyrl_ext.plan.forecast.encoder import encoders
from pyrl_ext.plan.forecast.hardware import memory_limit
from pyrl_ext.plan.forecast.loop import Steady
from pyrl_ext.plan.forecast.lora import factor_numbers, published_numbers
from pyrl_ext.plan.forecast.memory import StageMemory, stage_memory
from pyrl_ext.plan.forecast.remote_engines import steady_states
from pyrl_ext.plan.forecast.state_layers import state_bytes
from pyrl_ext.plan.forecast.step_time import StepTime, step_time
from pyrl_ext.plan.forecast.units import DTYPE_BYTES, count, duration, size
from pyrl_ext.plan.language.errors import Key, show
from pyrl_ext.plan.language.fields import Section
from pyrl_ext.plan.language.kind import WITH_ROLLOUTS, WITHOUT_ROLLOUTS
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.schema import Config
from pyrl_ext.plan.show.formula import formula


class Verdict(NamedTuple):
    """The answer to one question about a plan: does it hold, fit, run."""

    tone: Literal["good", "bad", "plain"]
    answer: str
    detail: str


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

    @cached_property
    def states(self) -> tuple[Steady, ...]:
        """Steps with some values of rollout.ahead; empty without remote engines, or a GPU."""
        apart = self.plan.remote_engines and self.time
        return steady_states(self.plan, apart) if apart else ()

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """True if the plan is consistent, fits and can run."""
        count = len(rules.RULES)
        consistent = Verdict("good", "consistent", f"all {count} rules hold, every field is known")
        return (consistent, self._fits(), self._takes(), self._runs())

    def _fits(self) -> Verdict:
        stage = self.fullest
        limit = self.limit
        phase = peak_phase(stage)
        counted = [item for item in stage.items if phase in item.phases and not item.host]
        about = "" if all(item.exact for item in counted) else "about "
        stages = f" of {stage.name}" if len(self.memory) > 1 else ""
        where = f"at the peak ({phase}) of the fullest rank{stages}"
        if limit is None:
            unknown = "hardware.gpu names no device to compare with"
            return Verdict("plain", "memory", f"{about}{size(stage.peak)} {where}; {unknown}")
        peak = f"{about}{size(stage.peak)} of {size(limit)} {where}"
        spare = limit - stage.peak
        if spare < 0:
            return Verdict("bad", "does not fit", f"{peak}: {size(-spare)} too much")
        return Verdict("good", "fits", f"{peak}: {size(spare)} left")

    def _takes(self) -> Verdict:
        if self.time is None:
            unknown = "not estimated: hardware.gpu names no GPU"
            return Verdict("plain", "time", unknown)
        devices = f"{self.plan.world_size} {self.plan.hardware.gpu}"
        seconds = self.time.total
        if self.states:
            ahead = self.plan.rollout.ahead
            (seconds,) = (each.seconds for each in self.states if each.ahead == ahead)
            engines = self.plan.num_engines * self.plan.rollout.tp
            devices += f" and {engines} that generate, {ahead} ahead"
        took = f"about {duration(seconds)} a step on {devices}"
        return Verdict(
            "plain", "time", f"{took}, MFU of the update {self.time.mfu:.0%} (estimated)"
        )

    def _runs(self) -> Verdict:
        missing = len(self.plan.unsupported)
        if not missing:
            return Verdict("good", "runs", "the trainer supports everything in this plan")
        things = "1 thing" if missing == 1 else f"{missing} things"
        return Verdict(
            "bad", "cannot run yet", f"{things} that the trainer does not support, listed below"
        )

    @property
    def device(self) -> str:
        """The device of one rank, in words."""
        hardware = self.plan.hardware
        return f"one {hardware.gpu}" if hardware.gpu else f"one {self.plan.device} device"


def facts(plan: Plan) -> list[tuple[str, str]]:
    """(name, text) of derived numbers: ranks, groups, parameters, routes and batch sizes."""
    parallel = plan.parallel
    sizes = plan.sizes
    batching = plan.batching
    counts = parameters(sizes)
    routers = plan.router_layers
    expert_dp = parallel.world_size // (parallel.pp * parallel.ep * parallel.etp_size)
    replica = f"dp {parallel.dp} x tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp}"
    experts = f"ep {parallel.ep} x etp {parallel.etp_size} x dp {expert_dp}"
    kinds = plan.grids["llm"].groups.items()
    groups = ", ".join(f"{name} {len(kind)} of {len(kind[0])}" for name, kind in kinds)
    return [
        *_modules(plan),
        ("ranks", f"{parallel.world_size} = {replica}; experts {experts}"),
        ("groups", groups or "none: one rank"),
        ("parameters", f"{count(counts.total)}, {count(counts.active)} of them active for a token"),
        ("routers", f"{len(routers)} of {sizes.num_hidden_layers} layers ({ranges(routers)}), "
                    f"each picks {sizes.topk} of {sizes.num_experts} experts"),
        *_pattern(plan),
        *_adapters(plan),
        *_cp_costs(plan),
        *_source(plan),
        *(("" if i else "objective", line) for i, line in enumerate(_formula(plan))),
        ("minibatch", f"{plan.samples_per_minibatch} samples, {batching.minibatches} a step"),
        ("microbatches", f"at most {most_microbatches(plan)} a minibatch and replica: samples of "
                         f"{plan.max_rows} rows, padded to a multiple of {plan.row_alignment}"),
    ]  # fmt: skip


def _pattern(plan: Plan) -> list[tuple[str, str]]:
    """The layers of a hybrid model: its kinds, and megatron-core's pattern of one with a block a
    layer."""
    if plan.sizes.state_mixer is None:
        return []
    mixers = Counter(kind.mixer for kind in plan.sizes.layer_kinds if kind.mixer).items()
    words = ", ".join(f"{number} of {name.replace('_', ' ')}" for name, number in mixers)
    state = size(state_bytes(plan, plan.rollout.tp))
    found = [("layers", f"{words}; a sequence's states are {state} on each of an engine's devices")]
    pattern = plan.derived.get("hybrid_layer_pattern")
    return [*found, ("", pattern)] if pattern else found


def _formula(plan: Plan) -> list[str]:
    return formula(plan.objective, plan.most_sampled)


def values(plan: Plan) -> list[Value]:
    """Every field that this kind of run reads, in the order of the schema."""
    found = []
    for name, field in Config.model_fields.items():
        found += _values((name,), getattr(plan, name), field)
    return [value for value in found if is_read(plan, tuple(value.key.split(".")))]


def _values(key: Key, value: object, field: FieldInfo) -> Iterator[Value]:
    """The fields of a section, of each section of a mapping, or the one field."""
    if isinstance(value, Section):
        for name, each in type(value).model_fields.items():
            yield from _values((*key, name), getattr(value, name), each)
    elif isinstance(value, dict) and any(isinstance(each, Section) for each in value.values()):
        for name, each in value.items():
            yield from _values((*key, name), each, field)
    else:
        is_default = value == field.get_default(call_default_factory=True)
        text = value if isinstance(value, str) else show(value)
        yield Value(".".join(key), text, field.description or "", is_default)


def is_read(plan: Plan, key: Key) -> bool:
    """True if this kind of run, with rollouts or without, reads `key`."""
    unread = WITHOUT_ROLLOUTS if plan.has_rollouts else WITH_ROLLOUTS
    return key not in unread and key[:1] not in unread


def peak_phase(stage: StageMemory) -> str:
    """The phase in which a stage holds most on the device."""
    return max(reversed(stage.phases), key=stage.held)


def most_microbatches(plan: Plan) -> int:
    """Microbatches of a minibatch on one replica if every sample has the maximum length."""
    # a sample that is split over several ranks (parallel.dynamic_cp) is one microbatch
    each = max(1, plan.batching.tokens_per_microbatch // plan.max_rows)
    samples = -(-plan.samples_per_minibatch // plan.parallel.dp)
    return -(-samples // each)


def ranges(ids: tuple[int, ...]) -> str:
    """Rising ids with runs joined: (1, 2, 3, 5) -> 1-3, 5."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][-1] == i - 1:
            runs[-1][1:] = [i]
        else:
            runs.append([i])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def _cp_costs(plan: Plan) -> list[tuple[str, str]]:
    """The costs that groups are planned by, where microbatches have groups of several sizes."""
    if plan.parallel.dynamic_cp is None:
        return []
    origin = f"estimated for {plan.hardware.gpu}" if plan.hardware.gpu else "counted operations"
    return [("cp costs", "measured, cp_cost" if plan.cp_cost.token_seconds else f"{origin}; "
             "cp_cost would hold measured ones")]  # fmt: skip


def _adapters(plan: Plan) -> list[tuple[str, str]]:
    """Facts about adapters, where there are some: their size, and what of them is published."""
    lora = plan.lora
    if lora is None:
        return []
    numbers = factor_numbers(plan)
    each = DTYPE_BYTES[plan.rollout_dtype]
    ranks = f"rank {lora.rank}"
    if lora.rank_of(expert=True) != lora.rank:
        ranks += f", of routed experts {lora.rank_of(expert=True)}"
    found = [("adapters", f"{count(numbers)} numbers, {ranks}; the base is frozen")]
    if plan.lora_publish is not None:
        whole = each * parameters(plan.sizes).total
        sent = each * published_numbers(plan)
        share = f"{sent / whole:.1%} of the {size(whole)} of all weights"
        if sent < whole:
            share = f"{whole / sent:,.1f} times less than the {size(whole)} of all weights"
        why = "; an engine that sleeps keeps nothing" * plan.engine_sleeps
        why += "; remote engines may be new and get all weights" * plan.remote_engines
        found.append(("", f"published by {plan.lora_publish}: {size(sent)}, {share}{why}"))
    return found


def _modules(plan: Plan) -> Iterator[tuple[str, str]]:
    """Facts about the ranks of modules, where there are some."""
    words = {"llm": "the language model"}
    shared = {each.name for each in encoders(plan) if each.shared}
    names = [
        f"{len(grid.ranks)} of {words.get(name, name)}"
        for name, grid in plan.grids.items()
        if name not in shared
    ]
    if plan.world_size > plan.parallel.world_size:
        yield "world", f"{plan.world_size} ranks: {', '.join(names)}"
    for each in encoders(plan):
        sizes = each.parallel
        grid = plan.grids[each.name]
        total = sum(each.parameters(stage).total for stage in range(sizes.pp))
        rate = each.module.lr if each.module.lr is not None else plan.optimizer.lr
        trained = f"trained with lr {rate:g}" if each.module.train else "frozen"
        place = f"ranks {grid.first}-{grid.ranks[-1]}"
        if each.shared:
            place += ", those of the language model's first stage, a replica on each"
        else:
            place += f" = dp {sizes.dp} x tp {sizes.tp} x pp {sizes.pp}"
        layers = f"{each.tower.num_hidden_layers} layers, {count(total)} parameters"
        yield each.name, f"{place}: {layers}, {trained}"
        patches = plan.estimate.image_patches
        rows = patches // each.tower.merge**2
        width = each.row_width
        sent = size(rows * width * DTYPE_BYTES[plan.model.dtype])
        ways = "there and back" if each.module.train else "there"
        flying = f"its last stage keeps {each.in_flight(sizes.pp - 1)} microbatches in flight"
        if each.shared:
            flying = f"{each.in_flight(0)} microbatches are in flight"
        image = f"{rows} rows x {width:,} numbers for an image of {patches:,} patches"
        yield f"from {each.name}", f"{image}, {sent} {ways}; {flying}"


def _source(plan: Plan) -> list[tuple[str, str]]:
    """Facts about where a step's samples come from."""
    if not plan.has_rollouts:
        return [("step", f"{plan.samples} records of {plan.data.path}, without rollouts")]
    step = f"{plan.samples} samples in groups of {plan.batching.samples_per_prompt}"
    known = [("engine", _engine(plan)), ("routes", _routes(plan))]
    return [*known, *_turns(plan), ("rollout step", step)]


def _turns(plan: Plan) -> list[tuple[str, str]]:
    """The environment and its budgets, where there is one."""
    turns = plan.turns
    if turns.environment is None:
        return []
    form = "one sample a trajectory"
    if turns.form == "stepwise":
        form = "one sample a turn" + ", those that continue each other merged" * turns.merge
    return [
        ("environment", f"{turns.environment}: at most {turns.max_turns} turns of "
                        f"{plan.rollout.max_new_tokens} tokens, observations of "
                        f"{turns.max_observation_tokens}, {turns.max_tokens:,} tokens in all"),
        ("", f"{form}; {turns.timeout:g} s a call; a step needs {turns.min_share:.0%} of its "
             "trajectories"),
    ]  # fmt: skip


def _engine(plan: Plan) -> str:
    rollout = plan.rollout
    if plan.remote_engines:
        return f"{rollout.engine}, apart from the trainer, over HTTP"
    way = "in the trainer's process"
    if plan.transport != "inprocess":
        way = f"in a separate process, weights by {plan.transport}"
    if rollout.engine != "vllm":
        return "recorded" if rollout.engine == "recorded" else f"{rollout.engine}, {way}"
    where = "apart from the trainer's" if rollout.gpus else "shared with the trainer"
    devices = rollout.gpus or plan.parallel.world_size
    number = devices // rollout.tp
    return f"vllm, {number} of tp {rollout.tp} on {devices} devices {where}, {way}"


def _routes(plan: Plan) -> str:
    if not plan.replay.enabled:
        return "not replayed"
    each = plan.sizes.route_bytes_per_token
    return f"{each} bytes a token, at most {size(each * plan.max_rows * plan.samples)} a step"
