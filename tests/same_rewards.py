"""Compare the rewards of two runs: `python -m tests.same_rewards RUN RUN [--steps N]`.

Samples are drawn with log-probs that differ in rounding, so after many steps one draw turns out
otherwise, and the runs part. The first N steps may not.
"""

import argparse
import sys
from itertools import zip_longest
from pathlib import Path

from pyrl_ext.metrics.sinks import Row, read_rows

LIMIT = 1e-5
NAMES = ("reward", "eval_reward", "loss", "grad_norm", "policy/entropy")


def difference(one: Row, other: Row) -> float:
    """Largest difference of two rows of a step over `NAMES`."""
    pairs = [(one.get(name), other.get(name)) for name in NAMES]
    return max(
        0.0 if a == b else float("inf") if a is None or b is None else abs(a - b) for a, b in pairs
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where the runs part before ``--steps`` steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs=2, type=Path)
    parser.add_argument("--steps", type=int, default=3, help="steps that have to be equal")
    options = parser.parse_args(arguments)
    one, other = (read_rows(run / "metrics.jsonl") for run in options.runs)
    equal = 0
    worst = 0.0
    for a, b in zip_longest(one, other, fillvalue={}):
        if (found := difference(a, b)) > LIMIT:
            break
        equal = equal + 1
        worst = max(worst, found)
    last = [
        next((row["eval_reward"] for row in reversed(rows) if "eval_reward" in row), None)
        for rows in (one, other)
    ]
    print(
        f"{options.runs[0]} and {options.runs[1]}: {equal} of {max(map(len, (one, other)))} rows "
        f"equal within {LIMIT:g} (worst {worst:.1e}); last held-out rewards {last[0]}, {last[1]}"
    )
    return int(equal < options.steps)


if __name__ == "__main__":
    sys.exit(main())
