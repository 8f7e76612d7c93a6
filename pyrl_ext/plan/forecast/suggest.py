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

from pyrl_ext.plan.compile import compile_plan, draft_of, load, refuse
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.step_time import StepTime, step_time
from pyrl_ext.plan.language.errors import Key, show
from pyrl_ext.plan.model.chunks import SPLIT_WAYS
from pyrl_ext.plan.model.hardware import memory_limit
from pyrl_ext.plan.plan import PartialPlan, Plan
from pyrl_ext.plan.rules import RULES, check
from pyrl_ext.plan.rules._rule import divisors
from pyrl_ext.schedule.cp_sizes import cp_sizes

Values = dict[Key, object]  # (section, key) -> value

SPLIT = tuple(("parallel", key) for key in SPLIT_WAYS)
TOKENS = ("batching", "tokens_per_microbatch")
DISTRIBUTED = ("optimizer", "distributed")
DYNAMIC = ("parallel", "dynamic_cp")
LAYOUT = ("parallel", "pipeline_model_parallel_layout")
VPP = ("parallel", "vpp")
GPU = ("hardware", "gpu")
MEMORY = ("hardware", "memory")
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
    given = _Given(draft, frozenset(source.overrides), gpus, gpu)
    search = Search(given.limit)
    everywhere: Counter[tuple[str, str]] = Counter()
    for layout in given.layouts():
        search.layouts += 1
        if broken := _broken(given.plan(layout)):
            search.broken.update({rule for rule, *_ in broken})
            everywhere.update({(key, message) for _, key, message in broken})
        elif (suggestion := given.fastest(layout, search)) is not None:
            search.found.append(suggestion)
    refuse(source, (each for each, times in everywhere.items() if times == search.layouts))
    search.found = sorted(search.found, key=lambda each: each.time.total)[:most]
    for suggestion in search.found:
        compile_plan(path, [*overrides, *suggestion.overrides])  # check it as it will be pasted
    return search


def _broken(plan: Plan) -> list[tuple[str, str, str]]:
    """(rule, key, message) of the rules that a plan breaks, but for its memory's."""
    return [
        (rule.__name__, *problem)
        for key, rule in RULES
        if key != "hardware.gpu"
        for problem in check(plan, [(key, rule)])
    ]


