"""The rules that compare lists of calls; see the package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, zip_longest
from pathlib import Path

from tests.helpers.nccl_rules.program import Call, Communicator, Message, Program, read_program
from tests.helpers.nccl_rules.simulation import Simulation, _in

Calls = dict[int, list[Call]]
"""By rank."""


def read(folder: Path, world_size: int) -> list[Program]:
    """The lists that the ranks have written to ``folder`` so far."""
    return [read_program(path_of(folder, rank), rank) for rank in range(world_size)]


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.calls"


def problems(programs: Sequence[Program]) -> list[str]:
    """All that breaks a rule, of ranks that have ended."""
    return [
        *_refused(programs),
        *_different(programs),
        *_opposite(programs),
        *Simulation(programs).report(),
    ]


def _refused(programs: Sequence[Program]) -> Iterator[str]:
    """Rule 4: each fault of each line once."""
    found = dict[tuple[str, str], tuple[Call, list[int]]]()
    for program in programs:
        for call in program.calls:
            for fault in call.faults:
                found.setdefault((fault, call.site), (call, []))[1].append(program.rank)
    for (fault, site), (call, ranks) in found.items():
        yield (
            f"{call.op} at {site} in {call.communicator.name}: {fault}; {len(ranks)} times, on "
            f"ranks {sorted(set(ranks))}{_in(call)}"
        )


def _by_communicator(programs: Sequence[Program]) -> dict[Communicator, Calls]:
    found = defaultdict[Communicator, Calls](lambda: defaultdict(list))
    for program in programs:
        for call in program.calls:
            found[call.communicator][program.rank].append(call)
    return found


def _different(programs: Sequence[Program]) -> Iterator[str]:
    """Rule 3: the first difference of each communicator."""
    for communicator, calls in _by_communicator(programs).items():
        if communicator.on_device:
            yield from _different_messages(communicator, calls)
        collectives = {
            rank: [call for call in calls.get(rank, []) if not call.messages]
            for rank in communicator.ranks
        }
        yield from _different_collectives(communicator, collectives)


def _different_collectives(communicator: Communicator, calls: Calls) -> Iterator[str]:
    ranks = list(calls)
    for row in zip_longest(*calls.values()):
        shown = [_shown(call, communicator.on_device) for call in row]
        other = next((i for i, each in enumerate(shown) if each != shown[0]), None)
        if other is not None:
            here = _next_of(ranks[0], row[0])
            there = _next_of(ranks[other], row[other])
            where = next(_in(call) for call in row if call)
            yield f"communicator {communicator.name}: {here}, where {there}{where}"
            return
        if unfit := _unfit(ranks, [call for call in row if call is not None]):
            yield f"communicator {communicator.name}: {unfit}"
            return


def _next_of(rank: int, call: Call | None) -> str:
    if call is None:
        return f"rank {rank} makes no further call"
    return f"rank {rank} calls {_shown(call, True)} at {call.site}"


def _shown(call: Call | None, on_device: bool) -> str:
    if call is None:
        return ""
    return " ".join([call.op, *(str(each) for each in call.same if on_device)])


def _unfit(ranks: list[int], row: list[Call]) -> str:
    """The first part of an all-to-all whose receiver expects another size; nothing if none."""
    if not all(call.splits for call in row):
        return ""
    for i, sender in enumerate(row):
        for j, receiver in enumerate(row):
            sent = sender.splits[0][j]
            expected = receiver.splits[1][i]
            if sent != expected:
                return (
                    f"rank {ranks[i]} sends {sent} elements to rank {ranks[j]} in {sender.text}, "
                    f"which expects {expected}{_in(sender)}"
                )
    return ""


def _different_messages(communicator: Communicator, calls: Calls) -> Iterator[str]:
    ways = defaultdict[tuple[int, int], dict[str, list[tuple[Call, Message]]]](
        lambda: {"send": [], "recv": []}
    )
    for rank, some in calls.items():
        for call in some:
            for message in call.messages:
                peer = message.peer
                way = (rank, peer) if message.kind == "send" else (peer, rank)
                ways[way][message.kind].append((call, message))
    for (source, to), ends in ways.items():
        pairs = zip(ends["send"], ends["recv"], strict=False)
        for number, ((sends, sent), (receives, received)) in enumerate(pairs):
            if sent[2:] != received[2:]:
                yield (
                    f"communicator {communicator.name}: message {number} from rank {source} to "
                    f"rank {to} is {sent.numel} {sent.dtype} at {sends.site}, where the receiver "
                    f"expects {received.numel} {received.dtype} at {receives.site}{_in(sends)}"
                )
                break


def _opposite(programs: Sequence[Program]) -> Iterator[str]:
    """Rule 5, for each two ranks the first two communicators."""
    first = dict[int, dict[Communicator, Call]]()
    for program in programs:
        uses = first.setdefault(program.rank, {})
        for call in program.calls:
            if call.communicator.on_device and len(call.communicator.ranks) > 1:
                uses.setdefault(call.communicator, call)
    for (one, mine), (other, theirs) in combinations(first.items(), 2):
        order = {communicator: place for place, communicator in enumerate(theirs)}
        both = [communicator for communicator in mine if communicator in order]
        for a, b in pairwise(both):
            if order[a] > order[b]:
                yield (
                    f"ranks {one} and {other} first use communicators {a.name} ({mine[a].site}) "
                    f"and {b.name} ({mine[b].site}) in opposite orders{_in(mine[a])}"
                )
                break
