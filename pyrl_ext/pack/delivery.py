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
from pyrl_ext.pack.kept_parts import KeptParts
from pyrl_ext.pack.needs import KEPT_COUNTS, Columns, Field, Needs, bits
from pyrl_ext.parallel.buckets import Bucket, aligned
from pyrl_ext.parallel.shared_memory import SharedBlock, map_block
from pyrl_ext.parallel.topology import Topology

KINDS = ("tokens", "logprobs", "routes", "images", "kept")
_DIGEST = "digest"  # the column of a message that tells which exchange and part it belongs to


@dataclass
class Moved:
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


class Stored(NamedTuple):
    """The layout of columns in one block of memory."""

    bucket: Bucket

    @classmethod
    def of(cls, parts: Iterable[tuple[int, Mapping[str, Field]]], digest: bool = False) -> Stored:
        """(rows, their columns), for every stream; with ``digest`` a number before them."""
        shapes = [(_DIGEST, torch.int64, (1,))] if digest else []
        for rows, fields in parts:
            shapes += [(name, f.dtype, (rows, *f.shape)) for name, f in fields.items() if rows]
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
        there = self.read(memory)
        for name, column in columns:
            if name in there:
                there[name].copy_(column)


class Message(NamedTuple):
    """The rows of one part that come from one owner of another host."""

    owner: int
    stored: Stored
    memory: Tensor
    work: Any


