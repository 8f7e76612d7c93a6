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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.loss.sampling_mask import KeptSets
from pyrl_ext.pack.needs import KEPT_COUNTS, Columns, Field, Needs, bits
from pyrl_ext.parallel.buckets import Bucket
from pyrl_ext.parallel.shared_memory import SharedBlock, map_block
from pyrl_ext.parallel.topology import Topology

KINDS = ("tokens", "logprobs", "routes", "images", "kept")
_DIGEST = {"digest": Field("digest", torch.int64)}  # tells which exchange a message belongs to


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


def block_of(streams: Iterable[tuple[int, Mapping[str, Field]]]) -> Bucket:
    """The places of columns in one block of memory.

    Args:
        streams: number of rows, and their columns, of each.
    """
    return Bucket.of(
        (name, column.dtype, (num_rows, *column.shape))
        for num_rows, fields in streams
        for name, column in fields.items()
        if num_rows
    )


class IncomingRows(NamedTuple):
    """A receive in progress: the rows of one part from one owner on another host."""

    owner: int
    layout: Bucket
    memory: Tensor
    work: Any


class Outgoing(NamedTuple):
    """A send in progress; its memory has to live until it ends."""

    receiver: int
    memory: Tensor
    work: Any


class Delivery:
    """The rows that come to one rank.

    Args:
        rank:    of this process.
        needs:   of this rank.
        digest:  of everything that ranks must agree on: numbers of the samples, and schedules.
        waiting: surrounds every wait for a message.

    Attributes:
        columns: name -> [N, ...]; undefined in parts that `wait` has not returned for.
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
        self._incoming: list[list[IncomingRows]] = [[] for _ in range(self._parts)]  # by part
        self._outgoing: list[Outgoing] = []
        self._arrived = 0
        # of each part: kept sets, and the places of their rows
        self._kept: list[list[tuple[np.ndarray, KeptSets]]] = [[] for _ in range(self._parts)]

    def take(self, owner: int, columns: Columns) -> None:
        """Store all it needs of the columns of ``owner``, a rank of this host."""
        for name, need in self.needs.items():
            for (part, holder), places in self._places[name].items():
                if holder != owner:
                    continue
                rows = need.rows[places]
                need.copy(columns, rows, self.columns, torch.from_numpy(places))
                sets = need.sets(columns, rows)
                if sets is not None:
                    self._kept[part].append((places, sets))
                if owner != self.rank:
                    need.add_bytes(len(places), self.stats.shared)
                    self.stats.shared["kept"] += 0 if sets is None else sets.nbytes

    def kept(self, part: int, first: int, end: int) -> KeptSets:
        """The kept sets of rows ``[first, end)``, in a part that `wait` has returned for."""
        pieces = self._kept[part]
        if len(pieces) != 1:  # of several owners, or of none
            places = np.concatenate([np.empty(0, np.int64), *(places for places, _ in pieces)])
            order = np.argsort(places)
            whole = KeptSets.joined([sets for _, sets in pieces]).select(torch.from_numpy(order))
            pieces[:] = [(places[order], whole)]
        begin = int(self.needs["tokens"].cuts[part])
        return pieces[0][1].select(torch.arange(first - begin, end - begin))

    # between the ranks of a host ------------------------------------------------------------------

    def read_on_host(
        self,
        owned: dict[str, Tensor],
        hosts: Sequence[int],
        block_layout: Callable[[int], Bucket],
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
            mine = layout.views(block.memory)
            for name, column in mine.items():
                column.copy_(owned[name])
            owned.clear()
            self.take(self.rank, mine)
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
                    columns = layout.views(map_block(process, file, layout.bytes))
                self.take(owner, columns)
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
        elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[self.rank]]
        for part, owner in sorted({key for places in self._places.values() for key in places}):
            if owner in elsewhere:
                self._incoming[part].append(self._receive(part, owner))
        if not owned:
            return
        needs_by_rank = {receiver: needs_of(receiver) for receiver in elsewhere}
        for part in range(self._parts):
            for receiver, needs in needs_by_rank.items():
                self._send(part, receiver, needs, owned)

    def _receive(self, part: int, owner: int) -> IncomingRows:
        sizes = {name: len(places.get((part, owner), ())) for name, places in self._places.items()}
        for name, need in self.needs.items():
            need.add_bytes(sizes[name], self.stats.network)
        layout, memory = _message(self.needs, sizes)
        with self._blaming(f"rank {owner}", f"part {part + 1} of {self._parts} of its rows"):
            return IncomingRows(owner, layout, memory, dist.irecv(memory, owner, tag=part))

    def _send(self, part: int, receiver: int, needs: Needs, owned: Columns) -> None:
        rows = {
            name: need.rows[need.cuts[part] : need.cuts[part + 1]] for name, need in needs.items()
        }
        if not any(map(len, rows.values())):
            return
        layout, memory = _message(needs, {name: len(some) for name, some in rows.items()})
        message = layout.views(memory)
        message["digest"].fill_(self._digest)
        ids: list[Tensor] = []
        for name, need in needs.items():
            need.copy(owned, rows[name], message, torch.arange(len(rows[name])))
            kept = need.sets(owned, rows[name])
            if kept is not None and len(kept.counts):
                message["kept_counts"].copy_(kept.counts)
                ids.append(kept.ids)
        with self._blaming(f"rank {receiver}", f"that it takes part {part + 1} of {self._parts}"):
            self._start_send(receiver, memory, tag=part)
            for each in filter(len, ids):
                self._start_send(receiver, each, tag=self._parts + part)

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

    def _arrive(self, part: int, message: IncomingRows) -> None:
        owner = message.owner
        with self._blaming(f"rank {owner}", f"part {part + 1} of {self._parts} of its rows"):
            message.work.wait()
            columns = message.layout.views(message.memory)
            digest = int(columns["digest"])
            if digest != self._digest:
                raise RuntimeError(f"it sent rows of exchange {digest:#x}, not {self._digest:#x}")
        for name, need in self.needs.items():
            places = self._places[name].get((part, owner))
            if places is None:
                continue
            if need.kept is not None:
                sets = self._receive_sets(part, owner, columns["kept_counts"])
                self._kept[part].append((places, sets))
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


def _message(needs: Needs, sizes: Mapping[str, int]) -> tuple[Bucket, Tensor]:
    """The layout of a message, and memory for it.

    Args:
        sizes: number of rows of each stream.
    """
    streams: list[tuple[int, Mapping[str, Field]]] = [(1, _DIGEST)]
    for name, need in needs.items():
        streams.append((sizes[name], need.fields))
        if need.kept is not None:
            streams.append((sizes[name], KEPT_COUNTS))
    layout = block_of(streams)
    return layout, torch.empty(layout.bytes, dtype=torch.uint8)
