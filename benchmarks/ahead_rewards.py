"""``python -m benchmarks.ahead_rewards FOLDER [KEY=VALUE ...]``: what older samples teach.

The demo over two servers, with rollout.ahead 0, 1 and 2 and three seeds each, 200 steps; with ahead
the ratio compares with the engine's log-probs (`objective.anchor: rollout`). Runs that FOLDER has
are not run again. Prints when the held-out reward first reached a level and what it is at the end,
and draws its curves (``--png``). Nine runs take 20 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.ahead import served, train_in
from pyrl_ext.metrics.sinks import read_rows

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
AHEAD = (0, 1, 2)
SEEDS = (0, 1, 2)
STEPS = 200
EVERY = 10
# held-out reward; evaluations at the end
LEVELS = (0.8, 0.9)
LAST = 5
COMMON = ("threads=1", f"steps={STEPS}", f"evaluate.every={EVERY}", "log.progress=false")
CORRECTION = "objective.anchor=rollout"
COLOURS = ("#0072B2", "#D55E00", "#009E73")

Curve = Mapping[int, float]  # step -> held-out reward


def curve_of(run: Path) -> Curve:
    """The held-out rewards of a run; none if it is not there."""
    file = run / "metrics.jsonl"
    rows = read_rows(file) if file.exists() else []
    return {int(row["step"]): row["eval_reward"] for row in rows if "eval_reward" in row}


def run_all(folder: Path, given: Sequence[str] = ()) -> dict[int, list[Curve]]:
    """ahead -> the curve of each seed; those that are missing are trained first."""
    wanted = {(a, s): folder / f"ahead-{a}-seed-{s}" for a in AHEAD for s in SEEDS}
    missing = {key: run for key, run in wanted.items() if STEPS not in curve_of(run)}
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with served(folder, COMMON, CONFIG) as servers:
            for (ahead, seed), run in missing.items():
                more = [CORRECTION] if ahead else []
                keys = (*COMMON, *given, *more, servers, f"rollout.ahead={ahead}", f"seed={seed}")
                train_in(run, *keys, config=CONFIG)
                print(f"{run.name}: {curve_of(run)[STEPS]:.3f}", flush=True)
    return {a: [curve_of(wanted[a, seed]) for seed in SEEDS] for a in AHEAD}


def reached(curve: Curve, level: float) -> int | None:
    """The first evaluation at which the reward was at least that."""
    return next((step for step, reward in sorted(curve.items()) if reward >= level), None)


def at_end(curve: Curve) -> float:
    """The mean of the last evaluations."""
    return statistics.mean(curve[step] for step in sorted(curve)[-LAST:])


def mean_of(seeds: Sequence[Curve]) -> Curve:
    """The mean of several curves."""
    steps = sorted(set.intersection(*(set(curve) for curve in seeds)))
    return {step: statistics.mean(curve[step] for curve in seeds) for step in steps}


def show(curves: Mapping[int, Sequence[Curve]]) -> None:
    """Print the table."""
    which = f"seed {' '.join(map(str, SEEDS))}; their mean"
    heads = " | ".join(f"steps to {level}, {which}" for level in LEVELS)
    print(f"| ahead | {heads} | mean of the last {LAST} | of the seeds |")
    print("| ---: " * (len(LEVELS) + 3) + "|")
    for ahead, seeds in curves.items():
        each = (*seeds, mean_of(seeds))
        steps = [[reached(curve, level) for curve in each] for level in LEVELS]
        named = [["-" if step is None else str(step) for step in row] for row in steps]
        cells = ["; ".join((", ".join(row[:-1]), row[-1])) for row in named]
        ends = [at_end(curve) for curve in seeds]
        last = ", ".join(f"{end:.2f}" for end in ends)
        print(f"| {ahead} | {' | '.join(cells)} | {last} | {statistics.mean(ends):.3f} |")


def draw(curves: Mapping[int, Sequence[Curve]], png: Path) -> None:
    """The seeds of each value thin, their mean thick."""
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (ahead, seeds), colour in zip(curves.items(), COLOURS, strict=True):
        for curve in seeds:
            axes.plot(*zip(*sorted(curve.items())), color=colour, lw=0.8, alpha=0.45)
        axes.plot(*zip(*mean_of(seeds).items()), color=colour, lw=2.2, label=f"ahead {ahead}")
    axes.set(xlabel="step", ylabel="held-out reward", ylim=(0, 1))
    axes.set_title("thin: each of three seeds; thick: their mean", loc="left", fontsize=9)
    axes.grid(alpha=0.3, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(png)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.ahead_rewards", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("keys", nargs="*", help="further keys of all runs, section.key=value")
    parser.add_argument("--png", type=Path, help="file for the picture")
    options = parser.parse_intermixed_args(arguments)
    curves = run_all(options.folder, options.keys)
    show(curves)
    if options.png is not None:
        draw(curves, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
