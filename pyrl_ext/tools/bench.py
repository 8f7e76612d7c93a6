"""``python -m pyrl_ext.tools.bench [--list] FAMILY...``: what `benchmarks.run` does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from pyrl_ext.plan.command import called
from pyrl_ext.plan.shipped import shipped_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of `benchmarks.run`."""
    sys.path.insert(0, str(shipped_folder()))
    given = sys.argv[1:] if arguments is None else arguments
    return importlib.import_module("benchmarks.run").main(given, called("pyrl_ext.tools.bench"))


if __name__ == "__main__":
    sys.exit(main())
