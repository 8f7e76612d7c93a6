"""Answer held-out prompts with trained weights, and score the responses.

TARGET is a run folder, a checkpoint of one, a Hugging Face folder or an exported adapter. Prompts,
rewards and sampling are those of the run; for the last two, those of --config. One process computes
everything unless parallel is overridden, under torchrun as in training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pyrl_ext.plan.command import called, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: evaluated; 1: failed, with the reason; 2: the plan does not hold."""
    parser = argparse.ArgumentParser(prog=called("pyrl_ext.tools.eval"), description=__doc__)
    parser.add_argument("target", type=Path, help="run, checkpoint, model or adapter folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set a value")
    parser.add_argument("--config", type=Path, help="YAML file, for a model or adapter folder")
    parser.add_argument("--step", type=int, help="of the run's checkpoint; the newest if left out")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=FILE", help="another set of prompts"
    )
    parser.add_argument("--samples", "--n", type=int, help="responses for each prompt")
    parser.add_argument("--temperature", type=float, help="0: greedy")
    parser.add_argument("--pass-k", metavar="K,...", help="k of pass@k, such as 1,8")
    parser.add_argument("--prompts", type=int, help="most held-out prompts")
    parser.add_argument("--out", type=Path, help="folder of results; eval/ in the run folder")
    options = parse(parser, arguments)
    if not options.target.exists():
        print(f"eval: {options.target} does not exist", file=sys.stderr)
        return 2
    from pyrl_ext.tools.evaluation import run  # brings torch and megatron-core

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
