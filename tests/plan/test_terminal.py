"""The plan's tables on a terminal: the answers first, the right numbers, no name broken."""

from __future__ import annotations

import pytest
from rich.console import Console

from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.model.units import amount, duration
from pyrl_ext.plan.phases import START
from pyrl_ext.plan.show.summary import Summary, Table, values
from pyrl_ext.plan.show.terminal import print_table
from tests.helpers.plan_pages import plan_of, printed


@pytest.mark.parametrize("name", ["tiny", "interleaved"])
def test_print_plan_answers_first_and_breaks_no_name(name: str):
    plan = plan_of(name)
    lines = printed(plan, 100)
    answers = [line for line in lines[1 : lines.index("follows")] if line[:1].strip()]
    expected = [verdict.answer for verdict in Summary(plan).verdicts]
    assert [line[: len(answer)] for line, answer in zip(answers, expected)] == expected
    assert max(map(len, lines[1:])) <= 100
    shown = "\n".join(lines)
    for key, value, _, is_default in values(plan):
        assert is_default or f"{key}={value}" in shown
    everything = "\n".join(printed(plan, 200, everything=True))
    assert all(f"{key}={value}" in everything for key, value, *_ in values(plan))


def test_memory_table_has_bytes_by_phase():
    plan = plan_of("interleaved")
    stage = max(stage_memory(plan), key=lambda stage: stage.peak)
    lines = printed(plan, 100)
    (start,) = [i for i, line in enumerate(lines) if line.startswith("memory of a rank")]
    assert f"of stage {stage.stage}, the fullest of 4 [GiB]" in lines[start]

    def numbers(name: str) -> list[float]:
        (line,) = [line for line in lines[start:] if line.startswith(f"{name} ")][:1]
        return [float(each) for each in line.removeprefix(name).split()[: len(stage.phases)]]

    held = [stage.held(phase) / 2**30 for phase in stage.phases]
    assert numbers("together") == pytest.approx(held, abs=0.006)
    assert numbers("headroom") == pytest.approx([143771 / 1024 - each for each in held], abs=0.006)
    assert stage.phases[0] == START
    assert numbers("weights")[0] == pytest.approx(stage.bytes_of("weights") / 2**30, abs=0.006)


def test_print_table_cuts_reasons_and_never_names():
    rows = [("parameters gathered ahead", "1.00", "a reason " * 20)]
    table = Table("memory", ("item", "update", "how it is counted"), rows, ("update",))

    def lines(in_full: bool) -> list[str]:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            print_table(table, console, in_full)
        return capture.get().splitlines()

    short = lines(False)
    full = lines(True)
    (line,) = [line for line in short if line.startswith("parameters gathered ahead  ")]
    assert len(line) <= 100 and line.rstrip().endswith("…")
    assert len(full) > len(short) and "…" not in "".join(full)


def test_time_table_has_every_cost():
    time = Summary(plan_of("glm47")).time
    assert time is not None
    shown = "\n".join(printed(plan_of("glm47"), 100))
    for cost in time.costs:
        assert f"  {cost.name}" in shown and duration(time.seconds(cost.phase)) in shown


def test_verdicts_answer_whether_it_holds_fits_and_runs():
    def answers(name: str, *overrides: str) -> dict[str, str]:
        return {each.answer: each.tone for each in Summary(plan_of(name, *overrides)).verdicts}

    whole = answers("glm47")
    assert [whole[each] for each in ("consistent", "fits", "runs")] == ["good"] * 3
    assert answers("glm47", "hardware.gpu=null")["memory"] == "plain"
    tiny = Summary(plan_of("tiny"))
    assert tiny.time is None and answers("tiny")["time"] == "plain"
    tiny.limit = tiny.fullest.peak - 2048
    (verdict,) = [each for each in tiny.verdicts if each.tone == "bad"]
    assert verdict.answer == "does not fit" and verdict.detail.endswith(": 2 KiB too much")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0123, "12.3 ms"), (1.1, "1.1 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h")],
)
def test_duration_picks_the_unit(seconds: float, expected: str):
    assert duration(seconds) == expected


def test_amount_has_a_decimal_prefix():
    assert amount(3.2e12, "byte") == "3.2 TB" and amount(2e15, "FLOP") == "2 PFLOP"
    assert amount(48128, "layer") == "48,128 layer"
