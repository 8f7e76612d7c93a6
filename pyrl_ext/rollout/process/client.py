"""An engine in a process of its own, as its trainer sees it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.rollout.engine import Capabilities, Engine
from pyrl_ext.rollout.process.channel import Kind, Lost, Sender, hear, tell
from pyrl_ext.rollout.process.server import BEAT, PAGE, Answer, Failed, unpack
from pyrl_ext.samples import Prompt, Sample, Sampling

SILENT = 20  # beats missed by a process that counts as hanging
LEAVE = 10.0  # seconds that a process has to end by itself
LINES = 20  # of its log in an error


class ProcessEngine(Engine):
    """Starts a process that builds an engine, hands calls on to it, and ends it.

    The process ends when this one does, however that happens; when it dies or hangs, whoever waits
    for it gets an error at once. It starts beside what is done here until the first call.

    Args:
        build:        returns the engine; a function that the process can import, called there.
        arguments:    of ``build``; they are pickled.
        transport:    the way of the weights, see `Sender`.
        bucket_bytes: of each of the two buckets that weights travel in.
        readers:      processes of the engine that each take all weights.
        device:       of the weights, here.
        log:          file for what the process prints.
        environment:  variables that it has, beside this process's without torchrun's.
    """

    def __init__(
        self,
        build: Callable[..., Engine],
        arguments: tuple[Any, ...],
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
        self._channel, theirs = Pipe()
        page = os.memfd_create("pyrl-life")
        os.ftruncate(page, PAGE.size)
        self._life = mmap.mmap(page, PAGE.size)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._start = output.tell()  # an earlier run of the folder wrote before it
            numbers = (os.getpid(), theirs.fileno(), page)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pyrl_ext.rollout.process.server", *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=numbers[1:],
                env=_environment() | dict(environment or {}),
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        theirs.close()
        os.close(page)
        self._ended = os.pidfd_open(self.process.pid)
        self._owed = 0  # answers that have not come yet
        self._silent = False  # it hangs: do not wait for it again before it is asked again
        self._capabilities: Capabilities | None = None
        self._ask(build, arguments)

    @property
    def capabilities(self) -> Capabilities:
        """Of the engine; waits until it is built."""
        if self._capabilities is None:
            self._capabilities = self._answer("start")
        found: Any = self._capabilities
        return found

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Sends new weights; until it has succeeded, and after it failed, no generation.

        Args:
            named: (name, tensor) as the engine wants them; one is copied before the next is asked
                for
            version: kept on each sample
            only: see `Engine.load_weights`

        Raises: what the engine raises; RuntimeError when its process dies or hangs; what ``named``
            raises, after the engine was told that no more will come.
        Communicates: every byte once to each process of the engine.
        """
        call = f"load_weights(version {version})"
        self._begin("load_weights", self._sender.incoming, version, only)
        try:
            self._sender.send(named, lambda readers: self._wait(readers, call))
        except (Lost, _Answered):
            self._sender.drop()
            self._answer(call)
            raise self._error(call, "left before all weights were sent") from None
        except BaseException:
            self._sender.drop()
            with suppress(Exception):  # it says that the weights stopped coming
                if not self._silent:
                    self._answer(call)
            raise
        self._answer(call)

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        """Samples as they finish. Closed early, the engine stops after its next finished one.

        Raises: what the engine raises; RuntimeError when its process dies or hangs.
        """
        self._begin("stream", list(prompts), sampling)
        try:
            while isinstance(message := self._hear("stream"), bytes):
                yield unpack(message)
        finally:
            if self._owed and not self._silent and self.process.poll() is None:
                with suppress(OSError):
                    tell(self._channel, ("stop",))
                self._answer("stream")

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Digests of the weights that the engine took, computed there."""
        return self._call("checksums", names)

    def sleep(self) -> int:
        """Gives the engine's memory back until the next `load_weights`; bytes."""
        return self._call("sleep")

    def close(self) -> None:
        """Ends the engine, and its process if it does not end by itself."""
        self._sender.drop()
        self._channel.close()
        try:
            self.process.wait(LEAVE if not self._owed else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._ended >= 0:
            os.close(self._ended)
            self._ended = -1

    # how ---------------------------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any) -> Any:
        self._begin(method, *arguments)
        return self._answer(method)

    def _begin(self, *message: Any) -> None:
        """Ask, once the engine is built and what was interrupted here is over."""
        _ = self.capabilities
        while owed := self._owed:
            try:
                self._answer(message[0])
            except Exception:
                if self._owed == owed:  # no answer, and none will come
                    raise
        self._ask(*message)

    def _ask(self, *message: Any) -> None:
        try:
            tell(self._channel, message)
        except OSError:
            raise self._died(str(message[0])) from None
        self._owed += 1

    def _answer(self, call: str) -> Any:
        """What the call returned; samples on the way are nobody's."""
        while isinstance(message := self._hear(call), bytes):
            continue
        return message

    def _hear(self, call: str) -> Any:
        """The next sample, or what the call returned. Raises: what it raised there."""
        with suppress(_Answered):
            self._wait([], call)
        try:
            message = hear(self._channel)
        except (EOFError, OSError):
            raise self._died(call) from None
        if isinstance(message, bytes):
            return message
        self._owed -= 1
        if isinstance(message, Failed):
            raise message.error() from RemoteError(f"in {self._name}:\n{message.traceback}")
        assert isinstance(message, Answer)
        return message.value

    def _wait(self, things: list[Any], call: str) -> list[Any]:
        """Those of ``things`` that can be read, once there are some.

        Raises: _Answered when the engine says something instead; RuntimeError when its process
            ended, or gave no sign of life while this one was awake to see it.
        """
        missed, before, self._silent = 0, 0, False
        while True:
            found = wait([*things, self._channel, self._ended], BEAT)
            if self._channel in found:
                raise _Answered
            if self._ended in found:
                raise self._died(call)
            if found:
                return found
            (beats,) = PAGE.unpack_from(self._life)
            missed = missed + 1 if beats == before > 0 else 0  # Python itself takes long to start
            before = beats
            if missed >= SILENT:
                self._silent = True
                raise self._error(call, f"gave no sign of life for {SILENT * BEAT:.0f} s")

    def _died(self, call: str) -> RuntimeError:
        """Why it ended. Something wrote it an end, so it is over in a moment, or now."""
        try:
            code = self.process.wait(LEAVE)
        except subprocess.TimeoutExpired:
            return self._error(call, "closed its socket")
        if code < 0:
            return self._error(call, f"was ended by {signal.Signals(-code).name}")
        return self._error(call, f"ended with exit code {code}")

    def _error(self, call: str, what: str) -> RuntimeError:
        with self.log.open("rb") as file:
            file.seek(self._start)
            last = file.read().decode(errors="replace").splitlines()[-LINES:]
        said = "".join(f"\n  {line}" for line in last) or " nothing"
        return RuntimeError(
            f"ProcessEngine.{call}: {self._name} {what}, expected it to serve until close. "
            f"{self.log} ends with:{said}"
        )

    @property
    def _name(self) -> str:
        return f"the engine's process (pid {self.process.pid})"


class RemoteError(Exception):
    """The traceback of an error in an engine's process."""


class _Answered(Exception):
    """The engine has something to say."""


class IdleEngine(Engine):
    """On a rank that no engine belongs to: takes part in what all ranks do together.

    Args:
        routes: the engines of the other ranks report them.
    """

    def __init__(self, routes: bool):
        self._routes = routes

    @property
    def capabilities(self) -> Capabilities:
        """Weights change nothing here."""
        return Capabilities(routes=self._routes, weights=False)

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Reads ``named`` to its end, since other ranks wait for this one in it."""
        for _ in named:
            pass

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> Generator[Sample, None, None]:
        """Nothing. Raises: ValueError when there are prompts."""
        if prompts:
            raise ValueError(
                f"IdleEngine.stream: {len(prompts)} prompts, expected none on this rank"
            )
        yield from ()

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """No tensor was taken here."""
        return {}

    def sleep(self) -> int:
        """0: there is nothing to give back."""
        return 0

    def close(self) -> None:
        """Nothing runs."""


def _environment() -> dict[str, str]:
    """This process's, without what torchrun says to its ranks, and with where it imports from."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launcher = ("GROUP_", "ROLE_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith(launcher)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
