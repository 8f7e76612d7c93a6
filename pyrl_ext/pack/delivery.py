"""Delivery: rows go from the ranks that hold them to those that need them, part after part.

Every rank derives from the same numbers which rows each rank needs of each owner, so all sizes are
known beforehand. Ranks of one host read each other's rows in shared memory; between hosts a message
for each part is on its way while earlier parts are computed.
"""

# torch.distributed is not fully typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.loss.sampling_mask import KeptSets
from pyrl_ext.pack.needs import KEPT_COUNTS, Columns, Field, Needs, bits
from pyrl_ext.parallel.buckets import Bucket, aligned
from pyrl_ext.parallel.shared_memory import SharedBlock, map_block
from pyrl_ext.parallel.topology import Topology

KINDS = ("tokens", "logprobs", "routes", "images", "kept")
_DIGEST = "digest"  # the column of a message that tells which exchange and part it belongs to


@dataclass
class TransferStats:
    """Bytes that this rank received from other ranks, by kind of column.

    Args:
        network: between hosts.
        shared:  read in the memory of other processes of this host.
    """

    network: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    shared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def metrics(self, topo: Topology) -> dict[str, float]:
        """``batch/moved_bytes`` of all ranks, by kind, and ``batch/shared_bytes``.

        Communicates: an all-reduce of 6 numbers.
        """
        counts = torch.tensor([*self.network.values(), sum(self.shared.values())])
        if topo.world_size > 1:
            dist.all_reduce(counts)
        *network, shared = counts.tolist()
        kinds = {f"batch/moved_bytes/{k}": n for k, n in zip(KINDS, network, strict=True)}
        return {"batch/moved_bytes": sum(network), **kinds, "batch/shared_bytes": shared}


