"""Prints the result of `--suggest`: a table of plans, and the overrides of each on one line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from time import monotonic

from rich.console import Console
from rich.table import Table

from pyrl_ext.plan.compile import draft_of, load, refuse
from pyrl_ext.plan.forecast.hardware import parse_gpus
from pyrl_ext.plan.forecast.splits import Splits, suggest_splits
from pyrl_ext.plan.forecast.suggest import LEFT_FREE, Search, suggest
from pyrl_ext.plan.forecast.units import GIB, duration, size
from pyrl_ext.plan.language.errors import ConfigError, Problem


def print_suggestions(path: str, overrides: Sequence[str], wanted: str) -> int:
    """Print the plans for `wanted` (8xH200). Exit code 0: some were found; 2: none.

    Raises:
        ConfigError: with problems that every layout has
    """
    try:
        gpus, gpu = parse_gpus(wanted)
    except ValueError as error:
        raise ConfigError([Problem("command line: --suggest", 0, str(error))]) from None
    console = Console()
    errors = Console(stderr=True)
    with _Line(errors) as line:
        if _remote_engines(path, overrides):
            splits = suggest_splits(path, overrides, gpus, gpu, line)
            return _print_splits(splits, f"{gpus} {gpu}", console)
        search = suggest(path, overrides, gpus, gpu, progress=line)
    return _print_layouts(search, f"{gpus} {gpu}", console)


def _remote_engines(path: str, overrides: Sequence[str]) -> bool:
    """True if the config has remote engines. Raises `ConfigError` where it has other problems."""
    source = load(path, overrides)
    draft = draft_of(source)
    refuse(source)
    return draft.remote_engines


def _print_splits(splits: Splits, machines: str, console: Console) -> int:
    tried = f"searched layouts for {len(splits.tried)} of them"
    console.print(f"{splits.number} splits of {machines}, {tried}")
    if not splits.found:
        return _print_layouts(splits.tried[0], machines, console)
    table = Table(box=None, pad_edge=False)
    head = (
        "",
        "train",
        "generate",
        "ahead",
        "a step",
        "waits",
        "engines idle",
        "queue",
        "peak GiB",
    )
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    for number, each in enumerate(splits.found, start=1):
        state = each.state
        peak = f"{each.trainer.peak / GIB:.1f}"
        table.add_row(
            str(number),
            str(each.trainer.plan.world_size),
            str(each.engines),
            str(state.ahead),
            duration(state.seconds),
            f"{state.trainer_idle:.0%}",
            f"{state.engines_idle:.0%}",
            f"{state.queued:,.0f}",
            peak,
        )
    console.print(table)
    _print_overrides([each.overrides for each in splits.found], console)
    console.print(f"fastest first. Time: {splits.found[0].trainer.time.error}")
    return 0


def _print_layouts(search: Search, machines: str, console: Console) -> int:
    reasons = [f"{times} break {name}" for name, times in search.broken.most_common(5)]
    reasons += [f"{search.too_large} do not fit"] * bool(search.too_large)
    console.print(f"{search.layouts} layouts of {machines}: {', '.join(reasons) or 'all hold'}")
    if not search.found:
        if search.smallest:
            peak, texts = search.smallest
            console.print(
                f"the smallest needs {size(peak)} on a GPU, expected at most {size(search.room)}; "
                f"{LEFT_FREE:.0%} stay free for what is estimated. Take more GPUs, or lora. It has",
                " ".join(texts),
            )
        return 2
    table = Table(box=None, pad_edge=False)
    encoders = [f"ranks of {name}" for name in search.found[0].plan.modules]
    for name in ("", *encoders, "tokens", "recompute", "peak GiB", "left GiB", "s a step", "MFU"):
        table.add_column(name, justify="right")
    for number, each in enumerate(search.found, start=1):
        left = f"{(each.limit - each.peak) / GIB:.1f}"
        tokens = each.plan.batching.tokens_per_microbatch
        again = each.plan.model.recompute
        places = each.plan.modules.items()
        ranks = [f"{len(each.plan.grids[name].ranks)} {module.ranks}" for name, module in places]
        cells = (
            *ranks,
            str(tokens),
            again,
            f"{each.peak / GIB:.1f}",
            left,
            f"{each.time.total:.3g}",
        )
        table.add_row(str(number), *cells, f"{each.time.mfu:.0%}")
    console.print(table)
    _print_overrides([each.overrides for each in search.found], console)
    console.print(f"fastest first. Time: {search.found[0].time.error}. MFU is of the update")
    return 0


def _print_overrides(found: Sequence[Sequence[str]], console: Console) -> None:
    for number, each in enumerate(found, start=1):
        pasted = " ".join(map(shlex.quote, each)) or "as it is"
        console.print(f"{number}: {pasted}", soft_wrap=True, markup=False, highlight=False)


class _Line:
    """A progress line that appears after one second."""

    def __init__(self, console: Console) -> None:
        self.status = console.status("")
        self.began = monotonic()
        self.shown = False

    def __enter__(self) -> _Line:
        return self

    def __call__(self, share: float) -> None:
        if monotonic() - self.began < 1:
            return
        self.status.update(f"trying layouts, {share:.0%}")
        if not self.shown:
            self.shown = True
            self.status.start()

    def __exit__(self, *_: object) -> None:
        self.status.stop()
