"""The report of ``make gpu``: Markdown to read, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import Result
from benchmarks.gpu.rows import FAILED, MISSED

FORMAT = "pyrl gpu report 1"


def write(
    folder: Path,
    facts: Mapping[str, Any],
    what: Mapping[str, str],
    results: Sequence[Result],
    waiting: Sequence[str],
) -> None:
    """``report.json`` and ``report.md``.

    Args:
        facts:   the machine.
        what:    part -> one line about it.
        waiting: jobs that have not run.
    """
    whole = {
        "format": FORMAT,
        "facts": dict(facts),
        "results": [asdict(each) for each in results],
        "waiting": list(waiting),
    }
    (folder / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    text = "\n".join(lines(facts, what, results, waiting))
    (folder / "report.md").write_text(text + "\n")


def lines(
    facts: Mapping[str, Any],
    what: Mapping[str, str],
    results: Sequence[Result],
    waiting: Sequence[str],
) -> Iterator[str]:
    yield "# GPU report\n"
    yield "  ".join(f"{name}: {value}" for name, value in facts.items()) + "\n"
    yield summary(results, waiting) + "\n"
    yield "| part | job | result | s | why |\n| --- | --- | --- | ---: | --- |"
    for each in results:
        bad = next((row["why"] for row in each.rows if row["state"] in (FAILED, MISSED)), "")
        yield row_of(each.part, each.name, each.state, f"{each.seconds:.0f}", each.why or bad)
    for part, number in Counter(name.split(" ")[0] for name in waiting).items():
        yield row_of(part, f"{number} job{'s' * (number > 1)}", "waits", "", "--resume runs them")
    for part in dict.fromkeys(each.part for each in results):
        yield f"\n## {part}: {what.get(part, '')}\n"
        for each in results:
            if each.part == part:
                yield from table_of(each)
    failures = [each for each in results if each.bad]
    if failures:
        yield "\n## Logs of what went wrong\n"
    for each in failures:
        yield f"{each.part}, {each.name}: {each.state} {each.why}\n"
        yield "\n".join(["```text", *(line.replace("```", "'''") for line in each.log), "```\n"])


def summary(results: Sequence[Result], waiting: Sequence[str]) -> str:
    """Counts of jobs by state."""
    counts = Counter(each.state for each in results) + Counter(waits=len(waiting))
    seconds = sum(each.seconds for each in results)
    return ", ".join(f"{n} {state}" for state, n in counts.items()) + f"; {seconds:.0f} s of jobs"


def table_of(result: Result) -> Iterator[str]:
    """The rows of a job: a table for each run of rows that have the same numbers."""
    for names, group in groupby(result.rows, lambda row: tuple(row["numbers"])):
        rows = list(group)
        heads = [result.name, "result", *names, *["why"] * any(row["why"] for row in rows)]
        yield row_of(*heads)
        yield row_of(*("---" for _ in heads))
        for row in rows:
            cells = [shown(row["numbers"][name]) for name in names]
            yield row_of(row["name"], row["state"], *cells, *[row["why"]] * ("why" in heads))
        yield ""


def shown(value: Any) -> str:
    """A number with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {shown(each)}" for name, each in value.items())
    return " ".join(map(shown, value)) if isinstance(value, list) else str(value)


def row_of(*cells: str) -> str:
    return "| " + " | ".join(c.replace("|", "/").replace("\n", " ") for c in cells) + " |"
