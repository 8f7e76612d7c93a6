"""Alarms of a step in plain words, and of a run with their steps."""

import math

from pyrl_ext.metrics.alarms import alarming, alarms, problems, worst_of
from pyrl_ext.metrics.history import RunHistory, columns


def test_alarms_name_the_steps_outside_the_band():
    rows = [{"step": n, "grad_norm": 1.0, "route/agree_topk": 0.95} for n in range(8)]
    for step, row in enumerate(rows):
        row["mismatch/abs_mean"] = {2: 0.05, 3: 0.2, 5: 0.04}.get(step, 1e-3)
    rows[7]["route/agree_topk"] = 0.8
    rows[4]["grad_norm"] = math.nan
    found = alarms(columns(RunHistory("a", rows)))
    assert [(a.name, a.level, a.still, a.steps) for a in found] == [
        ("route/agree_topk", "warn", True, 1),
        ("grad_norm", "alarm", False, 1),
        ("mismatch/abs_mean", "alarm", False, 1),
    ]
    words = [alarm.words for alarm in found]
    assert words[0] == "0.8 (warn below 0.9) at step 7; outside at step 7"
    assert words[1] == "nan at step 4; outside at step 4"
    assert words[2] == "0.2 (alarm above 0.1) at step 3; outside at step 3"
    assert [alarm.problem for alarm in found] == [
        "routers agree on 80 % of experts",
        "not finite",
        "trainer and engine disagree",
    ]


def test_worst_of_has_one_alarm_for_each_problem_alarms_first():
    rows = [{"step": n, "rollout/truncated": 0.5, "mismatch/k3": 1.0} for n in range(3)]
    rows[0] |= {"mismatch/f2": 1.0, "rollout/flat_groups": 1.0, "lr": math.inf}
    found = worst_of(alarms(columns(RunHistory("a", rows))))
    assert [found[0].name, found[-1].name] == ["mismatch/k3", "rollout/truncated"]
    assert {a.name for a in found[1:-1]} == {"rollout/flat_groups", "lr"}


def test_problems_are_those_of_the_alarm_level_each_once():
    row = {"step": 3, "reward": 0.5, "rollout/truncated": 0.9219, "rollout/flat_groups": 0.9}
    assert alarming(row) == ["rollout/truncated"] and problems(row) == ["92.2 % truncated"]
    row |= {"mismatch/k3": 1.0, "mismatch/f2": 0.5, "route/coverage": 0.5}
    found = ["92.2 % truncated", "trainer and engine disagree", "rows without routes"]
    assert problems(row) == found
    row |= {"loss": math.nan, "my_metric": math.inf}
    assert problems(row) == ["loss is nan and 1 more", *found]
    assert problems({"step": 0, "my_metric": 1e9}) == []
