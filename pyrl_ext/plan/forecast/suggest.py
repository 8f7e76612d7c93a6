"""`--suggest 8xH200`: the fastest plans that hold and fit on these GPUs, near a given one.

Every layout of the ranks is checked against all rules. Valid layouts are sorted by an optimistic
estimate without memory saving, then priced exactly in that order, each with the least saving that
fits, until no remaining estimate can enter the list of the fastest.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pyrl_ext.plan.compile import compile_plan, draft_of, load, refuse
from pyrl_ext.plan.forecast.encoder import encoders
from pyrl_ext.plan.forecast.hardware import memory_limit
from pyrl_ext.plan.forecast.memory import memory_of, num_stages
from pyrl_ext.plan.forecast.parameters import rank_parameters
from pyrl_ext.plan.forecast.step_time import StepTime, quick_seconds, step_time
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.language.errors import Key, show
from pyrl_ext.plan.model.chunks import SPLIT_WAYS
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.plan import PartialPlan, Plan
from pyrl_ext.plan.rules import RULES, check
from pyrl_ext.plan.rules._rule import divisors
from pyrl_ext.schedule.cp_sizes import cp_sizes

Values = dict[Key, object]  # (section, key) -> value

# The keys that candidates may change besides the GPU.
RANKS = tuple(("parallel", key) for key in ("dp", "tp", "pp", "vpp", "cp", "ep", "etp"))
SPLIT = tuple(("parallel", key) for key in SPLIT_WAYS)
LAYOUT = ("parallel", "pipeline_model_parallel_layout")
TOKENS = ("batching", "tokens_per_microbatch")
DISTRIBUTED = ("optimizer", "distributed")
DYNAMIC = ("parallel", "dynamic_cp")
RECOMPUTE = ("model", "recompute")
OFFLOAD = ("rollout", "offload_trainer")
GPU = ("hardware", "gpu")
MEMORY = ("hardware", "memory")

# The rule of this key (whether it fits) depends on more than the layout, so it is checked apart.
FIT_KEY = "hardware.gpu"
# Share of a GPU's memory that stays free, since most of a step's memory is estimated.
LEFT_FREE = 0.05
# A layout may take this share of its quick estimate.
SLACK = 0.95


class Suggestion(NamedTuple):
    """A plan that holds and fits."""

    overrides: tuple[str, ...]
    """Overrides to add to the given ones."""
    plan: Plan
    peak: int
    """Most bytes that the fullest rank holds."""
    limit: int
    """Device memory of a rank [bytes]."""
    time: StepTime


class _Option(NamedTuple):
    """A candidate: a layout with more values set."""

    layout: int
    """Number of the layout."""
    values: Values
    """The layout's values and more."""
    peak: int | None = None
    """Bytes of the fullest rank; None: not computed yet."""


@dataclass
class Search:
    """The result of a search."""

    layouts: int
    """Layouts of the ranks."""
    room: int = 0
    """Most bytes that a rank may hold: a GPU's, less `LEFT_FREE`."""
    broken: Counter[str] = field(default_factory=Counter)
    """Rule -> layouts that break it."""
    held: int = 0
    """Layouts that break no rule."""
    too_large: int = 0
    """The number of these layouts that do not fit."""
    found: tuple[Suggestion, ...] = ()
    """Fastest first; for each layout the fastest setting that fits."""
    smallest: tuple[int, tuple[str, ...]] | None = None
    """If some do not fit: the least memory of a rank [bytes], and its overrides."""


