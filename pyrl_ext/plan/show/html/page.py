"""Writes the page: one HTML file that loads nothing else, without scripts."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pyrl_ext.plan.language.errors import ConfigError
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html.charts import SERIES, memory_bars, rate_curve, time_bars
from pyrl_ext.plan.show.summary import Summary, Table, Verdict, values


def environment(*folders: Path) -> Environment:
    """Templates of `folders`, and the style sheet `page.css` of this one."""
    made = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["series"] = SERIES  # pyright: ignore[reportArgumentType]
    return made


def write_page(path: str | Path, content: Plan | ConfigError) -> None:
    """Write the page of a plan, or of the problems that prevent it. Raises `OSError`."""
    text = plan_page(content) if isinstance(content, Plan) else problems_page(content)
    Path(path).write_text(text, encoding="utf-8", newline="\n")


def plan_page(plan: Plan) -> str:
    """The page of a plan; the same plan gives the same text."""
    summary = Summary(plan)
    remarks = [("cannot run yet", reason) for reason in plan.unsupported]
    remarks += [("note", note) for note in plan.notes]
    charts = [("Device memory by phase", memory_bars(summary.memory, summary.limit))]
    if summary.time:
        charts.append(("Seconds of a step by phase", time_bars(summary.time)))
        assumed = (*summary.time.assumed, summary.time.error)
        remarks += [("assumed", sentence) for sentence in assumed]
    changed = [value[:3] for value in values(plan) if not value.is_default]
    fields = Table("values that are not the default", ("key", "value", "meaning"), changed)
    return environment().get_template("page.html").render(
        title=f"{Path(plan.source).name}: {plan.model.family} on {plan.world_size} ranks",
        verdicts=summary.verdicts,
        remarks=remarks,
        charts=charts,
        curve=rate_curve(plan.learning_rate()),
        tables=[*summary.tables(), fields],
    )  # fmt: skip


def problems_page(error: ConfigError) -> str:
    """The page of the problems that prevent a plan."""
    rows = [(problem.where, problem.message) for problem in error.problems]
    problems = Table("problems", ("where", "what, and what is expected"), rows)
    verdict = Verdict("bad", "no plan", f"problems: {len(rows)}, listed below")
    return environment().get_template("page.html").render(
        title="This plan does not compile",
        verdicts=[verdict],
        remarks=[],
        charts=[],
        curve=None,
        tables=[problems],
    )  # fmt: skip
