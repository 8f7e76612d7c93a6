"""`--suggest 8xH200`: the fastest plans that hold and fit on so many GPUs, near a given one.

Every way to arrange the ranks is held against all rules. What passes is priced with nothing saved
in memory, which no other setting of the same layout beats; layouts are then tried from the fastest
on, each with as little saved as fits, until none of those left can be among the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pyrl_ext.plan.compile import compile_plan, draft_of, load
from pyrl_ext.plan.compiled import Plan
from pyrl_ext.plan.hardware import memory_limit
from pyrl_ext.plan.memory import stage_memory
from pyrl_ext.plan.problems import ConfigError, Key, show
from pyrl_ext.plan.rules import RULES, check
from pyrl_ext.plan.stages import SPLIT_WAYS
from pyrl_ext.plan.timing import StepTime, step_time

Values = dict[Key, Any]  # (section, key) -> value

# What candidates may change besides the GPU.
RANKS = tuple(("parallel", key) for key in ("dp", "tp", "pp", "vpp", "cp", "ep", "etp"))
SPLIT = tuple(("parallel", key) for key in SPLIT_WAYS)
LAYOUT = ("parallel", "pipeline_model_parallel_layout")
TOKENS = ("batching", "tokens_per_microbatch")
DISTRIBUTED = ("optimizer", "distributed")
RECOMPUTE, OFFLOAD = ("model", "recompute"), ("optimizer", "offload")
GPU, MEMORY = ("hardware", "gpu"), ("hardware", "memory")

# Whether it fits is a rule of this key, and depends on more than the layout.
FIT_KEY = "hardware.gpu"


class Suggestion(NamedTuple):
    """A plan that holds."""

    overrides: tuple[str, ...]
    """What to set beside the given overrides."""
    plan: Plan
    peak: int
    """Bytes that the fullest rank holds at most,"""
    limit: int
    """of these."""
    time: StepTime


@dataclass
class Search:
    """What was looked at, and what came out."""

    layouts: int
    """Ways to arrange the ranks."""
    broken: Counter[str] = field(default_factory=Counter)
    """Rule -> layouts that break it."""
    held: int = 0
    """Layouts that break none,"""
    too_large: int = 0
    """and of these, what was tried and does not fit."""
    found: tuple[Suggestion, ...] = ()
    """Fastest first; of a layout the fastest setting that fits."""
    smallest: Suggestion | None = None
    """What takes least memory of all that was tried."""


def suggest(
    path: str | Path,
    overrides: Sequence[str],
    gpus: int,
    gpu: str,
    most: int = 6,
    progress: Callable[[float], None] = lambda share: None,
) -> Search:
    """The fastest ``most`` plans for ``gpus`` devices of the kind ``gpu``, near that of a file.

    What is set on the command line stays as it is.

    Args:
        progress: called now and then with the share that is done.

    Raises:
        ConfigError: with problems that no layout mends
    """
    source = load(path, overrides)
    draft = draft_of(source)
    if source.problems:
        raise ConfigError(source.problems)
    given = _Given(draft, frozenset(source.overrides), gpus, gpu)
    search, held = Search(0), []
    everywhere: Counter[tuple[str, str]] = Counter()
    for layout in given.layouts():
        search.layouts += 1
        values = layout | {TOKENS: max(given.tokens(layout))}
        if found := _broken(given.plan(values)):
            search.broken.update({name for name, *_ in found})
            everywhere.update({(key, message) for _, key, message in found})
        else:
            held.append(layout)
    for (key, message), times in everywhere.items():
        if times == search.layouts:
            source.problems.append(source.problem(tuple(key.split(".")), message))
    if source.problems:
        raise ConfigError(source.problems)
    search.held = len(held)
    _try(given, held, most, search, progress)
    for each in search.found:
        compile_plan(path, [*overrides, *each.overrides])  # as it will be when it is pasted
    return search


def _broken(plan: Plan) -> list[tuple[str, str, str]]:
    """(rule, key, message) of the rules that do not hold."""
    return [
        (function.__name__, *found)
        for key, function in RULES
        if key != FIT_KEY
        for found in check(plan, [(key, function)])
    ]


def _try(
    given: _Given,
    layouts: Sequence[Values],
    most: int,
    search: Search,
    progress: Callable[[float], None],
) -> None:
    """Fill in what fits, from the layouts that hold."""
    options = []
    for number, layout in enumerate(layouts):
        progress(number / len(layouts))
        for tokens in given.tokens(layout):
            values = layout | {TOKENS: tokens}
            bare = given.plan(values | given.savings()[0])
            options.append((_time(bare).total, number, values))
    best: dict[int, Suggestion] = {}
    tried = set()
    for least, number, values in sorted(options, key=lambda option: option[0]):
        ranked = sorted(each.time.total for each in best.values())
        if len(ranked) >= most and least > ranked[most - 1]:
            break
        tried.add(number)
        for found in given.that_fit(values, search):
            if number not in best or found.time.total < best[number].time.total:
                best[number] = found
    search.found = tuple(sorted(best.values(), key=lambda each: each.time.total)[:most])
    search.too_large = len(tried - best.keys())


def _time(plan: Plan) -> StepTime:
    found = step_time(plan)
    assert found is not None, "candidates name a GPU"
    return found


class _Given:
    """The plan to stay near, and its candidates on other GPUs."""

    def __init__(self, draft: Plan, pinned: frozenset[Key], gpus: int, gpu: str) -> None:
        self.draft, self.pinned, self.gpus = draft, pinned, gpus
        self.machine: Values = {GPU: gpu}
        if draft.hardware.gpu != gpu:
            self.machine[MEMORY] = None  # it is another GPU's

    def value(self, key: Key) -> Any:
        """What the given plan says."""
        return getattr(getattr(self.draft, key[0]), key[1])

    def choices(self, key: Key, values: Sequence[Any]) -> list[Any]:
        """``values``, or the one that the command line sets."""
        return [self.value(key)] if key in self.pinned else list(dict.fromkeys(values))

    def plan(self, values: Values) -> Plan:
        """The given plan with other values, unchecked."""
        changed: dict[str, dict[str, Any]] = {}
        for (section, key), value in (self.machine | values).items():
            changed.setdefault(section, {})[key] = value
        fields = {name: held for name, held in vars(self.draft).items() if name != "stages"}
        for section, update in changed.items():
            fields[section] = fields[section].model_copy(update=update)
        plan = Plan.model_construct()
        vars(plan).update(fields | {"world_size": fields["parallel"].world_size})
        return plan

    def layouts(self) -> Iterator[Values]:
        """Every way to arrange the ranks, with layers cut into stages for it."""
        sizes, layers = _divisors(self.gpus), self.draft.shape.num_hidden_layers
        axes = [self.choices(("parallel", axis), sizes) for axis in ("tp", "pp", "cp")]
        for tp, pp, cp in product(*axes):
            dp, odd = divmod(self.gpus, tp * pp * cp)
            if odd or self.choices(("parallel", "dp"), [dp]) != [dp] or pp > layers:
                continue
            chunks = [None, *(n for n in (2, 4) if pp > 1 and n * pp <= layers)]
            for vpp, etp in product(
                self.choices(("parallel", "vpp"), chunks),
                self.choices(("parallel", "etp"), [None, 1] if tp > 1 else [None]),
            ):
                spans = _divisors(max(1, dp * tp * cp // (etp or tp)))
                for ep in self.choices(("parallel", "ep"), spans):
                    ranks = dict(zip(RANKS, (dp, tp, pp, vpp, cp, ep, etp), strict=True))
                    yield ranks | self._split(pp, vpp or 1) | self._spread(dp * cp)

    def _split(self, pp: int, vpp: int) -> Values:
        """As given for the same stages; else equal ones, or a layout that is nearly even."""
        same = (pp, vpp) == (self.draft.parallel.pp, self.draft.parallel.vpp_size)
        if same or any(key in self.pinned for key in SPLIT):
            return {}
        found: Values = dict(zip(SPLIT, (None, None, None, False, False), strict=True))
        layers = self.draft.shape.num_hidden_layers
        if layers % (pp * vpp):
            found[LAYOUT] = even_layout(layers, self.draft.num_mtp_layers, pp * vpp)
        return found

    def _spread(self, copies: int) -> Values:
        """The optimizer's state is spread where there are copies: as many bytes are sent."""
        return {DISTRIBUTED: self.choices(DISTRIBUTED, [copies > 1])[0]}

    def tokens(self, layout: Values) -> list[int]:
        """Sizes of microbatches: as given, half and twice that, and what the longest sample needs,
        in blocks of 256."""
        plan = self.plan(layout)
        least = -(-plan.max_rows // (plan.parallel.dynamic_cp or plan.parallel.cp))
        given = plan.batching.tokens_per_microbatch
        sizes = [n for n in (given, given // 2, 2 * given) if n >= least]
        return self.choices(TOKENS, sizes or [-(-least // 256) * 256])

    def savings(self) -> list[Values]:
        """What to do about memory, from nothing to all."""
        again = self.choices(RECOMPUTE, ["none", "selective", "full"])
        away = self.choices(OFFLOAD, [0.0, 1.0])
        return [{OFFLOAD: share, RECOMPUTE: how} for share in away for how in again]

    def that_fit(self, values: Values, search: Search) -> Iterator[Suggestion]:
        """The first saving that fits, of each share of the optimizer in host memory."""
        fits: set[float] = set()
        for saving in self.savings():
            plan = self.plan(values | saving)
            limit = memory_limit(plan)
            assert limit is not None, "candidates name a GPU"
            if saving[OFFLOAD] in fits or _broken(plan):
                continue
            peak = max(stage.peak for stage in stage_memory(plan))
            fitting = peak <= limit
            if not fitting and search.smallest and search.smallest.peak <= peak:
                continue
            texts = self._texts(self.machine | values | saving)
            found = Suggestion(texts, plan, peak, limit, _time(plan))
            if not search.smallest or peak < search.smallest.peak:
                search.smallest = found
            if fitting:
                fits.add(saving[OFFLOAD])
                yield found

    def _texts(self, values: Values) -> tuple[str, ...]:
        """The values that are not as given, as overrides."""
        return tuple(
            f"{'.'.join(key)}={value if isinstance(value, str) else show(value)}"
            for key, value in values.items()
            if value != self.value(key)
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def even_layout(layers: int, mtp: int, stages: int) -> str:
    """megatron's layout of stages that differ by one layer at most; those at the ends, which have
    the embedding and the loss, get one more last."""
    fewest, more = divmod(layers, stages)
    inner_first = sorted(range(stages), key=lambda i: (-min(i, stages - 1 - i), i))
    longer = set(inner_first[:more])
    parts = [f"t*{fewest + (i in longer)}" if fewest + (i in longer) else "" for i in range(stages)]
    return f"E{'|'.join(parts)}{'m' * mtp}L"
