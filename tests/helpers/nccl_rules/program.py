"""The list of one rank's calls, as it is written to a file and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Communicator(NamedTuple):
    """Ranks that communicate by themselves: a group, or a pair of it for unbatched messages.

    Args:
        group: its unique name; ``title`` for people.
        ranks: global, of the group or of the pair.
        on_device: whether NCCL would carry it; else gloo does on a GPU, too.
    """

    group: str
    title: str
    ranks: tuple[int, ...]
    on_device: bool

    @property
    def name(self) -> str:
        return f"{self.title!r} {list(self.ranks)}{'' if self.on_device else ' over gloo'}"


class Message(NamedTuple):
    """One end of a message: ``kind`` is send or recv, ``peer`` the global rank of the other end."""

    kind: str
    peer: int
    dtype: str
    numel: int

    @property
    def text(self) -> str:
        return f"{self.kind} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


@dataclass
class Call:
    """One launch of a collective, of an unbatched message, or of a batch of messages.

    Args:
        number: of the launch on this rank.
        op: name of the function.
        site: the line that asked for it.
        where: the part of the test that `record.mark` named.
        same: what all members of a collective have to agree on, besides ``op``.
        splits: numbers of elements to and from each member, of an all-to-all.
        messages: none of collectives.
        faults: what NCCL refuses about the tensors.
    """

    number: int
    op: str
    communicator: Communicator
    site: str
    where: str = ""
    same: list[Any] = field(default_factory=list[Any])
    splits: list[list[int]] = field(default_factory=list[list[int]])
    messages: list[Message] = field(default_factory=list[Message])
    faults: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        what = ", ".join(message.text for message in self.messages) or self.op
        return f"{what} at {self.site}"


@dataclass
class Wait:
    """The rank, or on a GPU its stream, waits for a launch."""

    number: int
    site: str


@dataclass
class Program:
    """The calls and waits of one rank, in order."""

    rank: int
    events: list[Call | Wait]

    @property
    def calls(self) -> Iterator[Call]:
        return (event for event in self.events if isinstance(event, Call))


def line_of(event: Call | Wait) -> str:
    """JSON, with a newline."""
    return json.dumps([type(event).__name__, vars(event)]) + "\n"


def read_program(path: Path, rank: int) -> Program:
    """The list that a rank has written so far; a last line that is not whole is left out."""
    events: list[Call | Wait] = []
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        kind, fields = json.loads(line)
        if kind == "Wait":
            events.append(Wait(**fields))
            continue
        group, title, ranks, on_device = fields.pop("communicator")
        communicator = Communicator(group, title, tuple(ranks), on_device)
        messages = [Message(*each) for each in fields.pop("messages")]
        events.append(Call(communicator=communicator, messages=messages, **fields))
    return Program(rank, events)
