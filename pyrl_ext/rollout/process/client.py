"""An engine in another process, as its trainer sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from pyrl_ext.parallel.atomic_write import no_link
from pyrl_ext.parallel.waiting import announced
from pyrl_ext.rollout.engine import Capabilities, Engine, TurnFeed
from pyrl_ext.rollout.process.sender import Kind, Readable, ReaderLost, Sender, recv, send
from pyrl_ext.rollout.process.server import Build, Call, Failure, NextTurns, Result, Stop, unpack
from pyrl_ext.samples import Image, Prompt, Sample, Sampling, Turn

PATIENCE = 10.0  # for the process to exit [s]
LOG_LINES = 20  # last lines of its log that an error shows


class ProcessEngine(Engine):
    """Starts a process that builds an engine, forwards calls to it, and stops it.

    The process ends when this one does, however that happens; when it dies, whoever waits for
    it gets an error. It starts in the background; the first call waits for it.

    Args:
        build:        returns the engine; a function that the process can import, called there.
        arguments:    of ``build``; they are pickled.
        transport:    how the bytes of weights travel, see `Sender`.
        bucket_bytes: of each of the two buffers that weights travel in.
        readers:      processes of the engine that each take all weights.
        device:       of the weights in this process.
        log:          file for what the process prints.
        environment:  variables it gets in addition to this process's, without torchrun's.
    """

    def __init__(
        self,
        build: Callable[..., Engine],
        arguments: tuple[object, ...],
        *,
        transport: Kind,
        bucket_bytes: int = 2**30,
        readers: int = 1,
        device: torch.device | str = "cpu",
        log: str | Path,
        environment: Mapping[str, str] | None = None,
    ):
        self.log = Path(log)
        self._sender = Sender(transport, bucket_bytes, readers, device)
        self._connection, theirs = Pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab", opener=no_link) as output:
            self._log_start = output.tell()  # an earlier run in this folder wrote what is before
            numbers = (os.getpid(), theirs.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pyrl_ext.rollout.process.server", *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=_environment() | dict(environment or {}),
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        theirs.close()
        self._ended = os.pidfd_open(self.process.pid)
        self._pending = 0  # calls without a result so far
        self._capabilities: Capabilities | None = None
        self._request(Build(build, arguments))

    @property
    def capabilities(self) -> Capabilities:
        """The engine's; waits until it is built."""
        if self._capabilities is None:
            with announced(f"{self._name} to start", advice=f"It logs to {self.log}"):
                capabilities = self._result("start")
            assert isinstance(capabilities, Capabilities)
            self._capabilities = capabilities
        return self._capabilities

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Sends new weights. The engine does not generate until that has succeeded.

        Args:
            named: (name, tensor) as the engine wants them; a tensor is copied before the next is
                asked for, and a `BucketStream` writes its buckets into the transport's memory
            version: kept on each sample
            only: see `Engine.load_weights`

        Raises: what the engine raises; RuntimeError when its process dies; what ``named``
            raises, after the engine was notified that no more will come.
        Communicates: every byte once to each process of the engine.
        """
        call = f"load_weights(version {version})"
        self._begin("load_weights", self._sender.incoming, version, only)
        try:
            self._sender.send(named, lambda readers: self._wait(readers, call))
        except (ReaderLost, _MessageWaits):
            self._sender.drop()
            self._result(call)
            raise self._error(call, "left before all weights were sent") from None
        except BaseException:
            self._sender.drop()
            with suppress(Exception):  # the engine's error says that the weights stopped coming
                self._result(call)
            raise
        self._result(call)

    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        """Forwards the turns of ``feed``, which stays in this process, and the samples of them.

        Images are decoded in this process, which keeps them for the samples, once a prompt. If the
        stream is closed early, the engine stops before its next forward.

        Raises: what the engine and the feed raise; RuntimeError when its process dies;
            DataError for an image that cannot be decoded.
        """
        images: dict[int, tuple[Image, ...]] = {}
        limits = {"trajectories": feed.trajectories, "max_tokens": feed.max_tokens}
        self._begin("answer", limits, sampling)
        try:
            is_open = self._forward(feed, images)
            while True:
                try:
                    self._wait([feed.fileno()] if is_open else [], "answer")
                except _MessageWaits:
                    message = self._recv("answer")
                    if not isinstance(message, bytes):
                        return
                    sample = unpack(message)
                    yield replace(sample, images=images[sample.prompt_id])
                # also after a sample: what it leads to may take no time
                is_open = is_open and self._forward(feed, images)
        finally:
            self._stop()

    def _forward(self, feed: TurnFeed, images: dict[int, tuple[Image, ...]]) -> bool:
        """Sends the turns that came; returns whether more may come."""
        turns = list[Turn]()
        while new := feed.take(wait=False):
            turns += new
        sent = list[Turn]()
        prompts = dict[int, Prompt]()  # turns of a group share one, also there
        for turn in turns:
            prompt = turn.prompt
            if id(prompt) not in prompts:
                loaded = ()
                if prompt.id not in images:
                    images[prompt.id] = loaded = tuple(image.load() for image in prompt.images)
                prompts[id(prompt)] = Prompt(prompt.id, prompt.tokens, images=loaded)
            sent.append(replace(turn, prompt=prompts[id(prompt)]))
        if sent or new is None:
            try:
                send(self._connection, NextTurns(sent, new is None))
            except OSError:
                raise self._died("answer") from None
        return new is not None

    def _stop(self) -> None:
        """Ends a stream that was closed early."""
        if not self._pending or self.process.poll() is not None:
            return
        with suppress(OSError):
            send(self._connection, Stop())
        self._result("answer")

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Digests of the weights that the engine took, computed there."""
        return cast(dict[str, int], self._call("checksums", names))

    def sleep(self) -> int:
        """Frees the engine's memory until the next `load_weights`; returns bytes."""
        return cast(int, self._call("sleep"))

    def close(self) -> None:
        """Stops the engine, and kills its process if it does not exit."""
        self._sender.drop()
        self._connection.close()
        try:
            self.process.wait(PATIENCE if not self._pending else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._ended >= 0:
            os.close(self._ended)
            self._ended = -1

    # calls -------------------------------------------------------------------------------------

    def _call(self, method: str, *arguments: object) -> object:
        self._begin(method, *arguments)
        return self._result(method)

    def _begin(self, method: str, *arguments: object) -> None:
        """Send a call, once the engine is built and every interrupted call has ended."""
        _ = self.capabilities
        while pending := self._pending:
            try:
                self._result(method)
            except Exception:
                if self._pending == pending:  # no result came, and none will
                    raise
        self._request(Call(method, arguments))

    def _request(self, request: Build | Call) -> None:
        try:
            send(self._connection, request)
        except OSError:
            method = request.method if isinstance(request, Call) else "start"
            raise self._died(method) from None
        self._pending += 1

    def _result(self, call: str) -> object:
        """The result of the call; samples that come before it are dropped."""
        while isinstance(message := self._recv(call), bytes):
            continue
        return message.value

    def _recv(self, call: str) -> bytes | Result:
        """The next sample, or what the call returned. Raises: what it raised there."""
        with suppress(_MessageWaits):
            self._wait([], call)
        try:
            message = recv(self._connection, bytes, Failure, Result)
        except (EOFError, OSError):
            raise self._died(call) from None
        if isinstance(message, bytes):
            return message
        self._pending -= 1
        if isinstance(message, Failure):
            raise message.error() from RemoteError(f"in {self._name}:\n{message.traceback}")
        return message

    def _wait(self, readable: Sequence[Readable], call: str) -> Sequence[object]:
        """Those of ``readable`` that can be read, as soon as there are some.

        Raises: _MessageWaits when the engine sent a message instead; RuntimeError when its process
            ended.
        """
        ready = wait([*readable, self._connection, self._ended])
        if self._connection in ready:
            raise _MessageWaits
        if self._ended in ready:
            raise self._died(call)
        return ready

    def _died(self, call: str) -> RuntimeError:
        """The error for a closed connection; waits briefly for the process's exit code."""
        try:
            code = self.process.wait(6 * PATIENCE)  # its socket is closed: it is ending
        except subprocess.TimeoutExpired:
            return self._error(call, "closed its socket")
        if code < 0:
            return self._error(call, f"was ended by {signal.Signals(-code).name}")
        return self._error(call, f"ended with exit code {code}")

    def _error(self, call: str, what: str) -> RuntimeError:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            last = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        shown = "".join(f"\n  {line}" for line in last) or " nothing"
        return RuntimeError(
            f"ProcessEngine.{call}: {self._name} {what}, expected it to run until close. "
            f"{self.log} ends with:{shown}"
        )

    @property
    def _name(self) -> str:
        return f"the engine's process (pid {self.process.pid})"


class RemoteError(Exception):
    """The traceback of an error in an engine's process."""


class _MessageWaits(Exception):
    """The engine sent a message."""


class IdleEngine(Engine):
    """Stands in on a rank that has no engine: takes part in what all ranks do together.

    Args:
        routes: the engines of the other ranks report routed experts.
        images: prompts may have images.
    """

    def __init__(self, routes: bool, images: bool = False):
        self._routes = routes
        self._images = images

    @property
    def capabilities(self) -> Capabilities:
        """Weights change nothing on this rank."""
        return Capabilities(
            routes=self._routes, weights=False, images=self._images, sampling_mask=True
        )

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Reads ``named`` to its end, since its collectives need this rank."""
        for _ in named:
            pass

    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        """Yields nothing. Raises: ValueError when there are trajectories."""
        if feed.trajectories:
            raise ValueError(
                f"IdleEngine.answer: {feed.trajectories} trajectories, expected none on this rank"
            )
        yield from ()

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Empty: this rank took no tensor."""
        return {}

    def sleep(self) -> int:
        """0: there is no memory to free."""
        return 0

    def close(self) -> None:
        """Does nothing: nothing runs."""


def _environment() -> dict[str, str]:
    """This process's variables without those of torchrun, and with where it imports from."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launcher = ("GROUP_", "ROLE_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith(launcher)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
