"""Check a config and show its plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pyrl_ext.plan.command import called, parse
from pyrl_ext.plan.compile import compile_plan
from pyrl_ext.plan.language.errors import ConfigError, Problem
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.ranks import ranks_problem

_FILE_WIDTH = 160  # characters of a line that goes to a file or to another program


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: the plan holds; 2: it does not, and stderr has a problem a line."""
    parser = argparse.ArgumentParser(prog=called("pyrl_ext.plan"), description=__doc__)
    parser.add_argument("config", nargs="?", help="the YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set a value")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--ranks", type=_count, metavar="N", help="processes, if dp is left out")
    parser.add_argument("--suggest", metavar="8xH200", help="the fastest plans for these GPUs")
    parser.add_argument("--schema", action="store_true", help="print a JSON Schema for editors")
    parser.add_argument("--reference", action="store_true", help="print the page of all keys")
    parser.add_argument("--all", action="store_true", help="every field, not only what is set")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures as well")
    options = parse(parser, arguments)
    if options.schema or options.reference:
        from pyrl_ext.plan.show import reference

        print(reference.schema() if options.schema else reference.page(), end="")
        return 0
    if not options.config:
        parser.error("expected a config, --schema or --reference")
    try:
        return _answer(options)
    except ConfigError as error:
        red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        for line in str(error).splitlines():
            print(f"{red}{line}{plain}", file=sys.stderr)
        _write_page(options.html, error)
        return 2


def _count(text: str) -> int:
    """`text` as a number of processes. Raises `ArgumentTypeError` where it is none."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    return int(text)


def _answer(options: argparse.Namespace) -> int:
    """Do what the options ask for; the exit code."""
    if options.suggest is not None:
        from pyrl_ext.plan.show.suggestions import print_suggestions

        return print_suggestions(options.config, options.overrides, options.suggest)
    plan = compile_plan(options.config, options.overrides, options.ranks)
    if options.ranks is not None and (problem := ranks_problem(plan, options.ranks)):
        raise ConfigError([Problem(f"command line: --ranks {options.ranks}", 0, problem)])
    if not _write_page(options.html, plan):
        return 2
    if options.json:
        print(plan.to_json(), end="")
        return 0
    # rich costs a tenth of a second that --json and errors need not wait for
    from rich.console import Console

    from pyrl_ext.plan.show.terminal import print_plan

    in_terminal = sys.stdout.isatty()
    console = Console(width=None if in_terminal else _FILE_WIDTH)
    print_plan(plan, console, everything=options.all, in_full=not in_terminal)
    return 0


def _write_page(path: str | None, content: Plan | ConfigError) -> bool:
    """Write the page of a plan or of its problems, if asked for. False if that failed."""
    if path is None:
        return True
    from pyrl_ext.plan.show.html.page import write_page

    try:
        write_page(path, content)
    except OSError as error:
        message = f"{error.strerror or error}, expected a file that can be written"
        print(f"command line: --html {path}: {message}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
