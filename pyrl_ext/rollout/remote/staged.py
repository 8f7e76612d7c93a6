"""StagedUpdate: an engine's end of a publish: receive everything, verify it, then load it."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrl_ext.rollout.remote import wire
from pyrl_ext.rollout.remote.broadcast import Broadcast, gone
from pyrl_ext.rollout.remote.relay import MEET, Relay, Way, meet, reader

MAX_SENDERS = 1024
BEFORE = "from the engine before"  # names who is missed in a message
LOST = (20, 10, 4)  # a trainer's host that is lost: asked after [s], every [s], so many times


class Door(NamedTuple):
    """One of the trainer's ranks waits there for an engine.

    Args:
        rank: that sends
        host, port: where it waits
        secret: known to this engine and that rank alone
    """

    rank: int
    host: str
    port: int
    secret: str


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """The update info that an engine gets over HTTP: where its weights come from, and which.

    Args:
        doors: of all ranks that send a part of them
        engine: its number there
        version: of the weights
        silence: longest time without a byte of a rank [seconds]
        only: names of the tensors that come, the others stay; None: all
    """

    doors: tuple[Door, ...]
    engine: int
    version: int
    silence: float
    only: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The body's ``update_info``."""
        lists = {"doors": [list(door) for door in self.doors]}
        return asdict(self) | lists | {"only": None if self.only is None else list(self.only)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> UpdateInfo:
        """Raises: WireError for fields of other kinds."""
        kinds = {"doors": list, "engine": int, "version": int}
        kinds |= {"silence": (float, int), "only": (list, type(None))}
        wire.need_kinds(fields, kinds)
        doors = fields["doors"]
        only = fields["only"]
        good = 0 < len(doors) <= MAX_SENDERS and 0 <= fields["engine"] < 2**32
        rule = f"1 to {MAX_SENDERS} senders and a number"
        wire.need(good, f"{len(doors)} senders, engine {fields['engine']}", rule)
        for door in doors:
            kinds = {"rank": int, "host": str, "port": int, "secret": str}
            wire.need(isinstance(door, list) and len(door) == 4, "another sender", f"{[*kinds]}")
            wire.need_kinds(dict(zip(kinds, door)), kinds)
            wire.need(0 < door[2] < 2**16, f"port {door[2]}", "a number in range")
        if only is not None:
            wire.need(all(isinstance(n, str) for n in only), "only with others", "names")
            only = tuple(only)
        given: dict[str, Any] = {"doors": tuple(Door(*door) for door in doors), "only": only}
        return cls(**{**fields, **given})


class StagedUpdate:
    """The weights of one publish, from the trainer to an engine that goes on with the old ones.

    The order is `start`, `update`, `finish`; `start` and `drop` may come at any time, and forget
    what came. Whatever fails, the engine's weights are not touched.

    Args:
        wanted: name -> shape of every tensor that the engine holds
        device: of the engine; tensors come into host memory
    """

    def __init__(self, wanted: Mapping[str, Sequence[int]], device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.wanted = {name: tuple(shape) for name, shape in wanted.items()}
        self._started = False
        self._came: tuple[UpdateInfo, dict[str, Tensor]] | None = None

    def start(self) -> None:
        """A new publish begins; what an earlier one left is dropped."""
        self.drop()
        self._started = True

    def drop(self) -> None:
        """Forget what came."""
        self._started = False
        self._came = None

    def update(self, info: Mapping[str, Any]) -> UpdateInfo:
        """Receive and verify all tensors.

        Args:
            info: the fields of `UpdateInfo`, as JSON has them

        Raises: WireError; the update has to be started again.
        Communicates: every byte, once, from the trainer's ranks.
        """
        started = self._started
        _ = self.drop()
        wire.need(started, "an update that was not started", "/start_weight_update first")
        known = UpdateInfo.from_json(info)
        self._came = known, fetch(known, self._expected(known.only), self.device)
        return known

    def finish(self, version: int | None = None) -> tuple[UpdateInfo, dict[str, Tensor]]:
        """Its update info, and name -> tensor for the engine to load; both are dropped here.

        Args:
            version: that the trainer asks to finish; None: it does not say
        """
        came = self._came
        _ = self.drop()
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
        chosen = set(only)
        return {name: shape for name, shape in self.wanted.items() if name in chosen}


def fetch(
    info: UpdateInfo, wanted: Mapping[str, Sequence[int]], device: torch.device
) -> dict[str, Tensor]:
    """All tensors of a transfer, verified, from all its senders at once.

    Raises: WireError naming the sender, also when it is not there, is another one, or stops.
    """
    incoming = wire.Incoming(wanted, info.version)
    failed = list[wire.WireError]()
    connections = list[socket.socket]()

    def take(door: Door) -> None:
        try:
            _take(door, info, incoming, device, connections, failed)
        except wire.WireError as error:
            failed.append(error)  # the first is the cause: the others end by it
            for each in connections:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    with ThreadPoolExecutor(len(info.doors)) as pool:
        list(pool.map(take, info.doors))
    if failed:
        raise failed[0]
    return incoming.complete()


def _take(
    door: Door,
    info: UpdateInfo,
    incoming: wire.Incoming,
    device: torch.device,
    connections: list[socket.socket],
    failed: Sequence[wire.WireError],
) -> None:
    """The tensors of one sender, whose bytes go on as it says."""
    names = ["the first tensor"]
    try:
        with ExitStack() as stack:
            connection = _connected(stack, connections, door.host, door.port)
            wire.need(not failed, "another sender that failed", "all of them")
            relay = stack.enter_context(closing(Relay(connection.getsockname()[0])))
            meet(connection, door.secret, info.engine, relay.port)
            connection.settimeout(info.silence)
            read = payload = reader(connection)
            way = Way.from_json(wire.frame(read, wire.WAY)[1])
            relay.begin(way)
            member: Broadcast | None = None
            if way.backend:

                def lost() -> str | None:
                    return "the sender left" if gone(connection) else None

                member = Broadcast(way, device, lost)
                stack.enter_context(closing(member)).join()
                payload = member.pass_on
            elif way.host:
                payload = _from_before(way, info.engine, stack, connections)

            def pass_on(view: memoryview) -> None:
                payload(view)
                relay.pass_on(view)

            incoming.take(read, pass_on, names.append)
            if member is not None:
                member.leave()
    except (OSError, wire.WireError) as error:
        why = f"{error}" if isinstance(error, wire.WireError) else _lost(error, info.silence)
        where = f"rank {door.rank} of the trainer at {door.host}:{door.port}"
        raise wire.WireError(f"{why}; from {where}, at {names[-1]}") from error


def _from_before(
    way: Way, engine: int, stack: ExitStack, connections: list[socket.socket]
) -> wire.Read:
    """Reads the bytes that the engine before passes on. Raises: WireError that says so."""
    where = f"{BEFORE} at {way.host}:{way.port}"

    def read(view: memoryview) -> None:
        try:
            take(view)
        except (OSError, wire.WireError) as error:
            why = f"{error}" if isinstance(error, wire.WireError) else _lost(error, way.silence)
            raise wire.WireError(f"{why}; {where}") from error

    try:
        connection = _connected(stack, connections, way.host, way.port)
        meet(connection, way.secret, engine)
    except (OSError, wire.WireError) as error:
        raise wire.WireError(f"weights: no connection ({error}), expected one; {where}") from error
    connection.settimeout(way.silence)
    take = reader(connection)
    return read


def _connected(
    stack: ExitStack, connections: list[socket.socket], host: str, port: int
) -> socket.socket:
    connection = stack.enter_context(socket.create_connection((host, port), timeout=MEET))
    connections.append(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _notice_loss(connection)
    return connection


def _lost(error: OSError, silence: float) -> str:
    if isinstance(error, TimeoutError):
        return f"weights: a sender that sent nothing for {silence:g} s, expected more bytes"
    return f"weights: a sender that is gone ({error}), expected all bytes"


def _notice_loss(connection: socket.socket) -> None:
    """End it after a minute without the other host: the next trainer waits for that."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    for name, value in zip(names, LOST, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, name, value)
