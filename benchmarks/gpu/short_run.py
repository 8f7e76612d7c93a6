"""A short run on several ranks of this host, its time by phase next to the plan's.

``python -m benchmarks.gpu.short_run --ranks 8 [--layers 4] [--plan] CONFIG [key=value ...]``

Rows: seconds of each phase of the last step, the plan's estimate, and their ratio; then routes,
mismatch and peak memory. With ``--plan`` the plan alone: no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import ROOT
from benchmarks.gpu.rows import FAILED, FOLDER, OK, note
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.step_time import step_time

SHOWN = ("mismatch/abs_mean", "mismatch/k3", "route/agree_topk", "route/coverage", "memory/peak")


def narrowed(config: Path, layers: int, folder: Path) -> list[str]:
    """Overrides for the config's model with so many layers, the first dense."""
    plan = compile_plan(config, [])
    hf = json.loads((config.parent / plan.model.config).read_text(encoding="utf-8"))
    hf |= {"num_hidden_layers": layers, "first_k_dense_replace": 1}
    path = folder / "config.json"
    path.write_text(json.dumps(hf))
    return [f"model.config={path}"]


def metrics_of(run: Path) -> list[dict[str, float]]:
    """The rows of the steps that a run has written."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "time/step" in row]


def note_plan(plan: Plan) -> None:
    """Rows of the plan's time and memory."""
    memory = max(stage.peak for stage in stage_memory(plan))
    note("plan: memory", planned_GiB=memory / 2**30)
    estimate = step_time(plan)
    if estimate is None:
        return
    for phase in dict.fromkeys(cost.phase for cost in estimate.costs):
        note(f"plan: {phase}", planned_s=estimate.seconds(phase))


def note_phases(plan: Plan, last: dict[str, float]) -> None:
    """Rows of the last step's phases; with a GPU in the plan, next to its estimate."""
    estimate = step_time(plan)
    planned = dict[str, float]()
    for cost in estimate.costs if estimate else ():
        planned[cost.phase] = planned.get(cost.phase, 0.0) + cost.seconds
    for name, seconds in last.items():
        if not name.startswith("time/"):
            continue
        numbers: dict[str, Any] = {"s": seconds}
        if expected := planned.get(name.removeprefix("time/")):
            numbers |= {"planned_s": expected, "times_planned": seconds / expected}
        note(name, **numbers)
    shown: dict[str, Any] = {name: last[name] for name in SHOWN if name in last}
    note("numbers of the last step", **shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--layers", type=int, help="of the model; all of its layers if left out")
    parser.add_argument("--plan", action="store_true", help="the plan alone")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    config = ROOT / given.config
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        overrides = list(given.overrides)
        if given.layers:
            overrides += narrowed(config, given.layers, folder)
        # in the report's folder a run outlives this job, with what torch's profiler wrote
        kept = Path(os.environ[FOLDER], "runs", str(os.getpid())) if FOLDER in os.environ else None
        run = kept or folder / "run"
        overrides += [f"run={run}", "log.progress=false"]
        plan = compile_plan(config, overrides)
        if plan.world_size != given.ranks:
            parser.error(f"--ranks: {given.ranks}, expected {plan.world_size}, those of the plan")
        note_plan(plan)
        if given.plan:
            return 0
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(given.ranks), "-m", "pyrl_ext.train"]
        code = subprocess.run([sys.executable, *launcher, str(config), *overrides]).returncode
        steps = metrics_of(run)
        complete = code == 0 and len(steps) == plan.steps
        why = f"exit status {code}, {len(steps)} of {plan.steps} steps"
        state = OK if complete else FAILED
        note("run", state, "" if complete else why, steps=len(steps), folder=str(run))
        if steps:
            note_phases(plan, steps[-1])
    return code


if __name__ == "__main__":
    sys.exit(main())
