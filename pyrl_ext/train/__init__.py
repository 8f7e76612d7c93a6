"""Compile the plan of a config and run it.

A config that does not hold is refused in a second, before torch is imported.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType

from pyrl_ext.parallel.launch import launched, refuse
from pyrl_ext.plan import Plan
from pyrl_ext.plan.command import parse_plan, plan_parser
from pyrl_ext.plan.ranks import ranks_problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: the last step is done; 1: failed, with the reason; 2: the plan does not hold,
    or not on this machine or in this number of processes; 130: Ctrl-C."""
    try:
        ranks = launched("WORLD_SIZE", 0)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options, plan = parse_arguments(arguments, ranks or None, refuse)
    if plan is None:
        return 2
    if plan.device == "cuda" and (problem := missing_gpu(plan, options.config)):
        return refuse(problem)
    if problem := ranks_problem(plan, ranks or 1):
        return refuse(f"{options.config}: {problem}")
    with _sigterm_said():
        from pyrl_ext.train.loop import start  # brings torch and megatron-core

        return start(plan)


@contextmanager
def _sigterm_said() -> Generator[None]:
    """Say that SIGTERM ended the process, where nothing in the block handles the signal."""

    def end(number: int, _frame: FrameType | None) -> None:
        print(
            "pyrl_ext.train: ended by SIGTERM before the first step or after the last one",
            file=sys.stderr,
            flush=True,
        )
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parse_arguments(
    arguments: Sequence[str] | None, ranks: int | None, say: Callable[[str], object]
) -> tuple[argparse.Namespace, Plan | None]:
    """The options and the compiled plan; None if it does not hold, after saying why.

    Args:
        ranks: number of processes of the run; None: unknown
        say: prints the reason
    """
    parser = plan_parser("pyrl_ext.train", __doc__)
    help_text = "keys that may change when the run is resumed: sets resume_allow"
    parser.add_argument("--allow", action="append", metavar="KEY[,KEY...]", help=help_text)
    return parse_plan(parser, arguments, ranks, say)


def missing_gpu(plan: Plan, config: str) -> str | None:
    """What to do where torch sees no GPU for a plan that needs one; None: it sees some."""
    import torch  # takes seconds, which a plan for CPUs waits for later

    if torch.cuda.is_available():
        return None
    wanted = f"{plan.world_size} x {plan.hardware.gpu or 'GPU'}"
    return (
        f"{config}: device: cuda, {wanted} wanted, but torch sees no GPU on this machine.\n"
        f"  To see what the run would need: pyrl plan {config}\n"
        "  To try the trainer on this machine: pyrl configs --copy tiny, then "
        "pyrl train configs/tiny.yaml"
    )