class _Given:
    """The given plan, and what may be changed in it."""

    def __init__(self, draft: PartialPlan, pinned: frozenset[Key], gpus: int, gpu: str) -> None:
        self.draft = draft
        self.pinned = pinned
        encoding = draft.world_size - draft.parallel.world_size
        self.gpus = gpus - encoding
        self.machine: Values = {GPU: gpu}
        if draft.hardware.gpu != gpu and MEMORY not in pinned:
            self.machine[MEMORY] = None  # the given value is of another GPU
        limit = memory_limit(self.plan({}))
        assert limit is not None, "candidates name a GPU"
        self.limit = limit

    def choices[T](self, key: Key, values: Sequence[T]) -> Sequence[T]:
        """`values`, or the given value if an override sets it."""
        return [self.value(key)] if key in self.pinned else values

    def value(self, key: Key) -> Any:
        """The value in the given plan."""
        section, name = key
        return getattr(getattr(self.draft, section), name)

    def plan(self, values: Values) -> Plan:
        """The given plan with other values; not checked."""
        return self.draft.changed(self.machine | values)

    def layouts(self) -> Iterator[Values]:
        """Every layout of the ranks, with the layers split into its stages."""
        if self.gpus < 1:
            return
        sizes = [
            self.choices(("parallel", axis), divisors(self.gpus)) for axis in ("tp", "pp", "cp")
        ]
        for tp, pp, cp in product(*sizes):
            dp, odd = divmod(self.gpus, tp * pp * cp)
            if odd or pp > self.draft.sizes.num_hidden_layers:
                continue
            if dp not in self.choices(("parallel", "dp"), [dp]):
                continue
            for etp in self.choices(("parallel", "etp"), [None, 1] if tp > 1 else [None]):
                experts = divisors(max(1, dp * tp * cp // (etp or tp)))
                for ep in self.choices(("parallel", "ep"), experts):
                    ranks = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
                    values: Values = {("parallel", axis): size for axis, size in ranks.items()}
                    yield self._completed(values, dp, pp, cp)

    def _completed(self, values: Values, dp: int, pp: int, cp: int) -> Values:
        """A layout with its split of layers, optimizer, dynamic groups and microbatches."""
        parallel = self.draft.parallel
        layers = self.draft.sizes.num_hidden_layers
        if pp != parallel.pp and not self.pinned.intersection(SPLIT):
            values |= dict.fromkeys(SPLIT[:3]) | dict.fromkeys(SPLIT[3:], False)
            values[VPP] = self.choices(VPP, [None])[0]
            chunks = pp * (parallel.vpp_size if VPP in self.pinned else 1)
            if layers % chunks:
                values[LAYOUT] = even_layout(layers, self.draft.num_mtp_layers, chunks)
        # sharding the optimizer state sends as many bytes
        sharded = dp * cp > 1 or self.value(DISTRIBUTED)
        values[DISTRIBUTED] = self.choices(DISTRIBUTED, [sharded])[0]
        if parallel.dynamic_cp:
            *_, largest = (None, *cp_sizes(dp * cp, cp, parallel.dynamic_cp)[1:])
            values[DYNAMIC] = self.choices(DYNAMIC, [largest])[0]
        plan = self.plan(values)
        rows = -(-plan.max_rows // (plan.parallel.dynamic_cp or cp))
        tokens = self.value(TOKENS)
        fitting = tokens if tokens >= rows else -(-rows // 256) * 256
        values[TOKENS] = self.choices(TOKENS, [fitting])[0]
        return values

    def fastest(self, layout: Values, search: Search) -> Suggestion | None:
        """A layout with the first memory saving that makes it fit; None: no saving does."""
        rollout = self.draft.rollout
        shares = rollout.engine == "vllm" and not self.draft.remote_engines and not rollout.gpus
        offloads = [rollout.offload_trainer, "all"] if shares else [rollout.offload_trainer]
        recomputes = ["none", "selective", "full"]
        for offload, recompute in product(
            self.choices(("rollout", "offload_trainer"), offloads),
            self.choices(("model", "recompute"), recomputes),
        ):
            values = layout | {
                ("rollout", "offload_trainer"): offload,
                ("model", "recompute"): recompute,
            }
            plan = self.plan(values)
            peak = max(stage.peak for stage in stage_memory(plan))
            if peak <= (1 - LEFT_FREE) * search.limit and not _broken(plan):
                time = step_time(plan)
                assert time is not None, "candidates name a GPU"
                return Suggestion(self._texts(values), plan, peak, time)
            search.smallest = min(peak, search.smallest or peak)
        search.too_large += 1
        return None

    def _texts(self, values: Values) -> tuple[str, ...]:
        """The values that differ from the given plan, as overrides."""
        return tuple(
            f"{'.'.join(key)}={value if isinstance(value, str) else show(value)}"
            for key, value in (self.machine | values).items()
            if value != self.value(key)
        )


def even_layout(layers: int, mtp: int, stages: int) -> str:
    """Megatron's layout string for stages that differ by one layer at most. The stages at the ends,
    which have the embedding and the loss, are the last to get the extra layer."""
    fewest, more = divmod(layers, stages)
    inner_first = sorted(range(stages), key=lambda i: (-min(i, stages - 1 - i), i))
    longer = set(inner_first[:more])
    counts = [fewest + (i in longer) for i in range(stages)]
    return f"E{'|'.join(f't*{count}' if count else '' for count in counts)}{'m' * mtp}L"
