"""Compile a plan's Triton kernels: ``python -m pyrl_ext.tools.prebuild CONFIG --into FOLDER``.

A config that does not hold is refused in a second, before torch is imported.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.command import plan_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: built; 2: the plan does not hold, or its kernels cannot be built here
    or written there."""
    parser = plan_parser("pyrl_ext.tools.prebuild", __doc__)
    parser.add_argument("--into", required=True, type=Path, metavar="FOLDER")
    options = parser.parse_intermixed_args(arguments)
    try:  # a plan may be built that does not run yet
        plan = compile_plan(options.config, options.overrides)
        from pyrl_ext.tools.prebuild.kernels import build  # brings torch and Triton

        build(plan, options.into)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"prebuild: {error}, expected --into a folder to write to", file=sys.stderr)
        return 2
    return 0
