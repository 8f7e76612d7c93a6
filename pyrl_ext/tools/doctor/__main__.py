"""``pyrl doctor [CONFIG [section.key=value ...]]``: say what this machine has and allows.

With a config it also says whether the machine can run the plan; under torchrun, on all hosts at
once, what differs between them and how fast their groups communicate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyrl_ext.tools.doctor.facts import facts_of_host
from pyrl_ext.tools.doctor.features import features


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: nothing stands in the way; 1: something does; 2: the plan does not hold.

    What is imported here may be missing on a machine that needs a doctor: the rest comes later.
    """
    options = _parser().parse_intermixed_args(arguments)
    facts = facts_of_host()
    report: dict[str, Any] = {"facts": facts, "features": features(facts), "checks": ()}
    lacking = [f for f in report["features"] if f.required and f.missing]
    problems = [f"{each.name}: {'; '.join(each.missing)}. {each.get}" for each in lacking]
    if options.config and "error" not in facts["plans"]:
        from pyrl_ext.plan import ConfigError, compile_plan
        from pyrl_ext.tools.doctor.checks import checks, launched_ranks

        try:
            plan = compile_plan(options.config, options.overrides)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        report["checks"] = checks(plan, facts, report["features"])
        problems += [f"{each.name}: {each.problem}" for each in report["checks"] if each.problem]
        if launched_ranks() == plan.world_size > 1 and not lacking:
            from pyrl_ext.tools.doctor.hosts import compare_hosts  # brings torch

            report["hosts"] = compare_hosts(plan, facts, problems)
            problems = list(report["hosts"].problems)
    if os.environ.get("RANK", "0") != "0":
        return 0  # the first rank's exit code says it; torchrun ends all when another fails first
    _print(report, problems, options.json)
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    by_name = Path(sys.argv[0]).name == "pyrl"  # plan.command.called needs pydantic
    prog = "pyrl doctor" if by_name else "python -m pyrl_ext.tools.doctor"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("config", nargs="?", help="the YAML file of a plan")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set a value")
    parser.add_argument("--json", action="store_true", help="print all of it for a script")
    return parser


def _print(report: dict[str, Any], problems: Sequence[str], as_json: bool) -> None:
    """Tables, or JSON where it is asked for or what draws tables is missing, too."""
    if not as_json:
        try:
            from pyrl_ext.tools.doctor.show import show

            return show(report, problems)
        except ImportError as error:
            print(f"no tables: {error}", file=sys.stderr)
    print(json.dumps({**report, "problems": problems}, default=asdict, indent=2))


if __name__ == "__main__":
    sys.exit(main())
