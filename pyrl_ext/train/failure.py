"""The end of a failed run: a message, a traceback in its folder, and never exit code 0."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from pathlib import Path

from pyrl_ext.parallel.atomic_write import FolderError, write_text
from pyrl_ext.parallel.collective_errors import AgreedError
from pyrl_ext.parallel.launch import launched
from pyrl_ext.parallel.user_code import printable
from pyrl_ext.parallel.waiting import Stopped
from pyrl_ext.plan import Plan
from pyrl_ext.train.folder import next_start

EXPECTED = (ValueError, OSError, RuntimeError, FloatingPointError)  # their messages say it all
_SHOWN = 4000  # characters of a message on the terminal


def report_failure(run: Path, error: BaseException) -> None:
    """Print why the run ended, with the notes on the error; its traceback goes into ``error.txt``
    of the run folder.

    Does not raise: where the folder cannot be written, the terminal has to do. Every rank has the
    error of a run folder, and an `AgreedError`; the main rank reports it.
    """
    if isinstance(error, (FolderError, AgreedError)) and launched("RANK", 0):
        return
    notes = vars(error).pop("__notes__", [])  # the traceback ends with the error
    message = str(error)
    if isinstance(error, SystemExit):
        message = f"sys.exit or exit was called with {error.code} before the last step"
    elif not isinstance(error, EXPECTED) or not message:
        message = f"{type(error).__name__}: {message}".removesuffix(": ")
    lines = [f"error: {printable(message, _SHOWN)}", *notes]
    if not isinstance(error, FolderError):  # else the folder is another process's, or nobody's
        trace = "".join(traceback.format_exception(error))
        try:  # before anything is printed: user code may have closed stderr
            write_text(run / "error.txt", trace.encode("utf-8", "backslashreplace").decode())
            lines.append(f"(traceback: {run / 'error.txt'})")
        except (OSError, ValueError) as problem:
            lines.append(f"(no traceback in the run folder: {problem})")
            lines += [] if isinstance(error, EXPECTED) else [trace]
    with suppress(OSError, ValueError):
        print("\n".join(lines), file=sys.stderr, flush=True)


def report_stop(plan: Plan, stop: BaseException) -> None:
    """Print that a second Ctrl-C, or a signal during a wait, ended the run, and how it goes on.

    The main rank prints it: a stop during a wait ends all ranks.
    """
    if isinstance(stop, Stopped) and launched("RANK", 0):
        return
    why = f" by {stop}" if isinstance(stop, Stopped) else ""
    print(f"stopped at once{why}; {next_start(plan)}", flush=True)
