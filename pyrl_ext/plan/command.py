"""The command line that commands share which run a plan: CONFIG and overrides."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pyrl_ext.plan.compile import compile_plan
from pyrl_ext.plan.language.errors import ConfigError, fields_of
from pyrl_ext.plan.plan import Plan


def called(module: str) -> str:
    """The command line of ``module``: ``pyrl plan``, or ``python -m pyrl_ext.plan``."""
    by_name = Path(sys.argv[0]).name == "pyrl"
    return f"pyrl {module.rpartition('.')[2]}" if by_name else f"python -m {module}"


def plan_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser of ``CONFIG [section.key=value ...]``."""
    parser = argparse.ArgumentParser(prog=called(module), description=doc)
    parser.add_argument("config", help="the YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set a value")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line; if it is wrong, print why and exit with code 2.

    A key of the config that is written as an option, such as ``--optimizer.lr 1e-6``, is refused
    with the way to write it.
    """
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if not unknown:
        return options
    name, _, value = unknown[0].removeprefix("--").partition("=")
    if unknown[0].startswith("--") and name.split(".")[0] in fields_of():
        if not value:
            value = unknown[1] if len(unknown) > 1 else "VALUE"
        parser.error(f"{unknown[0]}: a key of the config has no dashes. Write {name}={value}")
    parser.error(f"unrecognized arguments: {' '.join(unknown)}")


def _print_error(message: str) -> None:
    print(message, file=sys.stderr)


def parse_plan(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    ranks: int | None = None,
    say: Callable[[str], object] = _print_error,
) -> tuple[argparse.Namespace, Plan | None]:
    """The options and the compiled plan; None if it does not hold, after saying why.

    Args:
        ranks: number of processes of the run; None: unknown
        say: prints the reason
    """
    options = parse(parser, arguments)
    overrides = list(options.overrides)
    if allowed := vars(options).get("allow"):  # an option of `pyrl train`
        overrides.append(f"resume_allow=[{','.join(allowed)}]")
    try:
        plan = compile_plan(options.config, overrides, ranks)
    except ConfigError as error:
        say(str(error))
        return options, None
    if plan.unsupported:
        say("\n".join(f"cannot run: {reason}" for reason in plan.unsupported))
        return options, None
    return options, plan
