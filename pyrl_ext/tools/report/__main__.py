"""Show a run, or several side by side: as a table and a picture, an HTML page, or CSV.

Ratios in the table are to the first run. The page may be written during a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pyrl_ext.plan.command import called
from pyrl_ext.tools.report.page import report_page
from pyrl_ext.tools.report.state import folders
from pyrl_ext.tools.report.table import csv_text


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: shown; 2: a run folder cannot be read, or a file cannot be written."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.runs:
        parser.error(
            "no RUN, expected a run folder. Name it before --html or --csv, which take the word "
            "behind them for a PATH"
        )
    try:
        if options.html is not None:
            path = Path(options.html or Path(options.runs[0]) / "report.html")
            _write("--html", path, report_page(folders(options.runs)))
        elif options.csv is not None:
            path = Path(options.csv or Path(options.runs[0]) / "report.csv")
            _write("--csv", path, csv_text(folders(options.runs)))
        else:
            from pyrl_ext.metrics.report import print_report  # brings matplotlib

            png = Path(options.png or Path(options.runs[0]) / "report.png")
            _check_picture(png)
            print_report([folder.run for folder in folders(options.runs)], png)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _check_picture(path: Path) -> None:
    """Raises: ValueError for a name under which matplotlib would write another file, or none."""
    if path.suffix != ".png" or path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"--png {path}: no name for a picture, expected a file that ends in .png, in a folder "
            "that exists. Say for example --png report.png"
        )


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise OSError(
            f"{option} {path}: {error.strerror}, expected a file that can be written; runs go "
            f"before {option}"
        ) from error
    print(f"Written: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=called("pyrl_ext.tools.report"),
        usage="%(prog)s RUN [RUN ...] [--png PNG | --html [PATH] | --csv [PATH]]",
        description=__doc__,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folder with metrics.jsonl")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--png", help="picture to write [RUN/report.png of the first run]")
    words = "write the page instead [RUN/report.html of the first run]"
    way.add_argument("--html", nargs="?", const="", metavar="PATH", help=words)
    words = "write all metrics as CSV instead [RUN/report.csv of the first run]"
    way.add_argument("--csv", nargs="?", const="", metavar="PATH", help=words)
    return parser


if __name__ == "__main__":
    sys.exit(main())
