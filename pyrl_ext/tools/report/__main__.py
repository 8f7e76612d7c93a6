"""Show a run, or several next to each other: as a table and a picture, an HTML page, or CSV.

Ratios in the table are to the first run. The page may be written during a run.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from pyrl_ext.plan.command import called
from pyrl_ext.tools.report.page import report_page
from pyrl_ext.tools.report.recorded import SAMPLES
from pyrl_ext.tools.report.state import Folder, folders

HOST = "127.0.0.1"
PORT = 8000


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: shown; 2: a run folder cannot be read, or a file cannot be written."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.runs:
        parser.error("no RUN, expected a run folder before --html or --csv, which take a PATH")
    if options.samples < 0:
        parser.error(f"--samples {options.samples}, expected a number of samples, at least 0")
    if not options.watch and (options.host, options.port) != (HOST, PORT):
        parser.error("--host and --port need --watch, which serves the page")
    if not options.host:
        parser.error('--host "", expected an address of this machine; 0.0.0.0: all of them')
    if not 0 <= options.port < 2**16:
        parser.error(f"--port {options.port}, expected 0 to 65535")
    try:
        if options.watch:
            from pyrl_ext.tools.report.watch import watch

            watch(options.runs, options.host, options.port, options.samples)
            return 0
        runs = folders(options.runs)
        if options.html is not None:
            path = Path(options.html or runs[0].path / "report.html")
            _write("--html", path, report_page(runs, options.samples))
        elif options.csv is not None:
            _write("--csv", Path(options.csv or runs[0].path / "report.csv"), csv_text(runs))
        else:
            from pyrl_ext.metrics.report import print_report  # imports matplotlib

            png = Path(options.png or runs[0].path / "report.png")
            if png.suffix != ".png" or png.is_dir() or not png.parent.is_dir():
                raise ValueError(
                    f"--png {png}: not the name of a picture, expected a file that ends in .png, "
                    "in a folder that exists"
                )
            print_report([folder.run for folder in runs], png)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def csv_text(runs: Sequence[Folder]) -> str:
    """A column for each metric, a row for each step; of several runs, the first column is the run.

    A cell is empty where a step lacks the metric. Numbers have all their digits.
    """
    several = len(runs) > 1
    names = dict.fromkeys(name for folder in runs for name in folder.columns)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*["run"][:several], "step", *names], lineterminator="\n")
    writer.writeheader()
    for folder in runs:
        label = {"run": folder.run.name} if several else {}
        writer.writerows(label | row for row in folder.run.rows)
    return text.getvalue()


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise OSError(
            f"{option} {path}: {error.strerror}, expected a file that can be written; name the "
            f"runs before {option}"
        ) from error
    print(f"Written: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=called("pyrl_ext.tools.report"),
        usage="%(prog)s RUN [RUN ...] [--png PNG | --html [PATH] | --csv [PATH] | --watch] "
        "[--host HOST] [--port PORT] [--samples N]",
        description=__doc__,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folder with metrics.jsonl")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--png", help="picture to write [RUN/report.png of the first run]")
    for option, content in (("html", "the page"), ("csv", "all metrics as CSV")):
        text = f"write {content} instead [RUN/report.{option} of the first run]"
        output.add_argument(f"--{option}", nargs="?", const="", metavar="PATH", help=text)
    text = "serve the page instead; it is built again when the run writes a step"
    output.add_argument("--watch", action="store_true", help=text)
    text = "address to serve on [%(default)s]; 0.0.0.0: all of this machine, without a password"
    parser.add_argument("--host", default=HOST, help=text)
    text = "port to serve on; 0: any that is free [%(default)s]"
    parser.add_argument("--port", type=int, default=PORT, help=text)
    text = "most recorded samples of a run on the page [%(default)s]"
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
