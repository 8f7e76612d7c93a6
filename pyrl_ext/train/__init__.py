"""``python -m pyrl_ext.train CONFIG [section.key=value ...]``: compile the plan and run it.

A config that does not hold is refused in a second, before torch is imported.
"""

from collections.abc import Sequence

from pyrl_ext.plan.command import parse_plan, plan_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: the last step is done; 1: failed, with the reason; 2: the plan does not hold;
    130: Ctrl-C."""
    _, plan = parse_plan(plan_parser("pyrl_ext.train", __doc__), arguments)
    if plan is None:
        return 2
    from pyrl_ext.train.loop import start  # brings torch and megatron-core

    return start(plan)
