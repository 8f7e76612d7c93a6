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
from pyrl_ext.tools.report.state import Folder

COLOURS = 8
"""Colours of runs; more runs repeat them."""

HERE = Path(__file__).parent


def report_page(folders: Sequence[Folder], live: bool = False) -> str:
    """The page of one or more runs.

    Args:
        live: it asks the server that it comes from for a newer one.
    """
    environment = Environment(
        loader=FileSystemLoader([HERE, Path(html.__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    found = curves([folder.run for folder in folders])
    script = (HERE / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    names = [folder.run.name for folder in folders]
    return environment.get_template("report.html").render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        folders=folders,
        names=names,
        alarms=[a for n, folder in enumerate(folders) for a in alarms(n, folder.columns)],
        charts=found.charts,
        first=found.first,
        groups=found.groups,
        data=data_block(found, names),
        script=Markup(script),
        # what a sample says is escaped, and would not run if it were not
        digest=Markup(digest),
        live=live,
        colours=COLOURS,
        series=SERIES,
    )


def data_block(found: Curves, names: Sequence[str]) -> Markup:
    """The numbers for the script, in JSON that cannot end its element."""
    shown = ("unit", "band", "log", "family", "curves")
    charts = {name: {k: chart[k] for k in shown} for name, chart in found.charts.items()}
    content = {"runs": names, "steps": found.steps, "charts": charts}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))