def suggest(
    path: str | Path,
    overrides: Sequence[str],
    gpus: int,
    gpu: str,
    most: int = 6,
    progress: Callable[[float], None] = lambda share: None,
) -> Search:
    """The fastest `most` plans for `gpus` devices of the kind `gpu`, starting from a config file;
    then the fastest with encoders on other ranks than all of these have them.

    Keys that the overrides set are not changed.

    Args:
        progress: called repeatedly with the share that is done.

    Raises:
        ConfigError: with problems that every layout has
    """
    source = load(path, overrides)
    draft = draft_of(source)
    refuse(source)
    given = _Given(draft, frozenset(source.overrides), gpus, gpu)
    search = Search(0, given.room)
    held = []
    everywhere: Counter[tuple[str, str]] = Counter()
    for layout in given.layouts():
        progress(0.0)
        search.layouts += 1
        values = layout | {TOKENS: max(given.tokens(layout))}
        if found := _broken(given.plan(values)):
            search.broken.update({name for name, *_ in found})
            everywhere.update({(key, message) for _, key, message in found})
        else:
            held.append(layout)
    refuse(source, (each for each, times in everywhere.items() if times == search.layouts))
    search.held = len(held)
    _try(given, held, most, search, progress)
    for each in search.found:
        compile_plan(path, [*overrides, *each.overrides])  # check it as it will be pasted
    return search


def _broken(plan: Plan) -> list[tuple[str, str, str]]:
    """(rule, key, message) of the rules that a plan breaks."""
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
    """Fill `search` with the fastest of the valid layouts that fit."""
    waiting: list[tuple[float, int, _Option]] = []  # quick estimate, tie-breaker
    for number, layout in enumerate(layouts):
        progress(number / len(layouts) / 2)
        if given.weight_bytes(layout) > given.limit:
            search.too_large += 1
            continue
        for tokens in given.tokens(layout):
            option = _Option(number, layout | {TOKENS: tokens})
            bare = given.plan(option.values | given.savings()[0])
            waiting.append((SLACK * quick_seconds(bare), len(waiting), option))
    heapq.heapify(waiting)
    best: dict[int, Suggestion] = {}
    full: set[int] = set()
    later: list[_Option] = []
    # the slowest that is wanted, and the fastest of every way to place encoders
    total = len(waiting)
    worst = math.inf
    first = {_way(layout): math.inf for layout in layouts}
    while waiting and waiting[0][0] <= max(worst, *first.values(), 0.0):
        least, key, option = heapq.heappop(waiting)
        progress(1 - len(waiting) / total / 2)
        if least > max(worst, first[_way(option.values)]):
            later.append(option)
            continue
        if option.peak is None:  # find the saving that makes it fit; that may cost time
            if fitting := given.that_fits(option, search):
                least = SLACK * quick_seconds(given.plan(fitting.values))
                heapq.heappush(waiting, (least, key, fitting))
            else:
                full.add(option.layout)
            continue
        found = given.suggestion(option)
        before = best.get(option.layout)
        if before is None or found.time.trainer < before.time.trainer:
            best[option.layout] = found
        first[_way(option.values)] = min(found.time.trainer, first[_way(option.values)])
        times = sorted(each.time.trainer for each in best.values())
        worst = times[most - 1] if len(times) >= most else math.inf
    rising = sorted(best.items(), key=lambda each: each[1].time.total)
    ways = {_way(layouts[number]): each for number, each in reversed(rising)}
    fastest = [each for _, each in rising[:most]]
    search.found = (*fastest, *(each for each in ways.values() if each not in fastest))
    later += [option for *_, option in waiting]
    search.too_large += len(full - best.keys() - {option.layout for option in later})


def _way(values: Values) -> tuple[object, ...]:
    """On which ranks each encoder runs."""
    return tuple(
        value for key, value in values.items() if key[0] == "modules" and key[2] == "ranks"
    )


