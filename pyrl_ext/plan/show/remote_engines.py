"""Remote engines in the plan: facts about them, and the table of who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table as Printed

from pyrl_ext.plan.forecast.engine_memory import engine_memory
from pyrl_ext.plan.forecast.loop import Steady
from pyrl_ext.plan.forecast.units import duration, size
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html.charts import Bar, Chart, Part, stacked_bars
from pyrl_ext.plan.show.html.sections import Block, Table
from pyrl_ext.plan.show.summary import Summary

HEAD = ("ahead", "a step", "train", "publish", "wait", "idle", "run", "queue", "ready", "age",
        "oldest")  # fmt: skip
ABOUT = (
    "Simulated from the estimates above (*: this plan): a step, and its parts on the trainer, "
    "which waits for samples; idle: the share of time in which an engine has nothing to do or is "
    "paused; sequences that run, requests that queue for an engine, and finished samples that are "
    "ready for the trainer, on average; age: versions between generating and training on a token, "
    "on average and at most. Engines have GPUs of the trainer's kind; environments and rewards "
    "take no time"
)


def rows(plan: Plan, states: tuple[Steady, ...]) -> Iterator[tuple[str, ...]]:
    """A row for each value of rollout.ahead."""
    for each in states:
        parts = (each.train, each.publish, each.wait)
        yield (
            f"{each.ahead}{' *' * (each.ahead == plan.rollout.ahead)}",
            duration(each.seconds),
            *(f"{part / each.seconds:.0%}" for part in parts),
            f"{each.engines_idle:.0%}",
            *(f"{number:,.0f}" for number in (each.running, each.queued, each.ready)),
            f"{each.age:.2f}",
            str(each.oldest),
        )


def printed(summary: Summary) -> Printed:
    """The table for the terminal."""
    table = Printed(box=None, pad_edge=False)
    for name in HEAD:
        side = "left" if name == "ahead" else "right"
        table.add_column(name, justify=side, no_wrap=True)
    for row in rows(summary.plan, summary.states):
        table.add_row(*row)
    return table


def engines_block(summary: Summary) -> Block:
    """The table and a chart for the page."""
    table = Table(HEAD, [*rows(summary.plan, summary.states)], "Steps by rollout.ahead", "ahead")
    facts = tuple(f"{name}: {words}." for name, words in engine_facts(summary.plan))
    return Block("Remote engines", (*facts, f"{ABOUT}."), (_chart(summary.states),), (table,))


def _chart(states: tuple[Steady, ...]) -> Chart:
    """The trainer's seconds of a step, and those of an engine, for each value of rollout.ahead."""
    bars: list[Bar] = []
    for each in states:
        busy = each.busy * each.seconds
        sides = {
            "trainer": {"trains": each.train, "publishes": each.publish, "waits": each.wait},
            "an engine": {"generates": busy, "idle or paused": each.seconds - busy},
        }
        for side, parts in sides.items():
            shown = [Part(n, s, f"{side}, ahead {each.ahead}: {n} {duration(s)}")
                     for n, s in parts.items()]  # fmt: skip
            bars.append(Bar(f"ahead {each.ahead}", side, shown, duration(each.seconds)))
    names = ("trains", "publishes", "waits", "generates", "idle or paused")
    return stacked_bars("Seconds of a step by rollout.ahead", bars, ("s", 1.0), names)


def engine_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """(name, text): the engines, their hosts and their memory."""
    rollout = plan.rollout
    where = f"{len(rollout.servers)} addresses"
    if rollout.launch.hosts:
        where = f"{_some(rollout.launch.hosts)}, each with {rollout.launch.gpus} of their GPUs"
        if plan.device == "cpu":
            where = _some(rollout.launch.hosts)
    yield "engines", f"{plan.num_engines} of {rollout.engine}, tp {rollout.tp}, on {where}"
    if memory := engine_memory(plan):
        left = memory.limit - memory.taken
        yield (
            "engine memory",
            f"on each GPU {size(memory.weights)} of weights, a KV cache for {memory.tokens:,} "
            f"tokens ({memory.tokens // memory.sample:,} of the longest samples), and "
            f"{size(left)} free of {size(memory.limit)}",
        )


def _some(hosts: list[str], most: int = 4) -> str:
    """The first names, and how many there are."""
    shown = ", ".join(hosts[:most]) + ", ..." * (len(hosts) > most)
    return f"{len(hosts)} hosts ({shown})" if len(hosts) > 1 else hosts[0]
