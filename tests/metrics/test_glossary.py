"""The glossary: one definition for each metric that a run logs, and for no other."""

import json
import math
import re
from pathlib import Path

import pytest

from pyrl_ext.metrics import report
from pyrl_ext.metrics.glossary import GLOSSARY, RENAMED, check_names, lookup, page
from pyrl_ext.metrics.rollout_metrics import AGE_METRICS, SERVER_METRICS, SOURCE_METRICS
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.heartbeat import heartbeats
from pyrl_ext.plan import Plan
from pyrl_ext.plan.schema import REWARD_REASONS
from pyrl_ext.plan.schema.turns import REASONS
from pyrl_ext.train.loop import train
from tests.helpers import teachers
from tests.helpers.tiny import CONFIG, QUICK, tiny_plan

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
# logged only by an engine that shares the trainer's GPU, and with objective.kl_in: reward; by
# remote engines, tests/rollout/remote/test_engine.py
ELSEWHERE = {
    "rollout/tokens_per_pass",  # tests/rollout/vllm/test_speculation.py
    *(metric.name for metric in SERVER_METRICS),
    *(metric.name for metric in AGE_METRICS),  # tests/rollout/test_async_rollouts.py
    *(metric.name for metric in SOURCE_METRICS),  # tests/train/test_sources.py
    "memory/engine_slept",
    "reward/kl",
    "reward/<name>",
    # next to rollout.oversample a rule refuses them: tests/rollout/test_dynamic_sampling.py
    "rollout/flat_groups_kept",
    "rollout/refills",
    "rollout/dropped_groups",
    "rollout/dropped_tokens",
    "rollout/reward_all",
    # of trajectories that were all dropped: tests/rollout/test_evaluation.py
    "eval_dropped",
    "eval/<name>/dropped",
}


def test_glossary_defines_each_metric_once_with_formula_and_unit():
    for name, metric in GLOSSARY.items():
        assert metric.name == name and metric.unit
        assert metric.definition.endswith(".") and metric.definition.count(". ") == 0
        assert metric.band is None or metric.band[0] != metric.band[1]
        assert (metric.band is None) == (metric.problem == "")


def test_check_names_lists_all_unknown_ones():
    with pytest.raises(ValueError, match=r"\['mismatch/k4', 'route/agree_topk/layer_x'\]"):
        check_names(["reward", "mismatch/k4", "route/agree_topk/layer_x", "mismatch/k3"])
    metric = lookup("route/agree_topk/layer_7")
    assert metric is not None and metric.name == "route/agree_topk/layer_<id>"


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("mismatch/f2", 1e-5, "ok"),
        ("mismatch/f2", 0.05, "warn"),
        ("mismatch/f2", 0.2, "alarm"),
        ("mismatch/ess", 0.99, "ok"),
        ("mismatch/ess", 0.8, "warn"),
        ("mismatch/ess", 0.1, "alarm"),
        ("mismatch/nonfinite", 0, "ok"),
        ("mismatch/nonfinite", 1, "alarm"),
        ("reward", -1e9, "ok"),
        ("reward", math.nan, "alarm"),
    ],
)
def test_level_compares_with_the_band(name, value, level):
    assert GLOSSARY[name].level(value) == level


def test_lookup_knows_the_names_of_earlier_versions():
    for old, new in RENAMED.items():
        assert lookup(old) is GLOSSARY[new] and old not in GLOSSARY
    check_names([*report.PHASES, *report.MEANS, *RENAMED])


def rewarded(folder: Path) -> Plan:
    """With a reward in a worker, and most parts of the objective."""
    (folder / "sums.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 2)
    reward = "pyrl_ext.data.rewards:number_match"
    config = json.loads((CONFIG.parent / "tiny/config.json").read_text())
    config |= {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    plan = tiny_plan(
        f"model.config={folder / 'config.json'}",
        "model.mtp=true",
        f"run={folder / 'run'}",
        *QUICK,
        "steps=2",
        "data.task=null",
        "data.task_options={}",
        "data.prompts=data/arithmetic.jsonl",
        "data.reward=tests.helpers.user_rewards:number_match",
        "evaluate.every=1",
        "checkpoint.every=1",
        "batching.epochs=2",
        "rollout.oversample=1.75",
        "objective.kl_coef=0.1",
        "objective.tis_cap=2",
        "objective.entropy_coef=0.01",
        "rollout.top_p=0.95",
        f"evaluate.sets={{sums: {{file: {folder / 'sums.jsonl'}, reward: '{reward}'}}}}",
        "objective.mask_ratio=[0.1,9.0]",
        "objective.sequence_bounds=[0.1,9.0]",
        "objective.veto=1e-6",
        "objective.opsm=1.0",
        "objective.overlong_buffer=2",
    )
    # a rule refuses it on a CPU, where it serves no purpose
    rollout = plan.rollout.model_copy(update={"offload_trainer": "all"})
    return plan.model_copy(update={"rollout": rollout})


def tuned(folder: Path) -> Plan:
    """Of fine-tuning."""
    return tiny_plan(
        "steps=2",
        "batching.samples=4",
        "data.held_out=2",
        "evaluate.every=1",
        "log.progress=false",
        f"run={folder / 'sft'}",
        config=CONFIG.with_name("tiny_sft.yaml"),
    )


def merged(folder: Path) -> Plan:
    """Of merged adapters in an environment, with a teacher of sampled tokens."""
    return tiny_plan(
        "steps=2",
        "batching.prompts=2",
        "batching.samples_per_prompt=2",
        "evaluate.every=1",
        "log.progress=false",
        f"run={folder / 'turns'}",
        "lora.rank=8",
        "lora.alpha=16",
        "lora.publish=merge",
        f"teacher.model={folder / 'teacher'}",
        "objective.distill_coef=0.1",
        config=CONFIG.with_name("tiny_turns.yaml"),
    )


def compared(folder: Path) -> Plan:
    """With a teacher of whole distributions."""
    return tiny_plan(
        *QUICK,
        "steps=1",
        "evaluate.every=0",
        f"run={folder / 'compared'}",
        f"teacher.model={folder / 'teacher'}",
        "objective.distill_coef=0.1",
        "objective.distill=js",
    )


def test_glossary_holds_what_a_run_logs_and_nothing_else(tmp_path):
    """One or two steps of runs that together log every metric."""
    teachers.write_dense(tmp_path / "teacher")
    logged = {f"turns/dropped/{reason}" for reason in REASONS}  # only those that happen are logged
    logged |= {f"scoring/dropped/{reason}" for reason in REWARD_REASONS}
    for each in (rewarded(tmp_path), tuned(tmp_path), merged(tmp_path), compared(tmp_path)):
        with topology.start(each) as topo, heartbeats(topo) as heartbeat:
            assert train(each, topo, heartbeat)
        logged |= {name for row in read_rows(Path(each.run) / "metrics.jsonl") for name in row}
    logged = {re.sub(r"/layer_\d+$", "/layer_<id>", name) for name in logged}
    logged = {re.sub(r"^eval/\w+/", "eval/<name>/", name) for name in logged}
    logged = {re.sub(r"@\d+", "@<id>", name) for name in logged}
    assert logged | ELSEWHERE == GLOSSARY.keys()


def test_page_is_the_one_in_docs():
    """`python -m pyrl_ext.metrics.glossary > docs/metrics.md` writes it anew."""
    assert (ROOT / "docs/metrics.md").read_text() == page()
