"""The compiled plan: ranks and groups as megatron-core makes them, golden plans."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.compile import draft_of, load
from pyrl_ext.plan.language.fields import InvalidField
from pyrl_ext.plan.model import ranks
from pyrl_ext.plan.plan import PartialPlan
from pyrl_ext.plan.rules import state_packages
from pyrl_ext.plan.schema import Parallel
from tests.helpers.configs import REPOSITORY

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
GOLDEN = Path(__file__).with_name("plans")

# Name of a group -> (of experts, the token that megatron's generator knows it by)
MEGATRON = {
    "tp": (False, "tp"),
    "cp": (False, "cp"),
    "dp": (False, "dp"),
    "dp_cp": (False, "dp-cp"),
    "pp": (False, "pp"),
    "ep": (True, "ep"),
    "expt_tp": (True, "tp"),
    "expt_dp": (True, "dp"),
    "mp": (False, "tp-pp"),
    "tp_cp": (False, "tp-cp"),
    "tp_dp_cp": (False, "tp-dp-cp"),
    "tp_ep": (True, "tp-ep"),
    "tp_ep_pp": (True, "tp-ep-pp"),
    "intra_dist_opt": (False, "tp-cp-dp-pp"),
}


@settings(max_examples=60, deadline=None)
@given(*(st.integers(1, 3) for _ in range(4)), st.data())
def test_ranks_and_groups_are_megatrons(dp: int, tp: int, pp: int, cp: int, data: st.DataObject):
    from megatron.core.parallel_state import RankGenerator

    spans = [
        (ep, etp) for ep in range(1, 9) for etp in range(1, 4) if dp * tp * cp % (ep * etp) == 0
    ]
    ep, etp = data.draw(st.sampled_from(spans))
    sizes = Parallel(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    order = "tp-cp-ep-dp-pp"
    edp = dp * tp * cp // (ep * etp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    found = ranks.Grid("llm", 0, sizes).groups
    grid = ranks.Grid("vision", 7, sizes)
    for name, (of_experts, token) in MEGATRON.items():
        theirs = (expert if of_experts else dense).get_ranks(token)
        mine = {grid.groups_of(rank)[name] for rank in grid.ranks}
        assert mine == {tuple(7 + rank for rank in group) for group in theirs}, name
        if len(theirs[0]) == 1 or name in ranks.MORE_GROUPS:
            assert name not in found
        else:
            assert sorted(found[name]) == sorted(map(tuple, theirs)), name
    for rank in ranks.ranks(sizes):  # a coordinate is the place in the group of that axis
        for axis, name in (
            ("tp", "tp"),
            ("dp", "dp"),
            ("pp", "pp"),
            ("ep", "ep"),
            ("edp", "expt_dp"),
        ):
            (group,) = [g for g in found.get(name, [(rank.rank,)]) if rank.rank in g] or [()]
            assert getattr(rank, axis) == group.index(rank.rank)


def test_Grid_counts_its_ranks_from_the_first_one():
    grid = ranks.Grid("vision", 5, Parallel(dp=2, tp=2, pp=3))
    assert [*grid.ranks] == list(range(5, 17))
    for rank in grid.ranks:
        at = grid.place(rank)
        assert (at.rank, at.cp, grid.rank_of(dp=at.dp, tp=at.tp, pp=at.pp)) == (rank, 0, rank)
    assert grid.group(10, "pp") == (6, 10, 14)
    assert grid.group(10, "dp tp") == (9, 10, 11, 12)
    assert grid.group(10, "cp") == (10,)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_compile_plan_gives_the_golden_plan(path: Path, monkeypatch: pytest.MonkeyPatch):
    """`PYRL_WRITE_GOLDEN=1 python -m pytest tests/plan/test_plan.py` writes them anew."""
    monkeypatch.chdir(REPOSITORY)
    # which packages are here is no part of it
    monkeypatch.setattr(state_packages, "package_problems", lambda _: [])
    plan = compile_plan(path).model_copy(update={"source": f"configs/{path.name}"})
    file = GOLDEN / f"{path.stem}.json"
    if os.environ.get("PYRL_WRITE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(plan.to_json())
    assert plan.to_json() == file.read_text(), f"{path.name} compiles to another plan than {file}"
    assert Plan.read(file) == plan


DAMAGED = {
    "[]": "not a saved plan: [], expected a JSON object of the plan's sections",
    "null": "not a saved plan: null, expected a JSON object",
    "3": "not a saved plan: 3, expected a JSON object",
    '"steps"': "not a saved plan: 'steps', expected a JSON object",
    "": "not a saved plan: Expecting value",
    '{"device": "cpu", "steps"': "not a saved plan: Expecting ':' delimiter",
    "\udcff": "not a saved plan: 'utf-8' codec can't decode byte 0xff",
    "{}": "not a plan of this version: device: Field required",
    '{"rollout": [3]}': "not a plan of this version: device: Field required",
    "[" * 100_000: "not a saved plan: ",
}


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:12] or "empty")
def test_read_names_the_file_and_what_is_wrong_with_it(tmp_path: Path, text: str):
    saved = tmp_path / "plan.json"
    saved.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        Plan.read(saved)
    (message,) = str(caught.value).splitlines()
    assert message.startswith(f"{saved}: {DAMAGED[text]}")
    assert message.endswith(
        ". Copy plan.json of one of the run's checkpoints there, or use another run folder"
    )


def test_to_json_is_the_plan_and_what_follows():
    plan = compile_plan(REPOSITORY / "configs/tiny.yaml", ["parallel.tp=2", "parallel.pp=2"])
    tree = json.loads(plan.to_json())
    derived = tree.pop("derived")
    assert tree == plan.model_dump(mode="json")
    assert derived == json.loads(json.dumps(plan.derived))
    assert derived["groups"]["llm"]["pp"] == [[0, 2], [1, 3]]
    assert [[chunk["layers"] for chunk in s] for s in derived["stages"]] == [[[0, 1]], [[2, 3]]]


def test_partial_plan_of_raises_where_a_wrong_field_is_read():
    tree = {"steps": 3, "seed": "x", "parallel": {"tp": 2, "cp": "x"}}
    plan = PartialPlan.of("/a.yaml", tree, {("seed",), ("parallel", "cp")})
    assert (plan.steps, plan.parallel.tp, plan.parallel.dp) == (3, 2, 1)
    for read in (lambda: plan.seed, lambda: plan.parallel.cp, lambda: plan.model, lambda: plan.hf):
        with pytest.raises(InvalidField):
            read()
    plan.learn({"model_type": "qwen3"})
    assert plan.hf == {"model_type": "qwen3"}


def test_partial_plan_changed_computes_again_what_follows():
    plan = draft_of(load(REPOSITORY / "configs/tiny.yaml", ["parallel.pp=2"]))
    assert len(plan.stages) == 2
    other = plan.changed({("parallel", "pp"): 4, ("model", "recompute"): "full"})
    assert (len(other.stages), other.world_size, other.model.recompute) == (4, 4, "full")
    assert (len(plan.stages), plan.parallel.pp, plan.model.recompute) == (2, 2, "none")
