"""StagedUpdate: an engine's end of a publish: receive everything, verify it, then load it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from pyrl_ext.rollout.servers import wire

MEET = 10.0  # longest time for the proofs of the secret [s]
LOST = (20, 10, 4)  # a trainer's host that is lost: asked after [s], every [s], so many times


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """The update info that an engine gets over HTTP: where its weights come from, and which.

    Args:
        host, port: where the trainer waits for it
        engine: its number there
        secret: known to this engine and the trainer alone
        version: of the weights
        silence: longest time without a byte [seconds]
        only: names of the tensors that come, the others stay; None: all
    """

    host: str
    port: int
    engine: int
    secret: str
    version: int
    silence: float
    only: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The body's ``update_info``."""
        return asdict(self) | {"only": None if self.only is None else list(self.only)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> UpdateInfo:
        """Raises: WireError for fields of other kinds."""
        kinds = {"host": str, "port": int, "engine": int, "secret": str, "version": int}
        kinds |= {"silence": (float, int), "only": (list, type(None))}
        wire.need(fields.keys() == kinds.keys(), f"fields {sorted(fields)}", f"{sorted(kinds)}")
        for name, kind in kinds.items():
            good = isinstance(fields[name], kind) and not isinstance(fields[name], bool)
            wire.need(good, f"{name} is a {type(fields[name]).__name__}", f"{kind}")
        good = 0 < fields["port"] < 2**16 and 0 <= fields["engine"] < 2**32
        wire.need(good, f"port {fields['port']}, engine {fields['engine']}", "numbers in range")
        only = fields["only"]
        if only is not None:
            wire.need(all(isinstance(n, str) for n in only), "only with others", "names")
            only = tuple(only)
        given: dict[str, Any] = {**fields, "only": only}
        return cls(**given)


class StagedUpdate:
    """The weights of one publish, from the trainer to an engine that goes on with the old ones.

    The order is `start`, `update`, `finish`; `start` and `drop` may come at any time, and forget
    what came. Whatever fails, the engine's weights are not touched.

    Args:
        wanted: name -> shape of every tensor that the engine holds.
    """

    def __init__(self, wanted: Mapping[str, Sequence[int]]):
        self.wanted = {name: tuple(shape) for name, shape in wanted.items()}
        self._started = False
        self._came: tuple[UpdateInfo, dict[str, Tensor]] | None = None

    def start(self) -> None:
        """A new publish begins; what an earlier one left is dropped."""
        self.drop()
        self._started = True

    def drop(self) -> None:
        """Forget what came."""
        self._started, self._came = False, None

    def update(self, info: Mapping[str, Any]) -> UpdateInfo:
        """Receive and verify all tensors.

        Args:
            info: the fields of `UpdateInfo`, as JSON has them

        Raises: WireError; the update has to be started again.
        Communicates: every byte, once, from the trainer.
        """
        started, _ = self._started, self.drop()
        wire.need(started, "an update that was not started", "/start_weight_update first")
        known = UpdateInfo.from_json(info)
        self._came = known, fetch(known, self._expected(known.only))
        return known

    def finish(self, version: int | None = None) -> tuple[UpdateInfo, dict[str, Tensor]]:
        """Its update info, and name -> tensor for the engine to load; both are dropped here.

        Args:
            version: that the trainer asks to finish; None: it does not say
        """
        came, _ = self._came, self.drop()
        wire.need(came is not None, "a finish without weights", "an update that succeeded")
        assert came is not None
        info, tensors = came
        good = version in (None, info.version)
        wire.need(good, f"a finish of version {version}", f"{info.version}, which came")
        return info, tensors

    def _expected(self, only: Collection[str] | None) -> dict[str, tuple[int, ...]]:
        if only is None:
            return self.wanted
        unknown = [name for name in only if name not in self.wanted]
        wire.need(not unknown, f"{unknown[:4]}", "names of tensors that the engine holds")
        return {name: self.wanted[name] for name in only}


def fetch(info: UpdateInfo, wanted: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """All tensors of a transfer, verified.

    Raises: WireError, also when the trainer is not there, is another one, or stops.
    """
    where = f"{info.host}:{info.port}"
    try:
        with socket.create_connection((info.host, info.port), timeout=MEET) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_loss(connection)
            _meet(connection, info)
            connection.settimeout(info.silence)
            return wire.receive(_reader(connection), wanted, info.version)
    except TimeoutError:
        raise wire.WireError(
            f"weights: the trainer at {where} sent nothing for {info.silence:g} s, expected "
            "the next bytes; what came is dropped"
        ) from None
    except OSError as error:
        raise wire.WireError(f"weights: the trainer at {where} is gone ({error})") from error


def _notice_loss(connection: socket.socket) -> None:
    """End it after a minute without the other host: the next trainer waits for that."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    for name, value in zip(names, LOST, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, name, value)


def _meet(connection: socket.socket, info: UpdateInfo) -> None:
    """Each end proves to the other that it knows the secret."""
    read, size = _reader(connection), len(wire.MAGIC) + wire.PROOF
    hello = bytearray(size)
    read(memoryview(hello))
    wire.need(hello.startswith(wire.MAGIC), "another protocol", f"{wire.MAGIC!r}")
    theirs, ours = bytes(hello[-wire.PROOF :]), secrets.token_bytes(wire.PROOF)
    proof = wire.prove(info.secret, b"engine", theirs, ours)
    connection.sendall(info.engine.to_bytes(4, "little") + ours + proof)
    answer = bytearray(wire.PROOF)
    read(memoryview(answer))
    good = wire.same(bytes(answer), wire.prove(info.secret, b"trainer", ours, theirs))
    wire.need(good, "a trainer with another secret", "the one of this transfer")


def _reader(connection: socket.socket) -> wire.Read:
    def read(view: memoryview) -> None:
        got = 0
        while got < len(view):
            count = connection.recv_into(view[got:])
            wire.need(count > 0, f"an end after {got} of {len(view)} bytes", "all of them")
            got += count

    return read
