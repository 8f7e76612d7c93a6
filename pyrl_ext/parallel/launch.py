"""Values that torchrun passes to its processes, and the error that they report to it."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

_ENDED = 10.0  # in which torchrun ends a host's other processes after one has ended [seconds]


def launched(name: str, default: int) -> int:
    """The integer that torchrun put into the environment variable ``name``, or ``default``.

    Raises: ValueError where the variable holds no number.
    """
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"launch: {name}={text!r}, expected a number. Unset it, or use torchrun")
    return int(text)


def refuse(message: str) -> int:
    """Print why a run cannot start; returns the exit code, 2.

    Each process of a host finds the same reason. The first one prints it; the others wait for
    torchrun to end them, and print their reason only if it does not.
    """
    if launched("LOCAL_RANK", 0):
        time.sleep(_ENDED)
    print(message, file=sys.stderr, flush=True)
    tell_torchrun(message)
    return 2


def tell_torchrun(message: str) -> None:
    """Let torchrun's report of a failed process, which is printed last, end with ``message``.

    torchrun reads it from the file of this environment variable, in the form of torch's
    ``ErrorHandler``; that class writes a traceback as well, and takes seconds to import.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):  # it is printed already
            Path(path).write_text(json.dumps({"message": content}))
