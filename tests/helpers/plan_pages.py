"""A few plans, and how the page and the terminal show them."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser

from rich.console import Console

from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.step_time import StepTime, step_time
from pyrl_ext.plan.show.terminal import print_plan
from tests.helpers.configs import REPOSITORY

GLM47 = str(REPOSITORY / "configs/glm47.yaml")
ACCOUNTED = "parallel.account_for_embedding_in_pipeline_split=true"
PLANS = {
    "tiny": (str(REPOSITORY / "configs/tiny.yaml"),),
    "glm47": (GLM47,),
    "interleaved": (GLM47, "parallel.pp=4", "parallel.vpp=2", "parallel.tp=4", ACCOUNTED),
    "deep": (GLM47, "parallel.pp=16", "parallel.vpp=3", "parallel.dp=16", ACCOUNTED),
}


@cache
def plan_of(name: str, *overrides: str) -> Plan:
    path, *given = PLANS[name]
    return compile_plan(path, [*given, *overrides])


def glm47(*overrides: str, memory: int = 10**13) -> Plan:
    """The shipped plan on GPUs of so many bytes, where everything fits, with an engine a rank."""
    base = {"hardware.memory": memory, "rollout.tp": 1, "rollout.gpu_memory_utilization": 0.6}
    given = {each.partition("=")[0] for each in overrides}
    kept = [f"{key}={value}" for key, value in base.items() if key not in given]
    return compile_plan(GLM47, [*kept, *overrides])


def time_of(plan: Plan) -> StepTime:
    """The forecast of a plan that has one."""
    found = step_time(plan)
    assert found is not None
    return found


def printed(plan: Plan, width: int, everything: bool = False) -> list[str]:
    """The lines that the command prints on a terminal of so many columns."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        print_plan(plan, console, everything)
    return capture.get().splitlines()


class Checker(HTMLParser):
    """Collects elements and texts; elements must be closed in the order they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def words_of(page: str) -> str:
    """All text of a page, with single spaces."""
    return " ".join("".join(checked(page).words).split())
