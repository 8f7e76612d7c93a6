"""Runs the lists of all ranks by NCCL's rules, and tells who waits for whom when nobody can go on.

A rank goes through its list and stops in two places: where it first uses a communicator, until all
its ranks do, and where it waits for a launch. (On a GPU the host goes on there and its stream
waits; but whatever the host launches later is behind that in the stream, and nothing may depend on
how far the host runs ahead.) What all ranks do is fixed, so whether they end does not depend on the
order in which they are run here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from tests.helpers.nccl_rules.program import Call, Communicator, Message, Program, Wait


@dataclass(eq=False)
class Launch:
    """A call in the queue of its communicator.

    Args:
        index: of a collective among those of its rank in the communicator.
        open: messages that have not met their other end.
    """

    rank: int
    call: Call
    index: int
    open: list[Message]
    done: bool = False


class Simulation:
    """Args: programs: of all ranks. Runs them as far as they go."""

    def __init__(self, programs: Sequence[Program]):
        self.programs = {program.rank: program for program in programs}
        self.at = dict.fromkeys(self.programs, 0)
        self.launches: dict[tuple[int, int], Launch] = {}
        self.queues = defaultdict[tuple[Communicator, int], deque[Launch]](deque)
        self.arrived = defaultdict[Communicator, set[int]](set)
        self._indices = defaultdict[tuple[Communicator, int], int](int)
        self._running = defaultdict[tuple[Communicator, int, str], list[Launch]](list)
        # (communicator, kind, from, to) -> running messages without their other end
        self._ends = defaultdict[tuple[Communicator, str, int, int], deque[Launch]](deque)
        self._awake = deque(self.programs)
        self._starting = deque[Launch]()
        while self._awake or self._starting:
            if self._starting:
                self._start(self._starting.popleft())
            else:
                self._advance(self._awake.popleft())

    @property
    def blocked(self) -> list[int]:
        """Ranks that have not come to the end of their lists."""
        return [r for r, program in self.programs.items() if self.at[r] < len(program.events)]

    def _advance(self, rank: int) -> None:
        events = self.programs[rank].events
        while self.at[rank] < len(events):
            event = events[self.at[rank]]
            if isinstance(event, Wait):
                if not self.launches[rank, event.number].done:
                    return
            elif not self._join(event.communicator, rank):
                return
            else:
                self._launch(rank, event)
            self.at[rank] += 1

    def _join(self, communicator: Communicator, rank: int) -> bool:
        """True if the communicator is there; else this rank waits for the others."""
        if not communicator.on_device:
            return True
        present = self.arrived[communicator]
        wanted = set(communicator.ranks)
        was_there = present == wanted
        present.add(rank)
        if not was_there and present == wanted:
            self._awake.extend(wanted)
        return present == wanted

    def _launch(self, rank: int, call: Call) -> None:
        place = call.communicator, rank
        index = -1
        if not call.messages:
            index = self._indices[place]
            self._indices[place] += 1
        launch = Launch(rank, call, index, list(call.messages))
        self.launches[rank, call.number] = launch
        self.queues[place].append(launch)
        if len(self.queues[place]) == 1:
            self._start(launch)

    def _start(self, launch: Launch) -> None:
        """Run what has come to the head of its queue."""
        call = launch.call
        rank = launch.rank
        communicator = call.communicator
        if not call.messages:
            running = self._running[communicator, launch.index, call.op]
            running.append(launch)
            if len(running) == len(communicator.ranks):
                for each in running:
                    self._end(each)
            return
        for message in call.messages:
            mine, theirs = ("send", "recv") if message.kind == "send" else ("recv", "send")
            ends = (rank, message.peer) if mine == "send" else (message.peer, rank)
            if others := self._ends[communicator, theirs, *ends]:
                self._meet(launch, mine, message.peer)
                self._meet(others.popleft(), theirs, rank)
            else:
                self._ends[communicator, mine, *ends].append(launch)

    def _meet(self, launch: Launch, kind: str, peer: int) -> None:
        met = next(m for m in launch.open if m.kind == kind and m.peer == peer)
        launch.open.remove(met)
        if not launch.open:
            self._end(launch)

    def _end(self, launch: Launch) -> None:
        launch.done = True
        queue = self.queues[launch.call.communicator, launch.rank]
        queue.popleft()
        if queue:
            self._starting.append(queue[0])
        self._awake.append(launch.rank)

    # the report -----------------------------------------------------------------------------------

    def report(self) -> list[str]:
        """A line for each rank that waits, and one for each launch that never ended."""
        lines = [self._reason(rank) for rank in self.blocked]
        if lines:
            return lines
        left = [launch for queue in self.queues.values() for launch in list(queue)[:1]]
        return [
            f"rank {launch.rank}: {launch.call.text} in {launch.call.communicator.name} never "
            f"ended: {self._missing(launch)}"
            for launch in left
        ]

    def _reason(self, rank: int) -> str:
        event = self.programs[rank].events[self.at[rank]]
        if isinstance(event, Call):
            communicator = event.communicator
            missing = sorted(set(communicator.ranks) - self.arrived[communicator])
            return (
                f"rank {rank} first uses communicator {communicator.name} for {event.text}, and "
                f"waits for ranks {missing} to do so{_in(event)}"
            )
        launch = self.launches[rank, event.number]
        first = self.queues[launch.call.communicator, rank][0]
        behind = "" if first is launch else f" which is behind {first.call.text}:"
        return (
            f"rank {rank} waits at {event.site} for {launch.call.text} in "
            f"{launch.call.communicator.name},{behind} {self._missing(first)}{_in(launch.call)}"
        )

    def _missing(self, launch: Launch) -> str:
        """The messages or ranks that the head of a queue waits for."""
        if launch.open:
            return "no other end of " + ", ".join(sorted({m.text for m in launch.open}))
        communicator = launch.call.communicator
        running = {each.rank for each in self._running[communicator, launch.index, launch.call.op]}
        return f"ranks {sorted(set(communicator.ranks) - running)} are not in it"


def _in(call: Call) -> str:
    return f" [{call.where}]" if call.where else ""