class Delivery:
    """The rows that come to one rank.

    Args:
        rank:    this one.
        needs:   of this rank.
        digest:  of everything that ranks must agree on: numbers of the samples, and schedules.
        waiting: surrounds every wait for a message.

    Attributes:
        columns: name -> [N, ...]; undefined in parts that `wait` has not returned for.
        kept:    kept sets of the rows, of parts that `wait` has returned for.
        moved:   bytes that other ranks send.
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
        self.moved = Moved()
        self.columns = {
            name: torch.empty((len(need.rows), *f.shape), dtype=f.dtype)
            for need in needs.values()
            for name, f in need.fields.items()
        }
        self._places = {name: need.by_part_and_owner() for name, need in needs.items()}
        self._parts = max(len(need.cuts) for need in needs.values()) - 1
        self._coming: list[list[Message]] = [[] for _ in range(self._parts)]
        self._sent: list[tuple[int, Tensor, Any]] = []  # to whom
        self._arrived = 0
        self.kept = KeptParts(needs["tokens"].cuts if "tokens" in needs else np.zeros(2, np.int64))

    def take(self, owner: int, columns: Columns, moved: dict[str, int] | None = None) -> None:
        """Store all it needs of the columns of ``owner``.

        Args:
            moved: bytes by kind; these are added.
        """
        for name, need in self.needs.items():
            for (part, holder), at in self._places[name].items():
                if holder != owner:
                    continue
                need.copy(columns, need.rows[at], self.columns, torch.from_numpy(at))
                sets = need.sets(columns, need.rows[at])
                self.kept.add(part, at, sets)
                if moved is not None:
                    need.add_bytes(len(at), moved)
                    moved["kept"] += 0 if sets is None else sets.nbytes

    # between the ranks of a host ------------------------------------------------------------------

    def read_on_host(
        self, owned: dict[str, Tensor], hosts: Sequence[int], stored_by: Callable[[int], Stored]
    ) -> None:
        """Read the rows of the ranks of this host, this one among them, in their memory.

        Args:
            owned: columns of this rank; emptied once they are in memory that the others see.
            hosts: [W] `host_key` of every rank.
            stored_by: how a rank lays out its columns.

        Raises: RuntimeError when a rank has ended.
        Communicates: 16 bytes of every rank, and a barrier.
        """
        stored = stored_by(self.rank)
        block = SharedBlock(stored.bytes) if stored.bytes else None
        if block is not None:
            stored.write(block.memory, owned.items())
            owned.clear()
            self.take(self.rank, stored.read(block.memory))
        mine = torch.tensor([os.getpid(), -1 if block is None else block.file])
        everyone = [torch.empty_like(mine) for _ in hosts]
        with self._blaming("some rank", "the addresses of its rows"):
            dist.all_gather(everyone, mine)
        for owner, host in enumerate(hosts):
            if host != hosts[self.rank] or owner == self.rank:
                continue
            if (there := stored_by(owner)).bytes:
                process, file = everyone[owner].tolist()
                with self._blaming(f"rank {owner} (pid {process})", "its rows in shared memory"):
                    columns = there.read(map_block(process, file, there.bytes))
                self.take(owner, columns, self.moved.shared)
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
        for part, messages in enumerate(self._coming):
            owners = {owner for at in self._places.values() for p, owner in at if p == part}
            for owner in sorted(owners):
                if hosts[owner] != hosts[self.rank]:
                    messages.append(self._receive(part, owner))
        if not owned:
            return
        others = [to for to, host in enumerate(hosts) if host != hosts[self.rank]]
        asked = {to: needs for to in others if (needs := needs_of(to))}
        for part in range(self._parts):
            for to, needs in asked.items():
                self._send(part, to, needs, owned)

    def _receive(self, part: int, owner: int) -> Message:
        rows = []
        for name, need in self.needs.items():
            rows.append((len(self._places[name].get((part, owner), ())), need.fields))
            need.add_bytes(rows[-1][0], self.moved.network)
            if need.kept is not None:
                rows.append((rows[-1][0], KEPT_COUNTS))
        stored = Stored.of(rows, digest=True)
        memory = torch.empty(stored.bytes, dtype=torch.uint8)
        with self._blaming(f"rank {owner}", f"part {part + 1} of {self._parts} of its rows"):
            return Message(owner, stored, memory, dist.irecv(memory, owner, tag=part))

    def _send(self, part: int, to: int, needs: Needs, owned: Columns) -> None:
        rows = {name: n.rows[n.cuts[part] : n.cuts[part + 1]] for name, n in needs.items()}
        if not any(map(len, rows.values())):
            return
        sets = {name: need.sets(owned, rows[name]) for name, need in needs.items()}
        parts: list[tuple[int, Mapping[str, Field]]] = []
        for name, need in needs.items():
            parts.append((len(rows[name]), need.fields))
            if sets[name] is not None:
                parts.append((len(rows[name]), KEPT_COUNTS))
        stored = Stored.of(parts, digest=True)
        memory = torch.empty(stored.bytes, dtype=torch.uint8)
        message = stored.read(memory)
        message[_DIGEST].fill_(self._digest)
        for name, need in needs.items():
            need.copy(owned, rows[name], message, torch.arange(len(rows[name])))
            if (found := sets[name]) is not None and len(found.counts):
                message["kept_counts"].copy_(found.counts)
        with self._blaming(f"rank {to}", f"that it takes part {part + 1} of {self._parts}"):
            self._sent.append((to, memory, dist.isend(memory, to, tag=part)))
            for each in sets.values():
                if each is not None and len(each.ids):
                    tag = self._parts + part
                    self._sent.append((to, each.ids, dist.isend(each.ids, to, tag=tag)))

    def wait(self, part: int) -> None:
        """Return once the rows of ``part`` and of all parts before it are in `columns`.

        Raises: RuntimeError naming the part, its owner and this rank, when the owner has ended or
            sent something else.
        """
        while self._arrived <= part:
            if messages := self._coming[self._arrived]:
                with self._waiting():
                    for message in messages:
                        self._arrive(self._arrived, message)
            self._arrived += 1
            self._coming[self._arrived - 1] = []
        if self._arrived == self._parts and self._sent:
            with self._waiting():
                for to, _, work in self._sent:
                    with self._blaming(f"rank {to}", "that it took this rank's rows"):
                        work.wait()
            self._sent = []

    def _arrive(self, part: int, message: Message) -> None:
        owner, stored, memory, work = message
        what = f"part {part + 1} of {self._parts} of its rows"
        with self._blaming(f"rank {owner}", what):
            work.wait()
            columns = stored.read(memory)
            if (sent := int(columns[_DIGEST])) != self._digest:
                raise RuntimeError(f"it sent rows of exchange {sent:#x}, not {self._digest:#x}")
        for name, need in self.needs.items():
            at = self._places[name].get((part, owner))
            if at is not None and need.kept is not None:
                self.kept.add(part, at, self._sets(part, owner, columns["kept_counts"]))
            for column in need.fields if at is not None else ():
                here = bits(self.columns[column])
                sent = bits(columns[column])
                here.index_copy_(0, torch.from_numpy(at), sent)

    def _sets(self, part: int, owner: int, counts: Tensor) -> KeptSets:
        """Receive the ids of kept sets of rows that have arrived."""
        ids = torch.empty(int(counts.clamp(min=0).sum()), dtype=torch.int32)
        if len(ids):
            with self._blaming(f"rank {owner}", f"kept sets of part {part + 1} of {self._parts}"):
                dist.recv(ids, owner, tag=self._parts + part)
        sets = KeptSets(counts.clone(), ids)
        self.moved.network["kept"] += sets.nbytes
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
