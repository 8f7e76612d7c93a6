"""A run on the terminal: a line per step, and below the lines a bar that shows what it does now."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from pyrl_ext.metrics.alarms import COLORS, MARKS, problems
from pyrl_ext.metrics.sinks import Row

HEADER_EVERY = 20  # lines
NAMED = 3  # most problems of a step that its line names


class Column(NamedTuple):
    """A column of the lines.

    Args:
        names: metrics, of which the first that the step has is shown.
        width: of the numbers, in characters; a wider number is shown whole.
        text: writes a number.
    """

    label: str
    names: tuple[str, ...]
    width: int
    text: Callable[[float], str]


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


COLUMNS = (
    Column("reward", ("reward",), 6, "{:.3f}".format),
    Column("eval", ("eval_reward", "eval_loss"), 6, "{:.3f}".format),
    Column("loss", ("loss",), 7, "{:.4f}".format),
    Column("entropy", ("policy/entropy",), 7, "{:.3f}".format),
    Column("KL", ("policy/ref_kl", "reward/kl"), 7, "{:.4f}".format),
    Column("mismatch", ("mismatch/abs_mean",), 8, "{:.1e}".format),
    Column("grad", ("grad_norm",), 7, _three_digits),
    Column("length", ("rollout/response_len",), 6, "{:,.1f}".format),
    Column("trunc", ("rollout/truncated", "data/truncated"), 5, _percent),
    Column("tokens/s", ("tokens_per_s",), 8, "{:,.0f}".format),
    Column("seconds", ("time/step",), 7, "{:.2f}".format),
)


class TerminalSink:
    """A line per step, with a header line now and then; in a terminal also a live bar below.

    A line has the metrics of `COLUMNS` that the run has, and names what is alarming.

    Args:
        total_steps: steps of the whole run.
        first_step: where this process starts.
        console: where to print, stderr if None.
    """

    def __init__(
        self, total_steps: int, first_step: int = 0, console: Console | None = None
    ) -> None:
        self._console = console or Console(stderr=True)
        self._total = total_steps
        self._first = first_step
        self._start = time.monotonic()
        self._width = 2 * len(str(total_steps)) + 1  # of "12/300"
        self._columns: list[Column] = []
        self._lines = 0
        self._phase = ""
        self._bar = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(20),
                TextColumn("{task.fields[now]}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=first_step, now="")
            self._bar.start()
            atexit.register(self._bar.stop)  # shows the cursor again if the run fails

    def write(self, row: Row) -> None:
        """Print one step."""
        step = int(row["step"])
        new = [c for c in COLUMNS if c not in self._columns and _number(c, row) is not None]
        if new or self._lines % HEADER_EVERY == 0:
            self._columns = [c for c in COLUMNS if c in self._columns or c in new]
            self._lines = 0
            self._print(self._header())
        self._lines += 1
        self._print(self._line(step, row))
        if self._bar is not None:
            done = min(step + 1, self._total)  # the last evaluation comes after it
            self._bar.update(self._task, completed=done)

    def enter(self, phase: str | None) -> None:
        """Show the phase that begins, as `Clock` names it, in the bar."""
        self._phase = "" if phase in (None, "time/step") else phase.removeprefix("time/")
        self._show(self._phase)

    def note(self, text: str) -> None:
        """Show the progress of the phase in the bar, such as "rollout: 96 samples"."""
        named = not self._phase or text.startswith(self._phase)
        self._show(text if named else f"{self._phase}, {text}")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            atexit.unregister(self._bar.stop)

    def _show(self, now: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, now=now)

    def _print(self, line: Text) -> None:
        line.rstrip()
        self._console.print(line, soft_wrap=True)

    def _header(self) -> Text:
        cells = ["step".rjust(self._width)]
        for column in self._columns:
            cells.append(column.label.rjust(column.width))
        cells.append("left".rjust(7))
        return Text("  ".join(cells), "bold")

    def _line(self, step: int, row: Row) -> Text:
        cells = [f"{step}/{self._total}".rjust(self._width)]
        for column in self._columns:
            number = _number(column, row)
            text = "" if number is None else column.text(number)
            cells.append(text.rjust(column.width))
        cells.append(self._left(step))
        line = Text("  ".join(cells))
        found = problems(row)
        for problem in found[:NAMED]:
            line.append(f"  {MARKS['alarm']} {problem}", COLORS["alarm"])
        if len(found) > NAMED:
            line.append(f"  and {len(found) - NAMED} more", COLORS["alarm"])
        return line

    def _left(self, step: int) -> str:
        """Time until the last step at the pace so far."""
        if step >= self._total:
            return ""
        seconds = time.monotonic() - self._start
        seconds *= (self._total - step - 1) / (step + 1 - self._first)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"


def _number(column: Column, row: Row) -> float | None:
    """The number of a step for a column; None if the step has none."""
    for name in column.names:
        if name in row:
            return row[name]
    return None
