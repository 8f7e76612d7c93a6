"""`--suggest 8xH200`: the fastest plans that hold and fit on these GPUs, near a given one.

Every layout of the ranks is checked against all rules, gets the least memory saving that fits, and
is priced. Encoders stay where they are given; keys that an override sets are not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pyrl_ext.plan.compile import compile_plan, draft_of, load, refuse, teacher_problems
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.step_time import StepTime, step_time
from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.model.chunks import SPLIT_WAYS, even_layout
from pyrl_ext.plan.model.hardware import memory_limit
from pyrl_ext.plan.model.units import GIB
from pyrl_ext.plan.plan import PartialPlan, Plan
from pyrl_ext.plan.rules import RULES, check
from pyrl_ext.plan.rules._rule import divisors
from pyrl_ext.schedule.cp_sizes import cp_sizes

Values = dict[str, object]  # section.key -> value

# model.recompute and model.recompute_modules, the cheapest first
RECOMPUTE = (
    ("none", ("core_attn", "moe")),
    ("selective", ("core_attn", "moe_act")),
    ("selective", ("core_attn", "moe")),
    ("full", ("core_attn", "moe")),
)
# Share of a GPU's memory that stays free, since most of a step's memory is estimated.
LEFT_FREE = 0.05


class Suggestion(NamedTuple):
    """A plan that holds and fits."""

    overrides: tuple[str, ...]
    """Overrides to add to the given ones."""
    plan: Plan
    peak: int
    """Most bytes that the fullest rank holds."""
    time: StepTime
    values: Values
    """All values that the search chose."""


@dataclass
class Search:
    """The result of a search."""

    limit: int
    """Device memory of a rank [bytes]."""
    layouts: int = 0
    """Layouts of the ranks."""
    broken: Counter[str] = field(default_factory=Counter[str])
    """Rule -> layouts that break it."""
    too_large: int = 0
    """Layouts that break no rule and do not fit."""
    smallest: int | None = None
    """Least memory of a rank of those that do not fit [bytes]."""
    found: list[Suggestion] = field(default_factory=list["Suggestion"])
    """The fastest setting of each layout that fits, fastest first."""


def suggest(
    path: str | Path, overrides: Sequence[str], gpus: int, gpu: str, most: int = 6
) -> Search:
    """The fastest `most` plans for `gpus` devices of the kind `gpu`, starting from a config file.

    Raises:
        ConfigError: with problems that every layout has
    """
    source = load(path, overrides)
    draft = draft_of(source)
    refuse(source)
    given = _Given(draft, {".".join(key) for key in source.overrides}, gpus, gpu)
    limit = memory_limit(given.plan({}))
    assert limit is not None, "candidates name a GPU"
    search = Search(limit)
    everywhere: Counter[tuple[str, str]] = Counter()
    for layout in given.layouts():
        search.layouts += 1
        if broken := _broken(given.plan(layout)):
            search.broken.update({rule for rule, *_ in broken})
            everywhere.update({(key, message) for _, key, message in broken})
        else:
            given.save_memory(layout, search)
    refuse(source, (each for each, times in everywhere.items() if times == search.layouts))
    fastest = sorted(search.found, key=lambda each: each.time.total)[:most]
    found = [given.with_fastest_engine(each, search.limit) for each in fastest]
    search.found = sorted(found, key=lambda each: each.time.total)
    for suggestion in search.found:
        compile_plan(path, [*overrides, *suggestion.overrides])  # check it as it will be pasted
    return search


def _text(value: object) -> str:
    """As an override has it, without spaces."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return value if isinstance(value, str) else show(value)


def _broken(plan: Plan) -> list[tuple[str, str, str]]:
    """(rule, key, message) of the rules that a plan breaks, but for its memory's."""
    rules = [(key, rule) for key, rule in RULES if key != "hardware.gpu"]
    broken = [(each[1].__name__, *problem) for each in rules for problem in check(plan, [each])]
    if broken:  # a teacher that has the same ranks is not asked
        return broken
    return [("the_teacher_runs_on_these_ranks", *problem) for problem in teacher_problems(plan)]


