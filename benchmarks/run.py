"""Time kernels; --list names all families.

The family's tests run first, and each case is compared with its baselines: what is wrong is not
timed, and ends the command with exit status 1. The floor is a copy of as many bytes as the
operation must move, in the same run. Bars say how fast an idle machine should be. A bar that is
missed is printed with "!" and counted in the last line; the exit status stays 0, since a busy or
another machine may miss it.
"""

import argparse
import difflib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.cases import FAMILIES
from benchmarks.tables import count

ROOT = Path(__file__).parents[1]

# where a family's tests are, if not in tests/ops/test_<family>.py
TESTS = {
    "digests": "tests/ops/test_digest.py",
    "divergence": "tests/loss/test_divergence.py",
    "experts": "tests/megatron/test_grouped_experts.py",
    "feed": "tests/trainer/test_prefetch.py",
    "gated_delta_rule": "tests/ops/test_sequences.py",
    "layout": "tests/pack/test_layout.py",
    "linear_logprob": "tests/loss/test_fused_head.py",
}


class Table(NamedTuple):
    """A table that no family of cases prints: its ``main``, and what it shows."""

    main: str
    text: str


# by their first argument; their options are different ones: pyrl bench layer --help
TABLES = {
    "dynamic_cp": Table("benchmarks.dynamic_cp:main", "plans of dynamic context parallelism"),
    "layer": Table("benchmarks.layer:main", "launches and bytes of a decoder layer"),
}


def main(arguments: Sequence[str], prog: str = "python -m benchmarks.run") -> int:
    """Run the command. Exit code 1: a result is wrong, or tests fail; 2: the arguments are."""
    if arguments and arguments[0] in TABLES:
        return resolve_name(TABLES[arguments[0]].main)(arguments[1:])
    args = _arguments(arguments, prog)
    if args.list:
        print(*_lines(), sep="\n")
        return 0
    if len(args.families) > 1:
        return run_each(args.families, arguments)
    (family,) = args.families
    if args.tests and not args.quick and not _tests_pass(family):
        return 1
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, about packages that are not installed
        from benchmarks.timed_family import run

    return run(family, args)


def _lines() -> list[str]:
    """A line for each family and each table."""
    every = {**FAMILIES, **TABLES}
    width = max(map(len, every))
    return [f"{name:{width}}  {what.text}" for name, what in every.items()]


def _arguments(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--list", action="store_true", help="print the families, a line each")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's default otherwise")
    parser.add_argument(
        "--malloc",
        choices=["default", "keep"],
        help="keep: what is freed (CPU); the default but for log-probs is to keep it",
    )
    parser.add_argument(
        "--clock",
        choices=["processor", "wall"],
        default="wall",
        help="processor: of this process, with one thread what an idle machine would take",
    )
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="time at once")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="every second case, once or twice, untested: whether it is right",
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, help="also draw the rows into this PNG")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args = parser.parse_args(arguments)
    if args.list:
        return args
    if not args.families:
        parser.error("no FAMILY, expected one or several. --list names them")
    for name in args.families:
        if name in TABLES:
            parser.error(f"{name}: a table, expected as the only one, before its options")
        if name not in FAMILIES:
            near = difflib.get_close_matches(name, [*FAMILIES, *TABLES], n=1)
            meant = f"Did you mean {near[0]}?" if near else "--list names them"
            parser.error(f"{name}: not a family of benchmarks. {meant}")
    if len(args.families) > 1 and (args.json or args.plot):
        parser.error(f"--json, --plot: {len(args.families)} families, expected one")
    # pip installs no tests: the title of the table says that none ran
    args.tests = args.tests and (ROOT / "tests").is_dir()
    return args


def run_each(families: Sequence[str], arguments: Sequence[str]) -> int:
    """Run every family in its own process, for what malloc keeps; 1 if any failed."""
    options = [option for option in arguments if option not in families]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    rows = []
    failed = []
    with TemporaryDirectory() as folder:
        for family in families:
            file = Path(folder, family)
            command = [
                sys.executable,
                "-m",
                "benchmarks.run",
                family,
                *options,
                "--json",
                str(file),
            ]
            if subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode:
                failed.append(family)
            else:
                rows += json.loads(file.read_text())["rows"]
    print(f"all {len(families)} families: {count(rows)}")
    if failed:
        print(f"benchmarks: failed, see above: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


def _tests_pass(family: str) -> bool:
    """True if the family's tests pass: a wrong kernel is not timed."""
    tests_file = TESTS.get(family, f"tests/ops/test_{family}.py")
    command = [sys.executable, "-m", "pytest", "-q", tests_file]
    tests = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = (tests.stdout + tests.stderr).strip().splitlines()
    print(f"{tests_file}: {lines[-1] if lines else 'no output'}")
    if tests.returncode:
        print(f"{family}: its tests fail, so it is not timed. See: pytest {tests_file}")
    return tests.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
