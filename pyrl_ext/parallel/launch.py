"""The numbers that torchrun puts into the environment of the processes that it starts."""

from __future__ import annotations

import os


def launched(name: str, default: int) -> int:
    """The integer that torchrun put into the environment variable ``name``, or ``default``.

    Raises: ValueError where the variable holds no number.
    """
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"launch: {name}={text!r}, expected a number. Unset it, or use torchrun")
    return int(text)