class _Given:
    """The given plan, and what may be changed in it."""

    def __init__(self, draft: PartialPlan, pinned: set[str], gpus: int, gpu: str) -> None:
        self.draft = draft
        self.pinned = pinned - {"hardware.gpu"}
        self.gpus = gpus - (draft.world_size - draft.parallel.world_size)  # the others encode
        self.machine: Values = {"hardware.gpu": gpu}
        if draft.hardware.gpu != gpu:
            self.machine["hardware.memory"] = None  # the given value is of another GPU

    def value(self, key: str) -> Any:
        """The value in the given plan."""
        section, name = key.split(".")
        return getattr(getattr(self.draft, section), name)

    def choices[T](self, key: str, values: Sequence[T]) -> Sequence[T]:
        """`values`, or the given value if an override sets it."""
        return [self.value(key)] if key in self.pinned else values

    def plan(self, values: Values) -> Plan:
        """The given plan with other values, but for those that an override sets; not checked."""
        changes = (self.machine | values).items()
        return self.draft.changed(
            {tuple(key.split(".")): value for key, value in changes if key not in self.pinned}
        )

    def layouts(self) -> Iterator[Values]:
        """Every layout of the ranks, with the layers split into its stages."""
        if self.gpus < 1:
            return
        sizes = divisors(self.gpus)
        axes = ("parallel.tp", "parallel.pp", "parallel.cp")
        for tp, pp, cp in product(*(self.choices(axis, sizes) for axis in axes)):
            dp, odd = divmod(self.gpus, tp * pp * cp)
            if odd or pp > self.draft.sizes.num_hidden_layers:
                continue
            if dp not in self.choices("parallel.dp", [dp]):
                continue
            for etp in self.choices("parallel.etp", [None, 1] if tp > 1 else [None]):
                experts = divisors(max(1, dp * tp * cp // (etp or tp)))
                for ep in self.choices("parallel.ep", experts):
                    ranks = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
                    yield self._completed({f"parallel.{axis}": ranks[axis] for axis in ranks})

    def _completed(self, values: Values) -> Values:
        """A layout with its split of layers, optimizer, dynamic groups and microbatches."""
        given = self.draft.parallel
        layers = self.draft.sizes.num_hidden_layers
        parallel = self.plan(values).parallel
        pp = parallel.pp
        ranks = parallel.dp * parallel.cp
        split: Values = {
            f"parallel.{key}": False if way == "even" else None for key, way in SPLIT_WAYS.items()
        }
        if pp != given.pp and not self.pinned.intersection(split):
            values |= split
            values["parallel.vpp"] = None
            chunks = pp * self.plan(values).parallel.vpp_size
            if layers % chunks:
                layout = even_layout(layers, self.draft.num_mtp_layers, chunks)
                values["parallel.pipeline_model_parallel_layout"] = layout
        # sharding the optimizer state sends as many bytes
        spreads = ranks > 1 or self.draft.optimizer.distributed
        values["optimizer.distributed"] = spreads and self.draft.optimizer.name == "adamw"
        if given.dynamic_cp:
            larger = cp_sizes(ranks, parallel.cp, given.dynamic_cp)[1:]
            values["parallel.dynamic_cp"] = larger[-1] if larger else None
        plan = self.plan(values)
        rows = -(-plan.max_rows // (plan.parallel.dynamic_cp or parallel.cp))
        tokens = self.draft.batching.tokens_per_microbatch
        fitting = tokens if tokens >= rows else -(-rows // 256) * 256
        return values | {"batching.tokens_per_microbatch": fitting}

    def save_memory(self, layout: Values, search: Search) -> None:
        """Add a layout with the first memory saving that makes it fit to what was found."""
        rollout = self.draft.rollout
        shares = rollout.engine == "vllm" and not self.draft.remote_engines and not rollout.gpus
        offloads = [rollout.offload_trainer, "all"] if shares else [rollout.offload_trainer]
        chunks = [self.draft.logprob.chunk_bytes]
        if self.draft.head_chunk_bytes > GIB:
            chunks.append(GIB)
        for offload, (recompute, modules), chunk in product(
            self.choices("rollout.offload_trainer", offloads),
            [way for way in RECOMPUTE if way[0] in self.choices("model.recompute", way[:1])],
            self.choices("logprob.chunk_bytes", chunks),
        ):
            saving: Values = {
                "rollout.offload_trainer": offload,
                "model.recompute": recompute,
                "model.recompute_modules": list(modules),
                "logprob.chunk_bytes": chunk,
            }
            values = self.machine | layout | saving
            peak, suggestion = self.priced(values, search.limit)
            if suggestion is not None:
                search.found.append(suggestion)
                return
            search.smallest = min(peak, search.smallest or peak)
        search.too_large += 1

    def priced(self, values: Values, limit: int) -> tuple[int, Suggestion | None]:
        """Most bytes that the fullest rank holds with ``values``; and their plan, or None if it
        leaves too little memory or breaks a rule."""
        plan = self.plan(values)
        peak = max(stage.peak for stage in stage_memory(plan))
        if peak > (1 - LEFT_FREE) * limit or _broken(plan):
            return peak, None
        time = step_time(plan)
        assert time is not None, "candidates name a GPU"
        texts = tuple(
            f"{key}={_text(value)}"
            for key, value in values.items()
            if key not in self.pinned and value != self.value(key)
        )
        return peak, Suggestion(texts, plan, peak, time, values)

    def with_fastest_engine(self, found: Suggestion, limit: int) -> Suggestion:
        """``found`` with the `rollout.tp` for which a step is fastest: fewer engines of more GPUs
        each read fewer weights a token, and send more between GPUs."""
        rollout = found.plan.rollout
        if rollout.engine != "vllm" or found.plan.remote_engines:
            return found
        sizes = divisors(rollout.gpus or self.gpus)
        fastest = found
        for tp in self.choices("rollout.tp", sizes):
            values = found.values | {"rollout.tp": tp}
            _, other = self.priced(values, limit)
            if other is not None and other.time.total < fastest.time.total:
                fastest = other
        return fastest
