"""Writes the page: one HTML file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pyrl_ext.plan.forecast.units import duration
from pyrl_ext.plan.show import html
from pyrl_ext.plan.show.html.charts import SERIES
from pyrl_ext.tools.report.alarms import alarms
from pyrl_ext.tools.report.curves import Curves, curves
from pyrl_ext.tools.report.events import events
from pyrl_ext.tools.report.phases import memory, phases
from pyrl_ext.tools.report.recorded import APART, Recorded, recorded
from pyrl_ext.tools.report.state import Folder

COLOURS = 8
"""Colours of runs; more runs repeat them."""

HERE = Path(__file__).parent


def report_page(folders: Sequence[Folder]) -> str:
    """The page of one or more runs."""
    environment = Environment(
        loader=FileSystemLoader([HERE, Path(html.__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    found = curves([folder.columns for folder in folders])
    script = (HERE / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    names = [folder.run.name for folder in folders]
    played = [recorded(folder) for folder in folders]
    return environment.get_template("report.html").render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        folders=folders,
        names=names,
        alarms=[a for n, folder in enumerate(folders) for a in alarms(n, folder.columns)],
        charts=found.charts,
        first=found.first,
        groups=found.groups,
        layers=layers(found),
        phases=phases(folders),
        memory=memory(folders),
        apart=", ".join(map(str, APART)),
        recorded=played,
        events=[e for n, folder in enumerate(folders) for e in events(n, folder)],
        data=data_block(found, names, played),
        script=Markup(script),
        # what a sample says is escaped, and would not run if it were not
        digest=Markup(digest),
        colours=COLOURS,
        series=SERIES,
    )


def layers(found: Curves) -> tuple[float, list[int]] | None:
    """The lowest agreement of a layer, and the runs that have it by layer; None: none has."""
    chart = found.charts.get("route/agree_topk/layer_<id>")
    if chart is None:
        return None
    values = [y for curve in chart["curves"] for y in curve["y"] if y is not None]
    return min(values, default=1.0), sorted({curve["run"] for curve in chart["curves"]})


def data_block(found: Curves, names: Sequence[str], played: Sequence[Recorded]) -> Markup:
    """The numbers for the script, in JSON that cannot end its element."""
    shown = ("unit", "band", "log", "family", "curves")
    charts = {name: {k: chart[k] for k in shown} for name, chart in found.charts.items()}
    load = [{"layers": each.layers, "values": each.load} for each in played]
    content = {"runs": names, "steps": found.steps, "charts": charts, "load": load}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))
