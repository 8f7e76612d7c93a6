"""`python -m pyrl_ext.plan CONFIG [section.key=value ...]`: check a plan and show it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from pyrl_ext.plan.command import called
from pyrl_ext.plan.compile import compile_plan, load
from pyrl_ext.plan.language.errors import ConfigError
from pyrl_ext.plan.plan import Plan

if TYPE_CHECKING:
    from pyrl_ext.plan.forecast.strategies import Comparison
    from pyrl_ext.plan.show.html.sections import Block


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: the plan holds; 2: it does not, and stderr has a problem a line."""
    parser = argparse.ArgumentParser(prog=called("pyrl_ext.plan"), description=__doc__)
    parser.add_argument("config", nargs="?", help="the YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set a value")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--suggest", metavar="8xH200", help="the fastest plans for these GPUs")
    parser.add_argument("--scale", action="store_true", help="what grows with the ranks")
    parser.add_argument("--calibrate", metavar="REPORT", help="rates that make gpu measured")
    parser.add_argument("--lengths", metavar="FILE", help="schedules of samples of given lengths")
    parser.add_argument("--explain", metavar="KEY", help="what a key or section means, and is")
    parser.add_argument("--schema", action="store_true", help="print a JSON Schema for editors")
    parser.add_argument("--reference", action="store_true", help="print the page of all keys")
    parser.add_argument("--all", action="store_true", help="every field, not only what is set")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures as well")
    options = parser.parse_intermixed_args(arguments)
    if not (options.config or options.explain or options.schema or options.reference):
        parser.error("expected a config, --explain KEY, --schema or --reference")
    try:
        if options.explain or options.schema or options.reference:
            return _document(options)
        if options.suggest is not None:
            from pyrl_ext.plan.show.suggestions import print_suggestions

            with _rates(options, None):
                return print_suggestions(options.config, options.overrides, options.suggest)
        plan = compile_plan(options.config, options.overrides)
        with _rates(options, plan):
            return _answer(plan, options)
    except ConfigError as error:
        red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        for line in str(error).splitlines():
            print(f"{red}{line}{plain}", file=sys.stderr)
        _write_page(options.html, error)
        return 2


def _rates(options: argparse.Namespace, plan: Plan | None) -> AbstractContextManager[None]:
    """Let estimates take the rates of a report; the GPU is the plan's, or that of `--suggest`."""
    if options.calibrate is None:
        return nullcontext()
    from pyrl_ext.plan.forecast.hardware import parse_gpus
    from pyrl_ext.plan.forecast.measured import read_report, using

    try:
        gpu = plan.hardware.gpu if plan else parse_gpus(options.suggest)[1]
    except ValueError:  # `print_suggestions` refuses it
        return nullcontext()
    return using(read_report(options.calibrate, gpu))


def _answer(plan: Plan, options: argparse.Namespace) -> int:
    """Write the page, and do what else the options ask for; the exit code."""
    comparison = _comparison(plan, options.lengths)
    if not _write_page(options.html, plan, _blocks(plan, options, comparison)):
        return 2
    if options.json:
        print(plan.to_json(), end="")
        return 0
    _print(plan, options, comparison)
    return 0


def _print(plan: Plan, options: argparse.Namespace, comparison: Comparison | None) -> None:
    """Print the tables that the options ask for, or the plan."""
    # rich costs a tenth of a second that --json and errors need not wait for
    from rich.console import Console

    if options.scale:
        from pyrl_ext.plan.show.scale import print_scale

        print_scale(plan, Console())
    if comparison:
        from pyrl_ext.plan.show.strategies import print_strategies

        print_strategies(comparison, options.lengths, Console())
    if not (options.scale or comparison):
        from pyrl_ext.plan.show.terminal import print_plan

        print_plan(plan, Console(), everything=options.all)


def _document(options: argparse.Namespace) -> int:
    """Print what the schema says; a config is only needed for the values in it."""
    if options.explain:
        from rich.console import Console

        from pyrl_ext.plan.show.explain import explain

        source = load(options.config, options.overrides) if options.config else None
        explain(options.explain, source, Console())
        return 0
    from pyrl_ext.plan.show import keys_page

    print(keys_page.schema() if options.schema else keys_page.page(), end="")
    return 0


def _comparison(plan: Plan, path: str | None) -> Comparison | None:
    """The schedules of the lengths in a file. Raises `ConfigError` if it holds something else."""
    if path is None:
        return None
    from pyrl_ext.plan.show.strategies import compare

    return compare(plan, path)


def _blocks(plan: Plan, options: argparse.Namespace, found: Comparison | None) -> list[Block]:
    """Sections that the options add to the page."""
    if options.html is None:
        return []
    blocks: list[Block] = []
    if options.scale:
        from pyrl_ext.plan.show.scale import scale_block

        blocks.append(scale_block(plan))
    if found:
        from pyrl_ext.plan.show.strategies import strategies_block

        blocks.append(strategies_block(found, options.lengths))
    return blocks


def _write_page(
    path: str | None, content: Plan | ConfigError, blocks: Sequence[Block] = ()
) -> bool:
    """Write the page of a plan or of its problems, if one is asked for; whether that went well."""
    if path is None:
        return True
    from pyrl_ext.plan.show.html.page import write_page

    try:
        write_page(path, content, blocks)
    except OSError as error:
        message = f"{error.strerror or error}, expected a file that can be written"
        print(f"command line: --html {path}: {message}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
