"""The plan as one HTML page that needs nothing else: no network, readable without scripts."""

from __future__ import annotations

from pathlib import Path
from string import Template

from pyrl_ext.plan import rules
from pyrl_ext.plan.language.errors import ConfigError
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html.memory import memory_section
from pyrl_ext.plan.show.html.ranks import ranks_section
from pyrl_ext.plan.show.html.stages import stages_section
from pyrl_ext.plan.show.html.svg import Content, Markup, join, table, tag
from pyrl_ext.plan.show.html.time import pipeline_section, time_section
from pyrl_ext.plan.show.summary import Summary, facts, values

_TEMPLATE = Path(__file__).with_name("page.html")
_MARKS = {"good": "✓", "bad": "✗", "plain": "·"}


def write_page(path: str | Path, content: Plan | ConfigError) -> None:
    """Write the page of a plan, or of the problems for which there is none. Raises `OSError`."""
    is_plan = isinstance(content, Plan)
    text = plan_page(content) if is_plan else problems_page(content)
    Path(path).write_text(text, encoding="utf-8", newline="\n")


def plan_page(plan: Plan) -> str:
    """The page of a plan; the same plan gives the same text."""
    summary = Summary(plan)
    sections = [
        verdict(summary),
        section("What follows", _pairs(facts(plan))),
        section("Ranks", ranks_section(plan)),
        section("Layers on pipeline stages", stages_section(plan)),
        section("Pipeline schedule", pipeline_section(summary)),
        section("Memory", memory_section(summary)),
        section("Time of a step", time_section(summary)),
        section("Rules", rules_section()),
        section("Values that are not the default", _values(plan)),
    ]
    return _page(f"{Path(plan.source).name}: {_model(plan)}", sections)


def problems_page(error: ConfigError) -> str:
    """The page of what keeps a plan from compiling."""
    count = len(error.problems)
    head = "1 problem" if count == 1 else f"{count} problems"
    rows = [(tag("code", problem.where), problem.message) for problem in error.problems]
    answer = _verdict_line("bad", "no plan", f"{head}, all of them below")
    caption = "By file and line, or by what the command line has"
    found = table(("where", "what, and what is expected"), rows, caption, "problems")
    return _page("This plan does not compile", [answer, section("Problems", found)])


def section(title: str, *content: Content) -> Markup:
    """A titled part of the page."""
    return tag("section", tag("h2", title), *content)


def verdict(summary: Summary) -> Markup:
    """The answers, and what a reader should know about them."""
    plan = summary.plan
    lines = [_verdict_line(*each) for each in summary.verdicts]
    remarks = [("cannot run yet", reason) for reason in plan.unsupported]
    remarks += [("note", note) for note in plan.notes]
    items = [tag("li", tag("b", kind), " ", words) for kind, words in remarks]
    return tag("section", lines, tag("ul", items, class_="remarks") if items else "")


def _verdict_line(tone: str, answer: str, detail: str) -> Markup:
    mark = tag("span", _MARKS[tone], class_="mark", aria_hidden="true")
    return tag("p", mark, tag("b", answer), " ", detail, class_=f"verdict {tone}")


def rules_section() -> Markup:
    """Every rule; a plan that compiled breaks none."""
    items = [
        tag("li", tag("b", "holds"), f" {rules.sentence(rule)} ", tag("code", key))
        for key, rule in rules.RULES
    ]
    note = f"All {len(items)} hold. Each is a function of pyrl_ext.plan.rules with this name."
    return join((tag("p", note), tag("ul", items, class_="rules")))


def _values(plan: Plan) -> Markup:
    changed = [value for value in values(plan) if not value.is_default]
    rows = [(tag("code", key), tag("code", text), meaning) for key, text, meaning, _ in changed]
    return table(("key", "value", "meaning"), rows, "Every other field has its default")


def _pairs(pairs: list[tuple[str, str]]) -> Markup:
    return tag("dl", [(tag("dt", name), tag("dd", words)) for name, words in pairs])


def _model(plan: Plan) -> str:
    gpu = plan.hardware.gpu or f"{plan.device} rank"
    plural = "" if plan.world_size == 1 or plan.hardware.gpu else "s"
    return f"{plan.model.family} on {plan.world_size} {gpu}{plural}"


def _page(title: str, sections: list[Markup]) -> str:
    template = Template(_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=join(title), body=Markup("\n".join(sections)))
