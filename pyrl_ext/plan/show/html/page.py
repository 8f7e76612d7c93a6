"""Writes the page: one HTML file that loads nothing else and can be read without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pyrl_ext.plan import rules
from pyrl_ext.plan.language.errors import ConfigError
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html import charts, sections
from pyrl_ext.plan.show.html.sections import Block, Table, code
from pyrl_ext.plan.show.summary import Summary, Verdict, facts, is_read, values


def write_page(path: str | Path, content: Plan | ConfigError, more: Sequence[Block] = ()) -> None:
    """Write the page of a plan, or of the problems that prevent it. Raises `OSError`."""
    is_plan = isinstance(content, Plan)
    text = plan_page(content, more) if is_plan else problems_page(content)
    Path(path).write_text(text, encoding="utf-8", newline="\n")


def plan_page(plan: Plan, more: Sequence[Block] = ()) -> str:
    """The page of a plan, with sections that were asked for; the same plan gives the same text."""
    summary = Summary(plan)
    if summary.states:
        from pyrl_ext.plan.show.remote_engines import engines_block  # it draws on this module's

        more = (engines_block(summary), *more)
    remarks = [("cannot run yet", reason) for reason in plan.unsupported]
    remarks += [("note", note) for note in plan.notes]
    uses_host = any(item.host and item.bytes for stage in summary.memory for item in stage.items)
    changed = [value for value in values(plan) if not value.is_default]
    rows = [(code(value.key), code(value.text), value.meaning) for value in changed]
    return _render(
        f"{Path(plan.source).name}: {_model(plan)}",
        summary.verdicts,
        remarks=remarks,
        facts=facts(plan),
        nodes=sections.nodes(plan),
        groups=sections.groups_table(plan),
        layers=sections.layers_chart(plan),
        pipeline=sections.pipeline_chart(plan),
        memory=[sections.memory_chart(summary, host) for host in (False, True)[: 1 + uses_host]],
        memory_tables=sections.memory_tables(summary),
        time=summary.time,
        time_chart=summary.time and sections.time_chart(summary.time),
        time_table=summary.time and sections.time_table(summary.time),
        more=more,
        rules=[
            (key, rules.sentence(rule))
            for key, rule in rules.RULES
            if is_read(plan, tuple(key.split(".")))
        ],
        values=Table(("key", "value", "meaning"), rows, "Every other field has its default"),
    )


def problems_page(error: ConfigError) -> str:
    """The page of the problems that prevent a plan."""
    number = len(error.problems)
    head = "1 problem" if number == 1 else f"{number} problems"
    rows = [(code(problem.where), problem.message) for problem in error.problems]
    columns = ("where", "what, and what is expected")
    table = Table(columns, rows, "By file and line, or by command-line argument", "problems")
    verdict = Verdict("bad", "no plan", f"{head}, listed below")
    return _render("This plan does not compile", (verdict,), problems=table)


def _render(title: str, verdicts: tuple[Verdict, ...], **content: object) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["px"] = _pixels
    template = environment.get_template("page.html")
    constants = {"series": charts.SERIES, "width": charts.WIDTH, "problems": None, "more": ()}
    return template.render(constants | {"title": title, "verdicts": verdicts} | content)


def _pixels(value: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _model(plan: Plan) -> str:
    gpu = plan.hardware.gpu or f"{plan.device} rank"
    plural = "" if plan.world_size == 1 or plan.hardware.gpu else "s"
    return f"{plan.model.family} on {plan.world_size} {gpu}{plural}"
