"""Prints the result of `--suggest`: a table of plans, and the overrides of each on one line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pyrl_ext.plan.forecast.suggest import LEFT_FREE, suggest
from pyrl_ext.plan.language.errors import ConfigError, Problem
from pyrl_ext.plan.model.hardware import parse_gpus
from pyrl_ext.plan.model.units import GIB, size


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
    with Console(stderr=True).status("trying layouts"):
        search = suggest(path, overrides, gpus, gpu)
    reasons = [f"{times} break {name}" for name, times in search.broken.most_common(5)]
    if search.too_large:
        reasons.append(f"{search.too_large} do not fit")
    summary = ", ".join(reasons) or "all hold"
    console.print(f"{search.layouts} layouts of {gpus} {gpu}: {summary}")
    if not search.found:
        if search.smallest:
            room = size(int((1 - LEFT_FREE) * search.limit))
            console.print(
                f"the smallest needs {size(search.smallest)} on a GPU, expected at most {room}; "
                f"{LEFT_FREE:.0%} stay free for what is estimated. Take more GPUs, or lora"
            )
        return 2
    table = Table(box=None, pad_edge=False)
    for name in ("", "tokens", "recompute", "peak GiB", "left GiB", "s a step", "MFU"):
        table.add_column(name, justify="right")
    for number, each in enumerate(search.found, start=1):
        table.add_row(
            str(number),
            str(each.plan.batching.tokens_per_microbatch),
            " ".join([each.plan.model.recompute, *sorted(each.plan.recomputed_modules)]),
            f"{each.peak / GIB:.1f}",
            f"{(search.limit - each.peak) / GIB:.1f}",
            f"{each.time.total:.3g}",
            f"{each.time.mfu:.0%}",
        )
    console.print(table)
    for number, each in enumerate(search.found, start=1):
        pasted = " ".join(map(shlex.quote, each.overrides)) or "as it is"
        console.print(f"{number}: {pasted}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"fastest first. Time: {search.found[0].time.error}. MFU is of the update")
    return 0
