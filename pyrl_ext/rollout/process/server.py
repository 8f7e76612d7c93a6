"""``python -m pyrl_ext.rollout.process.server``: the process of a `ProcessEngine`.

It talks only to the `ProcessEngine` that started it, over a socket that it inherits.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from pyrl_ext.prompt import PromptImage
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.process.sender import recv, send
from pyrl_ext.samples import Sample, Sampling, Turn

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


class NextTurns(NamedTuple):
    """Further turns of an answer. It gets no reply.

    Args:
        turns: of a prompt's images, its first turn alone has the patches
        are_last: no more turns will come
    """

    turns: list[Turn]
    are_last: bool


class Stop(NamedTuple):
    """The request to end a stream or an answer. It gets no reply."""


class Failure(NamedTuple):
    """An error of the engine, in a form that can be pickled."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind = type(error).__name__
        message = str(error)
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
    for name, value in values.items():
        values[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return Sample(**values)


class _Inbox(queue.SimpleQueue[Any]):
    """Requests, read while the engine runs: both ends may send more than a pipe holds."""

    def __init__(self, connection: Connection):
        super().__init__()
        self.stopped = threading.Event()
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: Connection) -> None:
        while True:
            try:
                message = recv(connection, Call, NextTurns, Stop)
            except Exception as error:
                self.put(error)
                if isinstance(error, (EOFError, OSError)):
                    return
            else:
                if isinstance(message, Call):
                    self.stopped.clear()
                elif isinstance(message, Stop):
                    self.stopped.set()
                self.put(message)

    def next[T](self, *kinds: type[T]) -> T:
        """The next request. Raises: EOFError or OSError when the trainer is gone."""
        message = self.get()
        if isinstance(message, Exception):
            raise message
        assert isinstance(message, kinds), f"{type(message).__name__}, expected one of {kinds}"
        return message


class _Stopped(Exception):
    """The trainer closed its answer."""


class _Feed:
    """The turns that a trainer forwards."""

    def __init__(self, inbox: _Inbox, trajectories: int, max_tokens: int):
        self._inbox = inbox
        self._open = True
        self.trajectories = trajectories
        self.max_tokens = max_tokens
        self._images: dict[int, tuple[PromptImage, ...]] = {}

    def take(self, wait: bool) -> list[Turn] | None:
        turns: list[Turn] = []
        while self._open and ((wait and not turns) or not self._inbox.empty()):
            message = self._inbox.next(NextTurns, Stop)
            if isinstance(message, Stop):
                raise _Stopped
            self._open = not message.are_last
            turns += map(self._with_images, message.turns)
        return turns if turns or self._open else None

    def fileno(self) -> int:
        raise NotImplementedError("fileno: an engine in this process waits in take")

    def _with_images(self, turn: Turn) -> Turn:
        prompt = turn.prompt
        images = self._images.setdefault(prompt.id, prompt.images)
        if images is prompt.images:
            return turn
        return replace(turn, prompt=replace(prompt, images=images))


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
        inbox = _Inbox(connection)
        while True:
            try:
                request = inbox.next(Call, NextTurns, Stop)
            except (EOFError, OSError):
                return
            if not isinstance(request, Call):  # for a stream that had ended already
                continue
            try:
                reply = Result(_call(engine, request, connection, inbox))
            except Exception as error:
                reply = Failure.of(error)
            send(connection, reply)


def _call(engine: Engine, request: Call, connection: Connection, inbox: _Inbox) -> object:
    if request.method != "answer":
        return getattr(engine, request.method)(*request.arguments)
    limits, sampling = cast(tuple[dict[str, int], Sampling], request.arguments)
    # samples as they finish, until the trainer sends `Stop`
    with suppress(_Stopped), closing(engine.answer(_Feed(inbox, **limits), sampling)) as samples:
        for sample in samples:
            send(connection, pack(sample))
            if inbox.stopped.is_set():
                break
    return None


def end_with(parent: int) -> None:
    """Let the kernel end this process when the thread that started it ends, for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended already
        os._exit(1)


def main() -> None:
    parent, connection = map(int, sys.argv[1:])
    end_with(parent)
    serve(Connection(connection))
    sys.stderr.flush()
    os._exit(0)  # an engine may leave threads that do not end


if __name__ == "__main__":
    from pyrl_ext.rollout.process import server as named  # pickles carry the module's own name

    named.main()
