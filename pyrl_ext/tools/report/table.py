"""Writes the metrics of runs as CSV: a column a metric, a row a step."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from pyrl_ext.tools.report.state import Folder


def csv_text(folders: Sequence[Folder]) -> str:
    """The rows of one or more runs; of several, the first column is the run.

    Metrics are in the order of the glossary. A cell is empty where a step lacks the metric; numbers
    have all their digits, and those that are not finite are nan, inf and -inf.
    """
    several = len(folders) > 1
    names = dict.fromkeys(name for folder in folders for name in folder.columns)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*["run"][:several], "step", *names], lineterminator="\n")
    writer.writeheader()
    for folder in folders:
        label = {"run": folder.run.name} if several else {}
        writer.writerows(label | row for row in folder.run.rows)
    return text.getvalue()
