"""Shows how samples of given lengths are scheduled: a table, and a picture of ranks over time."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Printed
from rich.text import Text as Words

from pyrl_ext.plan.forecast.lengths_file import read_lengths
from pyrl_ext.plan.forecast.strategies import Comparison, Strategy
from pyrl_ext.plan.forecast.units import amount, duration, size
from pyrl_ext.plan.language.errors import ConfigError, Problem
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html.charts import WIDTH, Box, Chart, Shape, Text, axis
from pyrl_ext.plan.show.html.sections import Block, Table

HEAD = (
    "makespan",
    "to the best",
    "imbalance",
    "microbatches",
    "padding",
    "mean cp",
    "tokens a rank",
)
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "white", "bright_cyan")
SERIES = (1, 6, 3, 4, 10, 11, 13, 15)
"""Colours of page.css for group sizes, from one rank on."""


def compare(plan: Plan, path: str) -> Comparison:
    """The strategies for the lengths in a file.

    Raises:
        ConfigError: the file holds something else, or a sample that no group takes; with its line
    """
    lengths = read_lengths(path, plan.batching.samples_per_prompt)
    parallel = plan.parallel
    most = (parallel.dynamic_cp or parallel.dp * parallel.cp) * plan.batching.tokens_per_microbatch
    long = [
        Problem(each.where, each.line, f"{each.rows} tokens, expected at most {most}: the "
                "largest group times batching.tokens_per_microbatch")
        for each in lengths if each.rows > most
    ]  # fmt: skip
    if long:
        raise ConfigError(long)
    engines = [rank for rank, held in enumerate(plan.engine_of_rank) if held is not None]
    firsts = engines if plan.has_rollouts else list(range(plan.world_size))
    number: dict[object, int] = {}
    owners = [firsts[number.setdefault(each.prompt, len(number)) % len(firsts)] for each in lengths]
    try:
        comparison = Comparison(plan, [each.rows for each in lengths], owners)
        assert comparison.strategies
    except ValueError as error:  # padding may exceed the limit where the rows alone do not
        raise ConfigError([Problem(path, 0, str(error))]) from None
    return comparison


def _took(comparison: Comparison, cost: float) -> str:
    return duration(cost) if comparison.costs.unit == "s" else amount(cost, "FLOP")


def _rows(comparison: Comparison) -> list[tuple[Strategy, list[str]]]:
    best = comparison.best.makespan
    found = []
    for each in comparison.strategies:
        fewest, most = each.tokens
        moved = size(round(each.moved / comparison.plan.world_size))
        found.append((each, [
            _took(comparison, each.makespan), f"{each.makespan / best:.3f}x",
            f"{each.imbalance:.3f}", str(len(each.microbatches)), f"{each.padding:.2%}",
            f"{each.cp_size:.2f}", f"{fewest:,} to {most:,}", moved,
            size(round(each.away / comparison.plan.world_size)),
        ]))  # fmt: skip
    return found


MOVED = ("moved to a rank", "from hosts")


def sentences(comparison: Comparison, path: str) -> tuple[str, ...]:
    """The samples, and what the numbers assume."""
    rows = comparison.rows
    plan = comparison.plan
    return (
        f"{len(rows):,} samples of {min(rows):,} to {max(rows):,} rows in {path}, as one minibatch "
        f"on {plan.parallel.dp * plan.parallel.cp} ranks of data and context parallelism, "
        f"{plan.batching.tokens_per_microbatch:,} rows each. Best: {comparison.best.name}.",
        f"Makespan: {comparison.costs.why}. Imbalance: over equally loaded ranks. Padding: of the "
        "computed rows. Mean cp: ranks that share a row's sample. Moved: what a rank gets from "
        "others, and of it from other hosts.",
    )


def print_strategies(comparison: Comparison, path: str, console: Console) -> None:
    """Print the table and, for each strategy, ranks from top to bottom over time."""
    first, about = sentences(comparison, path)
    console.print(first, highlight=False, soft_wrap=False)
    table = Printed(box=None, pad_edge=False)
    table.add_column("")
    names = [each.name for each in comparison.strategies]
    for name in names:
        table.add_column(name, justify="right")
    rows = _rows(comparison)
    for i, name in enumerate((*HEAD, *MOVED)):
        cells = [
            f"[bold green]{shown[i]}[/]" if each is comparison.best and i == 0 else shown[i]
            for each, shown in rows
        ]
        table.add_row(name, *cells)
    console.print(table)
    columns = max(20, min(console.width, 160) - 12)
    longest = max(each.makespan for each in comparison.strategies)
    for each in comparison.strategies:
        console.print(f"\n[cyan]{escape(each.name)}[/] [dim]{escape(each.about)}[/]")
        for label, line in picture(comparison, each, longest, columns):
            console.print(Words(label.rjust(10), "dim") + Words(" ") + line, no_wrap=True)
    sizes = [each.size for each in comparison.problem.sizes]
    legend = (Words(f"{_mark(n)} cp {n}  ", _colour(comparison, n)) for n in sizes)
    console.print(Words("\n") + Words("").join(legend) + Words("· waits", "dim"))
    console.print(f"[dim]{escape(about)}[/]")


def _mark(cp_size: int) -> str:
    """One character for a group size: 1 to 9, then a, b, c for 16, 32, 64."""
    return str(cp_size) if cp_size < 10 else chr(ord("a") + max(0, cp_size.bit_length() - 5))


def _colour(comparison: Comparison, cp_size: int) -> str:
    sizes = [each.size for each in comparison.problem.sizes]
    return COLOURS[sizes.index(cp_size) % len(COLOURS)]


MOST_LINES = 16


def picture(
    comparison: Comparison, strategy: Strategy, longest: float, columns: int
) -> list[tuple[str, Words]]:
    """(ranks, their time in characters) from the first rank on; several ranks share a line where
    there are many, and the first of them is drawn."""
    ranks = comparison.problem.num_ranks
    step = -(-ranks // MOST_LINES)
    found = []
    for rank in range(0, ranks, step):
        line = Words()
        begun = 0.0
        for groups, times in zip(strategy.microbatches, strategy.times, strict=True):
            index = next(i for i, g in enumerate(groups) if rank < g.first + g.cp_size)
            whole = max(times) + strategy.launch
            start, end = (round(t / longest * columns) for t in (begun, begun + whole))
            busy = min(end - start, round((times[index] + strategy.launch) / longest * columns))
            size_ = groups[index].cp_size
            busy = busy if groups[index].samples else 0
            line.append(_mark(size_) * busy, _colour(comparison, size_))
            line.append("·" * (end - start - busy), "dim")
            begun += whole
        last = min(ranks, rank + step) - 1
        found.append((f"rank {rank}" if last == rank else f"{rank} to {last}", line))
    return found


# The page ----------------------------------------------------------------------------------------


def strategies_block(comparison: Comparison, path: str) -> Block:
    """The table and a chart of each strategy for the page."""
    head = ("strategy", *HEAD, *MOVED, "how")
    rows = [(each.name, *shown, each.about) for each, shown in _rows(comparison)]
    table = Table(head, rows, "Schedules of the same samples", "strategies")
    longest = max(each.makespan for each in comparison.strategies)
    charts = tuple(_chart(comparison, each, longest) for each in comparison.strategies)
    return Block("Schedules", sentences(comparison, path), charts, (table,))


def _chart(comparison: Comparison, strategy: Strategy, longest: float) -> Chart:
    """Ranks from top to bottom over time, a box for each group of ranks in a microbatch."""
    ranks = comparison.problem.num_ranks
    left = 70
    first = 48
    step = max(2.0, min(20.0, 320 / ranks))
    unit = 1.0 if comparison.costs.unit == "s" else 10.0 ** (3 * ((len(f"{longest:.0f}") - 1) // 3))
    name = "s" if unit == 1.0 else f"{unit:.0e} FLOP".replace("1e+", "10^")
    scale = (WIDTH - left - 20) / longest
    height = first + step * ranks
    shapes: list[Shape] = [Text(0, 14, f"{strategy.name}: {_took(comparison, strategy.makespan)}")]
    shapes += axis(longest / unit, name, left, scale * unit, first, height)
    every = max(1, ranks // 8)
    shapes += [
        Text(0, first + rank * step + min(step, 14), f"rank {rank}", "quiet small")
        for rank in range(0, ranks, every)
    ]
    sizes = [each.size for each in comparison.problem.sizes]
    begun = 0.0
    used = set()
    for number, (groups, times) in enumerate(
        zip(strategy.microbatches, strategy.times, strict=True)
    ):
        for group, time in zip(groups, times, strict=True):
            if not group.samples:
                continue
            class_ = f"series-{SERIES[sizes.index(group.cp_size) % len(SERIES)]}"
            used.add((group.cp_size, class_))
            many = len(group.samples)
            title = (
                f"microbatch {number}, ranks {group.first} to {group.first + group.cp_size - 1}: "
                f"{many} sample{'s' * (many > 1)}, {_took(comparison, time)}"
            )
            x = left + begun * scale
            y = first + group.first * step
            shapes.append(
                Box(x, y, (time + strategy.launch) * scale, step * group.cp_size, title, class_)
            )
        begun += max(times) + strategy.launch
    legend = [(class_, f"cp {n}") for n, class_ in sorted(used)]
    return Chart(f"Ranks over time: {strategy.name}", height + 8, shapes, legend)