class BlockLayout(NamedTuple):
    """Places of columns in one block of memory."""

    bucket: Bucket

    @classmethod
    def of(cls, streams: Iterable[tuple[int, Mapping[str, Field]]], digest: bool = False) -> Self:
        """The layout of (number of rows, their columns) of every stream.

        Args:
            digest: a number comes before them.
        """
        shapes: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        if digest:
            shapes.append((_DIGEST, torch.int64, (1,)))
        for num_rows, fields in streams:
            if not num_rows:
                continue
            for name, column in fields.items():
                shapes.append((name, column.dtype, (num_rows, *column.shape)))
        return cls(Bucket.of(shapes))

    @property
    def bytes(self) -> int:
        """Size of the block; blocks that follow each other stay aligned."""
        return aligned(self.bucket.bytes)

    def read(self, memory: Tensor) -> dict[str, Tensor]:
        """The columns as views of ``memory``, [bytes] uint8."""
        return {slot.name: slot.view(memory) for slot in self.bucket.slots}

    def write(self, memory: Tensor, columns: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the columns that have a place in ``memory`` there."""
        views = self.read(memory)
        for name, column in columns:
            if name in views:
                views[name].copy_(column)


@dataclass(frozen=True, eq=False)
class Incoming:
    """A receive in progress: the rows of one part from one owner on another host."""

    owner: int
    layout: BlockLayout
    memory: Tensor
    work: Any


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A send in progress; its memory has to live until it ends."""

    receiver: int
    memory: Tensor
    work: Any


class KeptParts:
    """Kept sets of rows that come in parts, of several owners each.

    Args:
        cuts: [P + 1] first row of each part, then their number.
    """

    def __init__(self, cuts: np.ndarray):
        self._cuts = cuts
        self._pieces: list[list[tuple[np.ndarray, KeptSets]]] = [[] for _ in cuts[1:]]
        self._whole: dict[int, KeptSets] = {}

    def add(self, part: int, places: np.ndarray, sets: KeptSets | None) -> None:
        """Add the sets of the rows at ``places`` [M], which are in ``part``."""
        if sets is not None:
            self._pieces[part].append((places, sets))

    def rows(self, part: int, first: int, end: int) -> KeptSets:
        """The sets of rows ``[first, end)``, in a part that is complete."""
        if part not in self._whole:
            pieces = self._pieces[part]
            self._pieces[part] = []
            places = np.concatenate([np.empty(0, np.int64), *(places for places, _ in pieces)])
            joined = KeptSets.joined([sets for _, sets in pieces])
            self._whole[part] = joined.select(torch.from_numpy(np.argsort(places)))
        begin = int(self._cuts[part])
        return self._whole[part].select(torch.arange(first - begin, end - begin))


class Delivery:
    """The rows that come to one rank.

    Args:
        rank:    of this process.
        needs:   of this rank.
        digest:  of everything that ranks must agree on: numbers of the samples, and schedules.
        waiting: surrounds every wait for a message.

    Attributes:
        columns: name -> [N, ...]; undefined in parts that `wait` has not returned for.
        kept:    kept sets of the rows, of parts that `wait` has returned for.
        stats:   bytes received from other ranks.
    """

    def __init__(
        self,
        rank: int,
        needs: Needs,
        digest: int = 0,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self.rank = rank
        self.needs = needs
        self._digest = digest
        self._waiting = waiting
        self.stats = TransferStats()
        self.columns = {
            name: torch.empty((len(need.rows), *f.shape), dtype=f.dtype)
            for need in needs.values()
            for name, f in need.fields.items()
        }
        self._places = {name: need.by_part_and_owner() for name, need in needs.items()}
        self._parts = max(len(need.cuts) for need in needs.values()) - 1
        self._incoming: list[list[Incoming]] = [[] for _ in range(self._parts)]  # by part
        self._outgoing: list[Outgoing] = []
        self._arrived = 0
        self.kept = KeptParts(needs["tokens"].cuts if "tokens" in needs else np.zeros(2, np.int64))

    def take(self, owner: int, columns: Columns, received: dict[str, int] | None = None) -> None:
        """Store all it needs of the columns of ``owner``.

        Args:
            received: bytes by kind, to which these are added.
        """
        for name, need in self.needs.items():
            for (part, holder), places in self._places[name].items():
                if holder != owner:
                    continue
                rows = need.rows[places]
                need.copy(columns, rows, self.columns, torch.from_numpy(places))
                sets = need.sets(columns, rows)
                self.kept.add(part, places, sets)
                if received is not None:
                    need.add_bytes(len(places), received)
                    received["kept"] += 0 if sets is None else sets.nbytes

    # between the ranks of a host ------------------------------------------------------------------

    def read_on_host(
        self,
        owned: dict[str, Tensor],
        hosts: Sequence[int],
        block_layout: Callable[[int], BlockLayout],
    ) -> None:
        """Read the rows of the ranks of this host, this one among them, in their memory.

        Args:
            owned: columns of this rank; emptied once they are in memory that the others see.
            hosts: [W] `host_key` of every rank.
            block_layout: rank -> the layout of its columns.

        Raises: RuntimeError when a rank has ended.
        Communicates: 16 bytes of every rank, and a barrier.
        """
        layout = block_layout(self.rank)
        block = SharedBlock(layout.bytes) if layout.bytes else None
        if block is not None:
            layout.write(block.memory, owned.items())
            owned.clear()
            self.take(self.rank, layout.read(block.memory))
        address = torch.tensor([os.getpid(), -1 if block is None else block.file])
        addresses = [torch.empty_like(address) for _ in hosts]
        with self._blaming("some rank", "the addresses of its rows"):
            dist.all_gather(addresses, address)
        for owner, host in enumerate(hosts):
            if host != hosts[self.rank] or owner == self.rank:
                continue
            layout = block_layout(owner)
            if layout.bytes:
                process, file = addresses[owner].tolist()
                with self._blaming(f"rank {owner} (pid {process})", "its rows in shared memory"):
                    columns = layout.read(map_block(process, file, layout.bytes))
                self.take(owner, columns, self.stats.shared)
        with self._blaming("some rank", "word that it has read the rows"):
            dist.barrier()  # a block stays open until everyone has mapped it
        if block is not None:
            block.close()

    # between hosts --------------------------------------------------------------------------------

    def start(self, owned: Columns, hosts: Sequence[int], needs_of: Callable[[int], Needs]) -> None:
        """Start to send and to receive the rows that cross hosts; `wait` waits for a part.

        Args:
            owned: columns of this rank.
            hosts: [W] `host_key` of every rank.
            needs_of: what a rank needs of this rank's rows.

        Communicates: a message for each part and each owner on another host, with exactly the rows
            and columns that are needed of it.
        """
        for part, messages in enumerate(self._incoming):
            for owner in self._owners_of(part):
                if hosts[owner] != hosts[self.rank]:
                    messages.append(self._receive(part, owner))
        if not owned:
            return
        needs_by_rank: dict[int, Needs] = {}
        for receiver, host in enumerate(hosts):
            if host != hosts[self.rank] and (needs := needs_of(receiver)):
                needs_by_rank[receiver] = needs
        for part in range(self._parts):
            for receiver, needs in needs_by_rank.items():
                self._send(part, receiver, needs, owned)

    def _owners_of(self, part: int) -> list[int]:
        """Ranks that hold rows of a part, ascending."""
        owners: set[int] = set()
        for places in self._places.values():
            owners |= {owner for of_part, owner in places if of_part == part}
        return sorted(owners)

    def _receive(self, part: int, owner: int) -> Incoming:
        streams: list[tuple[int, Mapping[str, Field]]] = []
        for name, need in self.needs.items():
            num_rows = len(self._places[name].get((part, owner), ()))
            streams.append((num_rows, need.fields))
            need.add_bytes(num_rows, self.stats.network)
            if need.kept is not None:
                streams.append((num_rows, KEPT_COUNTS))
        layout = BlockLayout.of(streams, digest=True)
        memory = torch.empty(layout.bytes, dtype=torch.uint8)
        with self._blaming(f"rank {owner}", f"part {part + 1} of {self._parts} of its rows"):
            return Incoming(owner, layout, memory, dist.irecv(memory, owner, tag=part))

    def _send(self, part: int, receiver: int, needs: Needs, owned: Columns) -> None:
        rows = {
            name: need.rows[need.cuts[part] : need.cuts[part + 1]] for name, need in needs.items()
        }
        if not any(map(len, rows.values())):
            return
        sets = {name: need.sets(owned, rows[name]) for name, need in needs.items()}
        streams: list[tuple[int, Mapping[str, Field]]] = []
        for name, need in needs.items():
            streams.append((len(rows[name]), need.fields))
            if sets[name] is not None:
                streams.append((len(rows[name]), KEPT_COUNTS))
        layout = BlockLayout.of(streams, digest=True)
        memory = torch.empty(layout.bytes, dtype=torch.uint8)
        message = layout.read(memory)
        message[_DIGEST].fill_(self._digest)
        for name, need in needs.items():
            need.copy(owned, rows[name], message, torch.arange(len(rows[name])))
            kept = sets[name]
            if kept is not None and len(kept.counts):
                message["kept_counts"].copy_(kept.counts)
        with self._blaming(f"rank {receiver}", f"that it takes part {part + 1} of {self._parts}"):
            self._start_send(receiver, memory, tag=part)
            for kept in sets.values():
                if kept is not None and len(kept.ids):
                    self._start_send(receiver, kept.ids, tag=self._parts + part)

    def _start_send(self, receiver: int, memory: Tensor, tag: int) -> None:
        work = dist.isend(memory, receiver, tag=tag)
        self._outgoing.append(Outgoing(receiver, memory, work))

    def wait(self, part: int) -> None:
        """Return once the rows of ``part`` and of all parts before it are in `columns`.

        Raises: RuntimeError naming the part, its owner and this rank, when the owner has ended or
            sent something else.
        """
        while self._arrived <= part:
            if messages := self._incoming[self._arrived]:
                with self._waiting():
                    for message in messages:
                        self._arrive(self._arrived, message)
            self._incoming[self._arrived] = []
            self._arrived += 1
        if self._arrived == self._parts and self._outgoing:
            with self._waiting():
                for message in self._outgoing:
                    who = f"rank {message.receiver}"
                    with self._blaming(who, "that it took this rank's rows"):
                        message.work.wait()
            self._outgoing = []

    def _arrive(self, part: int, message: Incoming) -> None:
        owner = message.owner
        with self._blaming(f"rank {owner}", f"part {part + 1} of {self._parts} of its rows"):
            message.work.wait()
            columns = message.layout.read(message.memory)
            digest = int(columns[_DIGEST])
            if digest != self._digest:
                raise RuntimeError(f"it sent rows of exchange {digest:#x}, not {self._digest:#x}")
        for name, need in self.needs.items():
            places = self._places[name].get((part, owner))
            if places is None:
                continue
            if need.kept is not None:
                sets = self._receive_sets(part, owner, columns["kept_counts"])
                self.kept.add(part, places, sets)
            for column in need.fields:
                destination = bits(self.columns[column])
                destination.index_copy_(0, torch.from_numpy(places), bits(columns[column]))

    def _receive_sets(self, part: int, owner: int, counts: Tensor) -> KeptSets:
        """Receive the ids of kept sets of rows that have arrived."""
        ids = torch.empty(int(counts.clamp(min=0).sum()), dtype=torch.int32)
        if len(ids):
            with self._blaming(f"rank {owner}", f"kept sets of part {part + 1} of {self._parts}"):
                dist.recv(ids, owner, tag=self._parts + part)
        sets = KeptSets(counts.clone(), ids)
        self.stats.network["kept"] += sets.nbytes
        return sets

    @contextmanager
    def _blaming(self, who: str, what: str) -> Generator[None]:
        """Name the other rank, and what was awaited of it, when communication fails."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise RuntimeError(
                f"shard_batch: rank {self.rank} has an error from {who}, expected {what}: {error}"
            ) from error
