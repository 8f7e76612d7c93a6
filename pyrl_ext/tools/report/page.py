"""Writes the page: one HTML file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from pyrl_ext.metrics.glossary import described
from pyrl_ext.metrics.report import PHASES, phase_seconds
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.model.units import duration, size
from pyrl_ext.plan.show.html.page import environment
from pyrl_ext.tools.report.curves import SHOWN_FIRST, Chart, charts, grouped
from pyrl_ext.tools.report.events import alarms, events
from pyrl_ext.tools.report.recorded import GAPS, Recorded, recorded
from pyrl_ext.tools.report.state import Folder

COLOURS = 8
"""Colours of runs; more runs repeat them."""

HERE = Path(__file__).parent


def report_page(folders: Sequence[Folder]) -> str:
    """The page of one or more runs."""
    templates = environment(HERE)
    templates.filters["duration"] = duration
    found = charts([folder.columns for folder in folders])
    names = [folder.run.name for folder in folders]
    samples = [recorded(folder) for folder in folders]
    script = (HERE / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    phases, remarks = time_bars(folders)
    return templates.get_template("report.html").render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        folders=folders,
        names=names,
        alarms=[a for run, folder in enumerate(folders) for a in alarms(run, folder.columns)],
        charts=found,
        first=[name for name in SHOWN_FIRST if name in found],
        groups=grouped([*found]),
        layers=layer_agreement(found),
        phases=phases,
        remarks=remarks,
        memory=memory_bars(folders),
        gaps=", ".join(map(str, GAPS)),
        recorded=samples,
        events=[e for run, folder in enumerate(folders) for e in events(run, folder)],
        data=data_block(found, samples),
        script=Markup(script),
        digest=Markup(digest),  # of the one script that may run; text of samples is escaped, too
        colours=COLOURS,
    )


def layer_agreement(found: dict[str, Chart]) -> tuple[float, list[int]] | None:
    """The lowest agreement of a layer, and the runs that have it by layer; None if none has."""
    chart = found.get("route/agree_topk/layer_<id>")
    if chart is None:
        return None
    values = [y for curve in chart["curves"] for y in curve["y"] if y is not None]
    return min(values, default=1.0), sorted({curve["run"] for curve in chart["curves"]})


def data_block(found: dict[str, Chart], samples: Sequence[Recorded]) -> Markup:
    """The numbers for the script, in JSON that cannot end its element."""
    load = [{"layers": run.layers, "values": run.load} for run in samples]
    text = json.dumps({"charts": found, "load": load}, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))


# Bars of measured numbers, and of the plan's estimates ------------------------------------------


@dataclass
class Bar:
    """One number of a run, or its plan's estimate of it; ``width`` is in percent."""

    run: int
    planned: bool
    value: float
    text: str
    width: float = 0.0


@dataclass
class Bars:
    """The bars of one metric."""

    name: str
    words: str
    bars: list[Bar] = field(default_factory=list[Bar])


def time_bars(folders: Sequence[Folder]) -> tuple[list[Bars], list[str]]:
    """Mean seconds of a step by phase, and sentences about estimates."""
    rows = {name: Bars(name, described(name).definition) for name in PHASES}
    rows["other"] = Bars("other", "The rest of time/step.")
    remarks: dict[str, None] = {}

    def add(run: int, planned: bool, name: str, seconds: float) -> None:
        rows[name].bars.append(Bar(run, planned, seconds, duration(seconds)))

    for run, folder in enumerate(folders):
        for name, seconds in phase_seconds(folder.run).items():
            if seconds > 0:
                add(run, False, name, seconds / max(1, folder.step))
        if folder.plan is None:
            continue
        estimate = step_time(folder.plan)
        if estimate is None:
            remarks[f"{folder.run.name}: no estimate, since its plan names no hardware.gpu."] = None
            continue
        for phase in dict.fromkeys(cost.phase for cost in estimate.costs):
            if f"time/{phase}" in rows:
                add(run, True, f"time/{phase}", estimate.seconds(phase))
        remarks[f"{folder.run.name}: estimates were {estimate.error}."] = None
    return _scaled([row for row in rows.values() if row.bars]), [*remarks]


def memory_bars(folders: Sequence[Folder]) -> list[Bars]:
    """The most memory of a rank in any step, and the plan's estimate; empty if never measured."""
    row = Bars("memory/peak", described("memory/peak").definition)
    for run, folder in enumerate(folders):
        values = folder.finite("memory/peak")[1]
        if not len(values):
            continue
        row.bars.append(Bar(run, False, values.max(), size(int(values.max()))))
        if folder.plan is not None:
            on_cpu = folder.plan.device == "cpu"  # its one memory holds what a GPU offloads, too
            peak = max(
                stage.held(phase) + on_cpu * stage.held(phase, host=True)
                for stage in stage_memory(folder.plan)
                for phase in stage.phases
            )
            row.bars.append(Bar(run, True, peak, size(peak)))
    return _scaled([row] if row.bars else [])


def _scaled(rows: list[Bars]) -> list[Bars]:
    longest = max((bar.value for row in rows for bar in row.bars), default=0.0) or 1.0
    for row in rows:
        for bar in row.bars:
            bar.width = 100 * bar.value / longest
    return rows
