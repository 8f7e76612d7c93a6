"""Writes the page: one HTML file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from pyrl_ext.metrics.alarms import alarms
from pyrl_ext.metrics.glossary import explained
from pyrl_ext.metrics.report import PHASES, phase_seconds
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.json_text import flatten
from pyrl_ext.plan.model.units import duration, size
from pyrl_ext.plan.plan import NOT_COMPARED
from pyrl_ext.plan.show.html.page import environment
from pyrl_ext.plan.show.summary import values
from pyrl_ext.tools.report.curves import SHOWN_FIRST, Chart, charts, grouped, hours
from pyrl_ext.tools.report.evaluations import evaluations
from pyrl_ext.tools.report.events import events
from pyrl_ext.tools.report.recorded import GAPS, SAMPLES, UNLIKELY, Recorded, recorded
from pyrl_ext.tools.report.state import Folder

COLOURS = 8
"""Colours of runs; more runs repeat them."""

HERE = Path(__file__).parent
SCRIPTS = ("state.js", "report.js", "samples.js")


def report_page(folders: Sequence[Folder], most: int = SAMPLES, version: str = "") -> str:
    """The page of one or more runs.

    Args:
        folders: the runs
        most: number of recorded samples that it shows of each
        version: of the files that it was built from, where a server builds it again; the page
            compares it with the server's
    """
    templates = environment(HERE)
    templates.filters["duration"] = duration
    found = charts([folder.columns for folder in folders])
    names = [folder.run.name for folder in folders]
    samples = [recorded(folder, most) for folder in folders]
    script = "".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    phases, remarks = time_bars(folders)
    return templates.get_template("report.html").render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        folders=folders,
        names=names,
        alarms=[(run, a) for run, folder in enumerate(folders) for a in alarms(folder.columns)],
        charts=found,
        first=[name for name in SHOWN_FIRST if name in found],
        groups=grouped([*found]),
        layers=layer_agreement(found),
        phases=phases,
        remarks=remarks,
        memory=memory_bars(folders),
        gaps=", ".join(map(str, GAPS)),
        recorded=samples,
        parts=sorted({part for run in samples for each in run.samples for part in each.parts}),
        plans=[values(folder.plan) if folder.plan else None for folder in folders],
        differences=differences(folders),
        timed=all(map(hours, [folder.run for folder in folders])),
        evaluations=[e for run, folder in enumerate(folders) for e in evaluations(run, folder)],
        events=[e for run, folder in enumerate(folders) for e in events(run, folder)],
        data=data_block(folders, found, samples),
        version=version,
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


def data_block(
    folders: Sequence[Folder], found: dict[str, Chart], samples: Sequence[Recorded]
) -> Markup:
    """The data of the page's scripts, as JSON that cannot close the script element."""
    content = {
        "names": [folder.run.name for folder in folders],
        "colours": COLOURS,
        "hours": [hours(folder.run) for folder in folders],
        "charts": found,
        "load": [{"layers": run.layers, "values": run.load} for run in samples],
        "samples": [[asdict(sample) for sample in run.samples] for run in samples],
        "best": [run.best for run in samples],
        "tones": {"gaps": GAPS, "unlikely": UNLIKELY},
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))


def differences(folders: Sequence[Folder]) -> list[tuple[str, list[str]]]:
    """Keys whose values are not the same in all plans that can be read, and the value of each run
    in JSON; "-" if it lacks the key, or its plan cannot be read. Sizes of the model are below
    ``hf``."""
    plans: list[dict[str, str]] = []
    for folder in folders:
        fields = folder.plan.model_dump(mode="json") if folder.plan else {}
        flat = flatten(fields, {*NOT_COMPARED, "run"})
        plans.append({key: json.dumps(value, ensure_ascii=False) for key, value in flat.items()})
    rows: list[tuple[str, list[str]]] = []
    for key in dict.fromkeys(key for plan in plans for key in plan):
        texts = [plan.get(key, "-") for plan in plans]
        compared = {text for text, plan in zip(texts, plans, strict=True) if plan}
        if len(compared) > 1:
            rows.append((key, texts))
    return rows


# Bars of measured numbers, and of the plan's estimates ------------------------------------------


class Bar(NamedTuple):
    """One number of a run, or its plan's estimate of it; ``width`` is in percent."""

    run: int
    planned: bool
    text: str
    width: float


class Bars(NamedTuple):
    """The bars of one metric."""

    name: str
    words: str
    bars: list[Bar]


# metric -> (number of the run, True for the plan's estimate, value)
Rows = dict[str, list[tuple[int, bool, float]]]


def time_bars(folders: Sequence[Folder]) -> tuple[list[Bars], list[str]]:
    """Mean seconds of a step by phase, and sentences about rewards and estimates."""
    rows: Rows = {name: [] for name in (*PHASES, "other")}
    remarks: dict[str, None] = {}
    for run, folder in enumerate(folders):
        for name, seconds in phase_seconds(folder.run).items():
            if seconds > 0:
                rows[name].append((run, False, seconds / max(1, folder.step)))
        if (scoring := _scoring(folder)) is not None:
            remarks[f"{folder.run.name}: {scoring}"] = None
        if folder.plan is None:
            continue
        estimate = step_time(folder.plan)
        if estimate is None:
            remarks[f"{folder.run.name}: no estimate, since its plan names no hardware.gpu."] = None
            continue
        for phase in estimate.phases:
            if f"time/{phase}" in rows:
                rows[f"time/{phase}"].append((run, True, estimate.seconds(phase)))
        remarks[f"{folder.run.name}: estimates were {estimate.error}."] = None
    return _scaled(rows, duration), [*remarks]


def _scoring(folder: Folder) -> str | None:
    """A sentence about the calls of a reward function in workers; None: the run has none."""
    values = {
        name: folder.finite(f"scoring/{name}")[1]
        for name in ("calls_per_second", "call_seconds", "wait_seconds", "retries", "dropped")
    }
    if not len(values["calls_per_second"]):
        return None
    return (
        f"the reward function took {duration(values['call_seconds'].mean())} a call, at "
        f"{values['calls_per_second'].mean():,.3g} calls/s; a step waited "
        f"{duration(values['wait_seconds'].mean())} for rewards; {values['retries'].sum():,.0f} "
        f"calls were made again, {values['dropped'].sum():,.0f} responses dropped."
    )


def memory_bars(folders: Sequence[Folder]) -> list[Bars]:
    """The most memory of a rank in any step, and the plan's estimate; empty if never measured."""
    rows: Rows = {"memory/peak": []}
    for run, folder in enumerate(folders):
        values = folder.finite("memory/peak")[1]
        if not len(values):
            continue
        rows["memory/peak"].append((run, False, values.max()))
        if folder.plan is not None:
            on_cpu = folder.plan.device == "cpu"  # its one memory holds what a GPU offloads, too
            peak = max(
                stage.held(phase) + on_cpu * stage.held(phase, host=True)
                for stage in stage_memory(folder.plan)
                for phase in stage.phases
            )
            rows["memory/peak"].append((run, True, peak))
    return _scaled(rows, lambda held: size(int(held)))


def _scaled(rows: Rows, shown: Callable[[float], str]) -> list[Bars]:
    """Bars as wide as their numbers; metrics without any are left out."""
    longest = max((value for row in rows.values() for *_, value in row), default=0.0) or 1.0
    found = []
    for name, row in rows.items():
        words = "The rest of time/step." if name == "other" else explained(name)
        bars = [Bar(run, plan, shown(value), 100 * value / longest) for run, plan, value in row]
        if bars:
            found.append(Bars(name, words, bars))
    return found
