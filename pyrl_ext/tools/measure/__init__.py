"""Predicted against measured: ``python -m pyrl_ext.tools.measure CONFIG [key=value ...] [--json]``.

Steps of the plan run on the device at hand, under torchrun as `train` does; nothing is written. A
config that does not hold is refused in a second, before torch is imported.
"""

from collections.abc import Sequence

from pyrl_ext.plan.command import parse_plan, plan_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: measured; 1: failed, with the reason; 2: the plan does not hold."""
    parser = plan_parser("pyrl_ext.tools.measure", __doc__)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options, plan = parse_plan(parser, arguments)
    if plan is None:
        return 2
    from pyrl_ext.tools.measure.steps import start  # brings torch and megatron-core

    return start(plan, options.json)
