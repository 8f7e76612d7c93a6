"""`python -m benchmarks.plan`: processor seconds that the plan command takes for each config."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"
RUNS = 5


def seconds(config: Path) -> float:
    """Processor time of one run of the command, in a process that has ended."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pyrl_ext.plan", str(config)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a table: the least and the middle of several runs."""
    print(f"| config | least [s] | median of {RUNS} [s] |\n| --- | ---: | ---: |")
    for config in sorted(CONFIGS.glob("*.yaml")):
        taken = sorted(seconds(config) for _ in range(RUNS))
        print(f"| {config.stem} | {taken[0]:.2f} | {taken[RUNS // 2]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
