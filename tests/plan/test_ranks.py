"""Data-parallel size from the number of processes, and numbers that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.ranks import ranks_problem
from tests.helpers.configs import SMALL, TINY

ENCODER = Path(__file__).parents[2] / "configs/tiny_vl.yaml"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(TINY.read_text())
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize(
    ("ranks", "overrides", "dp", "note"),
    [
        (4, (), 4, "parallel.dp is left out: 4; the run has 4 processes"),
        (4, ("parallel.tp=2",), 2, "parallel.dp is left out: 2; the run has 4 processes"),
        (4, ("parallel.pp=2", "parallel.cp=2"), 1, "parallel.dp is left out: 1; the run has 4"),
        (4, ("parallel.dp=null",), 4, "parallel.dp is left out: 4"),
        (1, (), 1, "parallel.dp is left out: 1; the run has one process"),
        (None, (), 1, "parallel.dp is left out: 1; torchrun's number of processes decides"),
    ],
)
def test_compile_plan_takes_a_dp_that_is_left_out_from_the_processes(
    small: Path, ranks: int | None, overrides: tuple[str, ...], dp: int, note: str
):
    plan = compile_plan(small, overrides, ranks)
    assert plan.parallel.dp == dp
    assert any(each.startswith(note) for each in plan.notes), plan.notes
    assert Plan.from_json(plan.to_json()).parallel.dp == dp  # a saved plan says what was used


def test_compile_plan_says_for_how_many_processes_experts_can_be_spread(small: Path):
    with pytest.raises(ConfigError, match=r"raise dp to 2; .* pyrl plan --ranks 4$"):
        compile_plan(small, ["parallel.ep=2", "parallel.pp=2"])
    assert compile_plan(small, ["parallel.ep=2", "parallel.pp=2"], 4).parallel.dp == 2


def test_compile_plan_leaves_a_dp_that_is_set(small: Path):
    plan = compile_plan(small, ["parallel.dp=2"], 4)
    assert plan.parallel.dp == 2
    assert not any("left out" in note for note in plan.notes)


def test_compile_plan_drops_the_dp_of_a_parent(small: Path):
    child = small.with_name("child.yaml")
    small.write_text(SMALL + "parallel: {dp: 2, tp: 2}\n")
    child.write_text("extends: small.yaml\nparallel: {dp: null}\n")
    assert compile_plan(child, (), 2).parallel.dp == 1
    assert compile_plan(child, (), 8).parallel.dp == 4


def test_compile_plan_gives_encoders_their_own_ranks_first():
    own = ["modules.vision.ranks=own", "modules.vision.parallel.dp=2"]
    assert compile_plan(ENCODER, own, 5).parallel.dp == 3
    with pytest.raises(ConfigError, match=r"expected a multiple .* after the 2 of the encoders"):
        compile_plan(ENCODER, own, 2)


def test_compile_plan_refuses_a_number_that_no_dp_gives(small: Path):
    with pytest.raises(ConfigError) as caught:
        compile_plan(small, ["parallel.tp=2"], 3)
    assert str(caught.value) == (
        f"{small}:1: parallel: 3 processes, expected a multiple of tp 2 * pp 1 * cp 1 = 2; "
        "parallel.dp is left out, and takes the rest. Start it with torchrun --nproc-per-node 2, "
        "or change tp, pp or cp"
    )


def test_ranks_problem_names_both_ways_out(small: Path):
    plan = compile_plan(small, ["parallel.dp=2"])
    assert ranks_problem(plan, 2) is None
    assert ranks_problem(plan, 3) == (
        "parallel: dp 2 * tp 1 * pp 1 * cp 1 = 2 processes, but the run has 3. Start it with "
        "torchrun --nproc-per-node 2, or leave parallel.dp out or set parallel.dp=3"
    )
    odd = compile_plan(small, ["parallel.tp=2"])
    assert str(ranks_problem(odd, 3)).endswith(
        "or change tp, pp or cp: no dp makes up for the difference"
    )


def test_main_plans_for_a_number_of_processes(small: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(small), "--ranks", "2", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).parallel.dp == 2
    assert main([str(small), "--ranks", "2", "parallel.dp=4"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("command line: --ranks 2: parallel: dp 4 * tp 1 * pp 1 * cp 1 = 4 ")
    with pytest.raises(SystemExit):
        main([str(small), "--ranks", "0"])
    assert "'0', expected a whole number of at least 1" in capsys.readouterr().err