class _Given:
    """The given plan, and its candidates on the wanted GPUs."""

    def __init__(self, draft: PartialPlan, pinned: frozenset[Key], gpus: int, gpu: str) -> None:
        self.draft = draft
        self.pinned = pinned
        self.gpus = gpus
        self.machine: Values = {GPU: gpu}
        if draft.hardware.gpu != gpu:
            self.machine[MEMORY] = None  # the given value is of another GPU
        limit = memory_limit(self.plan({}))
        assert limit is not None, "candidates name a GPU"
        self.limit = limit
        self.room = int((1 - LEFT_FREE) * limit)

    def value(self, key: Key) -> Any:
        """The value in the given plan."""
        held: Any = self.draft
        for name in key:
            held = held[name] if isinstance(held, dict) else getattr(held, name)
        return held

    def choices[T](self, key: Key, values: Sequence[T]) -> list[T]:
        """`values`, or the given value if an override sets it."""
        return [self.value(key)] if key in self.pinned else list(dict.fromkeys(values))

    def plan(self, values: Values) -> Plan:
        """The given plan with other values; not checked."""
        return self.draft.changed(self.machine | values)

    def layouts(self) -> Iterator[Values]:
        """Every layout of the ranks, with the layers split into its stages."""
        layers = self.draft.sizes.num_hidden_layers
        for encoding, gpus in self._encoders():
            axes = [self.choices(("parallel", axis), divisors(gpus)) for axis in ("tp", "pp", "cp")]
            for tp, pp, cp in product(*axes):
                dp, odd = divmod(gpus, tp * pp * cp)
                if odd or self.choices(("parallel", "dp"), [dp]) != [dp] or pp > layers:
                    continue
                for ranks in self._ranks(dp, tp, pp, cp):
                    vpp = ranks["parallel", "vpp"]
                    split = self._split(pp, vpp if isinstance(vpp, int) else 1)
                    yield encoding | ranks | split | self._spread(dp, cp)

    def _ranks(self, dp: int, tp: int, pp: int, cp: int) -> Iterator[Values]:
        """Every layout of a grid with these sizes."""
        chunks = [None, 2] if 1 < pp <= self.draft.sizes.num_hidden_layers // 2 else [None]
        for vpp, etp in product(
            self.choices(("parallel", "vpp"), chunks),
            self.choices(("parallel", "etp"), [None, 1] if tp > 1 else [None]),
        ):
            for ep in self.choices(
                ("parallel", "ep"), divisors(max(1, dp * tp * cp // (etp or tp)))
            ):
                yield dict(zip(RANKS, (dp, tp, pp, vpp, cp, ep, etp), strict=True))

    def _encoders(self) -> Iterator[tuple[Values, int]]:
        """(where each encoder runs, the GPUs left for the language model)."""
        for each in product(*(self._places(one.name) for one in encoders(self.draft))):
            values: Values = {key: value for place in each for key, value in place.items()}
            plan = self.plan(values)
            left = self.gpus - (plan.world_size - plan.parallel.world_size)
            if left > 0:
                yield values, left

    def _places(self, name: str) -> Iterator[Values]:
        """On the language model's ranks, or on its own: as many replicas as given, half and twice
        that; a node's, half and a quarter of it where it shared ranks before."""
        sizes: list[Key] = [("modules", name, "parallel", axis) for axis in ("dp", "tp", "pp")]
        ranks = ("modules", name, "ranks")
        node = self.draft.hardware.gpus_per_node
        given = self.value(ranks)
        dp = self.value(sizes[0])
        ways = self.choices(ranks, ["own", "shared"])
        if "shared" in ways and (given == "shared" or not self.pinned.intersection(sizes)):
            yield {ranks: "shared", **dict.fromkeys(sizes, 1)}
        if "own" in ways:
            wanted = (dp // 2, dp, 2 * dp) if given == "own" else (node // 4, node // 2, node)
            for replicas in self.choices(sizes[0], [n for n in wanted if n]):
                yield {ranks: "own", sizes[0]: replicas}

    def _split(self, pp: int, vpp: int) -> Values:
        """The split as given for the same stages; otherwise equal stages, or nearly equal ones."""
        same = (pp, vpp) == (self.draft.parallel.pp, self.draft.parallel.vpp_size)
        if same or any(key in self.pinned for key in SPLIT):
            return {}
        found: Values = dict(zip(SPLIT, (None, None, None, False, False), strict=True))
        layers = self.draft.sizes.num_hidden_layers
        if layers % (pp * vpp):
            found[LAYOUT] = even_layout(layers, self.draft.num_mtp_layers, pp * vpp)
        return found

    def _spread(self, dp: int, cp: int) -> Values:
        """Shard the optimizer state wherever there are copies: it sends as many bytes. Dynamic
        context parallelism, if given, keeps its size or is bounded by the ranks."""
        found: Values = {
            DISTRIBUTED: self.choices(DISTRIBUTED, [dp * cp > 1 or self.value(DISTRIBUTED)])[0]
        }
        if self.draft.parallel.dynamic_cp:
            _, *larger = cp_sizes(dp * cp, cp, self.draft.parallel.dynamic_cp)
            found[DYNAMIC] = self.choices(DYNAMIC, larger[-1:] or [None])[0]
        return found

    def tokens(self, layout: Values) -> list[int]:
        """Sizes of microbatches: as given, half and twice that; or, if the longest sample needs
        more, its rows rounded up to 256."""
        plan = self.plan(layout)
        least = -(-plan.max_rows // (plan.parallel.dynamic_cp or plan.parallel.cp))
        given = plan.batching.tokens_per_microbatch
        sizes = [n for n in (given, given // 2, 2 * given) if n >= least]
        return self.choices(TOKENS, sizes or [-(-least // 256) * 256])

    def savings(self) -> list[Values]:
        """Memory savings from none to all; offloading to the host is slowest and comes last. None
        that the trainer refuses, which is why optimizer.offload stays as given."""
        again = self.choices(RECOMPUTE, ["none", "selective", "full"])
        rollout = self.draft.rollout
        beside = rollout.engine == "vllm" and not self.draft.remote_engines and not rollout.gpus
        away = self.choices(OFFLOAD, [rollout.offload_trainer, *["all"] * beside])
        return [{OFFLOAD: what, RECOMPUTE: how} for what in away for how in again]

    def that_fits(self, option: _Option, search: Search) -> _Option | None:
        """The option with the first saving that makes it fit; None: no saving does."""
        *others, most = self.savings()
        least = self.peak(option.values | most)
        if search.smallest is None or least < search.smallest[0]:
            search.smallest = least, self._texts(self.machine | option.values | most)
        if least > self.room:
            return None
        for saving in [*others, most]:
            values = option.values | saving
            peak = least if saving is most else self.peak(values)
            if peak <= self.room and not _broken(self.plan(values)):
                return _Option(option.layout, values, peak)
        return None

    def peak(self, values: Values) -> int:
        """Most bytes of the fullest rank; it stops at the first stage that does not fit."""
        plan = self.plan(values)
        most = 0
        for stage in range(num_stages(plan)):
            most = max(most, memory_of(plan, stage).peak)
            if most > self.room:
                break
        return most

    def suggestion(self, option: _Option) -> Suggestion:
        """An option that fits, priced exactly."""
        plan = self.plan(option.values)
        time = step_time(plan)
        assert time is not None and option.peak is not None
        texts = self._texts(self.machine | option.values)
        return Suggestion(texts, plan, option.peak, self.limit, time)

    def weight_bytes(self, values: Values) -> float:
        """Bytes of weights and their gradients on a rank of equal stages: no saving reduces them.
        Adapters, and what they have gradients for, are left out."""
        plan = self.plan(values)
        counts = rank_parameters(plan, parameters(plan.sizes)).total / plan.parallel.pp
        return counts * (DTYPE_BYTES[plan.model.dtype] + 4 * (plan.lora is None))

    def _texts(self, values: Values) -> tuple[str, ...]:
        """The values that differ from the given plan, as overrides."""
        return tuple(
            f"{'.'.join(key)}={value if isinstance(value, str) else show(value)}"
            for key, value in values.items()
            if value != self.value(key)
        )


def even_layout(layers: int, mtp: int, stages: int) -> str:
    """Megatron's layout string for stages that differ by one layer at most. The stages at the ends,
    which have the embedding and the loss, are the last to get the extra layer."""
    fewest, more = divmod(layers, stages)
    inner_first = sorted(range(stages), key=lambda i: (-min(i, stages - 1 - i), i))
    longer = set(inner_first[:more])
    parts = [f"t*{fewest + (i in longer)}" if fewest + (i in longer) else "" for i in range(stages)]
    return f"E{'|'.join(parts)}{'m' * mtp}L"
