"""The demo's first steps on a GPU in bfloat16 next to the same steps on the CPU in float32.

``python -m benchmarks.gpu.demo [--steps N] [--device cpu]``: both run at the same time. Rows: the
rewards of each step, trainer against engine, and whether the GPU's curve follows the CPU's: in the
last third of the steps it earns at least 70 % as much. The GPU's run ends at the first step whose
log-probs are off the engine's by more than `MISMATCH`: a copy that arrives late shows there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.gpu.jobs import ROOT
from benchmarks.gpu.rows import FAILED, MISSED, OK, note

SHARE = 0.7
MISMATCH = 0.1  # mean of |trainer - engine| [nat]; rounding of bfloat16 is a tenth of it
SHOWN = ("mismatch/k3", "mismatch/abs_mean", "route/agree_topk", "time/step", "time/update")


def start(folder: Path, name: str, *overrides: str) -> subprocess.Popen[bytes]:
    """A run of the demo."""
    command = [sys.executable, "-m", "pyrl_ext.train", str(ROOT / "configs" / "tiny.yaml")]
    more = [f"run={folder / name}", "log.progress=false", "evaluate.every=1000", *overrides]
    return subprocess.Popen([*command, *more], cwd=ROOT)


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    """The steps that the run has written."""
    file = folder / name / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def curve(steps: list[dict[str, float]]) -> list[float]:
    return [round(each["reward"], 4) for each in steps if "reward" in each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = parser.parse_args()
    narrow = ["model.dtype=bfloat16", f"rollout.max_mismatch={MISMATCH}"]
    names = {"cpu": [], given.device + " bf16": [*narrow, f"device={given.device}"]}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        curves = dict[str, list[float]]()
        runs = {
            name: start(folder, name.replace(" ", "-"), f"steps={given.steps}", *overrides)
            for name, overrides in names.items()
        }
        for name, run in runs.items():
            code = run.wait()
            steps = metrics(folder, name.replace(" ", "-"))
            curves[name] = curve(steps)
            last = {key: steps[-1][key] for key in SHOWN if steps and key in steps[-1]}
            state = FAILED if code or not steps else OK
            note(name, state, f"exit status {code}" if code else "", **last, rewards=curves[name])
    (cpu, gpu) = (
        fmean(each[-max(1, len(each) // 3) :]) if each else 0.0 for each in curves.values()
    )
    why = "" if gpu >= SHARE * cpu else f"expected at least {SHARE:.0%} of the CPU's"
    note("the GPU's curve follows the CPU's", MISSED if why else OK, why, cpu=cpu, gpu=gpu)


if __name__ == "__main__":
    main()
