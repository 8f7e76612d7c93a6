"""``python -m pyrl_ext.rollout.process.server``: the process of a `ProcessEngine`.

It talks only to the `ProcessEngine` that started it, over a socket that it inherits.
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
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from pyrl_ext.dist.heartbeat import INTERVAL
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.process.channel import recv, send
from pyrl_ext.samples import Sample

BEATS = struct.Struct("Q")  # count of heartbeats, in memory that both processes map
_PR_SET_PDEATHSIG = 1
# Kinds of errors that the trainer gets as they are; others become a RuntimeError with their name.
PLAIN = {kind.__name__: kind for kind in (ValueError, RuntimeError, FloatingPointError, OSError)}


class Build(NamedTuple):
    """The first request: the engine is what `function` returns."""

    function: Callable[..., Engine]
    arguments: tuple[object, ...]


class Call(NamedTuple):
    """A request to call a method of the engine."""

    method: str
    arguments: tuple[object, ...]


class Stop(NamedTuple):
    """The request to end a stream. It gets no reply."""


class Failure(NamedTuple):
    """An error of the engine, in a form that can be pickled."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind, message = type(error).__name__, str(error)
        if kind not in PLAIN:
            message = f"{kind}: {message}"
        return cls(kind, message, "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        return PLAIN.get(self.kind, RuntimeError)(self.message)


class Result(NamedTuple):
    """The result of a call."""

    value: object


def pack(sample: Sample) -> bytes:
    """A sample as bytes, without its images, which the trainer has. Its tensors become arrays,
    which pickle ten times as fast."""
    names = (field.name for field in fields(sample) if field.name != "images")
    values = ((name, getattr(sample, name)) for name in names)
    return pickle.dumps({n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in values})


def unpack(packed: bytes) -> Sample:
    """The sample that `pack` made bytes of."""
    values: dict[str, Any] = pickle.loads(packed)
    return Sample(
        **{n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in values.items()}
    )


def serve(connection: Connection) -> None:
    """Build the engine that the first message names, then serve calls until the socket closes."""
    try:
        build = recv(connection, Build)
        engine = build.function(*build.arguments)
    except Exception as error:
        send(connection, Failure.of(error))
        return
    with closing(engine):
        send(connection, Result(engine.capabilities))
        while True:
            try:
                request = recv(connection, Call, Stop)
            except EOFError:
                return
            if isinstance(request, Stop):  # for a stream that had ended already
                continue
            try:
                value = getattr(engine, request.method)(*request.arguments)
                if request.method == "stream":
                    value = _send_all(connection, value)
                reply = Result(value)
            except Exception as error:
                reply = Failure.of(error)
            send(connection, reply)


def _send_all(connection: Connection, stream: Generator[Sample, None, None]) -> None:
    """Sends samples as they finish, until the trainer sends `Stop`."""
    with closing(stream) as samples:
        for sample in samples:
            send(connection, pack(sample))
            if connection.poll():
                recv(connection, Stop)
                return


def _end_with(parent: int) -> None:
    """Let the kernel end this process when the thread that started it ends, for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended already
        os._exit(1)


def _beat(page: mmap.mmap) -> None:
    for beats in itertools.count(1):
        BEATS.pack_into(page, 0, beats)
        time.sleep(INTERVAL)


def main() -> None:
    parent, connection, page = map(int, sys.argv[1:])
    _end_with(parent)
    threading.Thread(target=_beat, args=(mmap.mmap(page, BEATS.size),), daemon=True).start()
    serve(Connection(connection))
    sys.stderr.flush()
    os._exit(0)  # an engine may leave threads that do not end


if __name__ == "__main__":
    from pyrl_ext.rollout.process import server as named  # pickles carry the module's own name

    named.main()
