"""``python -m pyrl_ext.rollout.process.server``: the process of a `ProcessEngine`.

It is started by one and talks to it alone, over a socket that it inherits.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from contextlib import closing
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.process.channel import hear, tell
from pyrl_ext.samples import Sample

BEAT = 1.0  # seconds between two signs of life
PAGE = struct.Struct("Q")  # what the beats are counted in, in memory that both processes see
_PR_SET_PDEATHSIG = 1
# Kinds of errors that the trainer gets as they are; others as RuntimeError with their name.
PLAIN = {kind.__name__: kind for kind in (ValueError, RuntimeError, FloatingPointError, OSError)}


class Failed(NamedTuple):
    """An error of the engine, as it travels."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        kind, message = type(error).__name__, str(error)
        if kind not in PLAIN:
            message = f"{kind}: {message}"
        return cls(kind, message, "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        return PLAIN.get(self.kind, RuntimeError)(self.message)


class Answer(NamedTuple):
    """What a call returned."""

    value: Any


def pack(sample: Sample) -> bytes:
    """A sample as bytes; a tensor pickled by itself would take ten times as long as its array."""
    values = (getattr(sample, field.name) for field in fields(sample))
    return pickle.dumps([v.numpy() if isinstance(v, torch.Tensor) else v for v in values])


def unpack(packed: bytes) -> Sample:
    """Against `pack`."""
    values: Any = (
        torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in pickle.loads(packed)
    )
    return Sample(*values)


def serve(channel: Connection) -> None:
    """Build the engine that the first message names, then answer calls until the socket closes."""
    try:
        build, arguments = hear(channel)
        engine: Engine = build(*arguments)
    except Exception as error:
        tell(channel, Failed.of(error))
        return
    with closing(engine):
        tell(channel, Answer(engine.capabilities))
        while True:
            try:
                method, *given = hear(channel)
            except EOFError:
                return
            if method == "stop":  # of a stream that was over already
                continue
            try:
                stream = method == "stream"
                value = (_stream if stream else _call)(channel, engine, method, given)
                answer = Answer(value)
            except Exception as error:
                answer = Failed.of(error)
            tell(channel, answer)


def _call(_channel: Connection, engine: Engine, method: str, given: list[Any]) -> Any:
    return getattr(engine, method)(*given)


def _stream(channel: Connection, engine: Engine, _method: str, given: list[Any]) -> None:
    """Samples as they finish, until the trainer wants no more."""
    with closing(engine.stream(*given)) as samples:
        for sample in samples:
            tell(channel, pack(sample))
            if channel.poll():
                hear(channel)  # stop
                return


def _end_with(parent: int) -> None:
    """The kernel ends this process when the thread that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _beat(page: mmap.mmap) -> None:
    for beats in itertools.count(1):
        PAGE.pack_into(page, 0, beats)
        time.sleep(BEAT)


def main() -> None:
    parent, channel, page = map(int, sys.argv[1:])
    _end_with(parent)
    threading.Thread(target=_beat, args=(mmap.mmap(page, PAGE.size),), daemon=True).start()
    serve(Connection(channel))
    sys.stderr.flush()
    os._exit(0)  # an engine may leave threads that do not end


if __name__ == "__main__":
    from pyrl_ext.rollout.process import server as named  # pickles carry the module's own name

    named.main()
