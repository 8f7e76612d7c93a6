"""Simulates megatron-core's 1F1B and interleaved pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Kind = Literal["F", "B"]
# Seconds, or (rank, chunk, microbatch) -> seconds.
Duration = float | Callable[[int, int, int], float]


class PipelineSlot(NamedTuple):
    """A forward (F) or backward (B) pass of one microbatch through one model chunk of a rank."""

    rank: int
    chunk: int
    microbatch: int
    kind: Kind
    start: float
    end: float


def order(
    rank: int, pp: int, vpp: int, microbatches: int, forward_only: bool = False
) -> list[tuple[Kind, int, int]]:
    """(kind, chunk, microbatch) in the order in which rank `rank` of `pp` runs them in Megatron.

    One chunk a rank (1F1B): a warm-up of one forward pass for each later rank, then forward and
    backward passes alternate. Interleaved: chunks change after every pp microbatches, and the
    warm-up is two passes for each later rank, plus pp microbatches of all chunks but one.

    With vpp above 1 microbatches are a multiple of pp: the trainer pads them.
    """
    rounds = range(0, microbatches, pp)
    passes = [
        (chunk, number)
        for first in rounds
        for chunk in range(vpp)
        for number in range(first, min(first + pp, microbatches))
    ]
    forward: list[tuple[Kind, int, int]] = [("F", chunk, number) for chunk, number in passes]
    if forward_only:
        return forward
    behind = pp - rank - 1
    warm_up = min(len(passes), behind if vpp == 1 else 2 * behind + (vpp - 1) * pp)
    passes_in_order = forward[:warm_up]
    for i, (chunk, number) in enumerate(passes):
        passes_in_order += forward[warm_up + i : warm_up + i + 1]
        passes_in_order.append(("B", vpp - 1 - chunk, number))
    return passes_in_order


def ahead_of(pp: int, vpp: int | None) -> int:
    """Number of microbatches that the first chunk takes before the gradient of its first one.

    Args:
        pp, vpp: pipeline ranks, and model chunks of each; None: no interleaved schedule.
    """
    if vpp is None:
        return pp
    passes = 2 * (pp - 1) + 2 * (vpp - 1) * pp + 1
    rounds, rest = divmod(passes, pp * vpp)  # pp microbatches to each chunk in turn
    return rounds * pp + min(rest, pp)


class EncoderPipeline(NamedTuple):
    """An encoder's pipeline before that of the language model, which reads what it encodes."""

    pp: int
    """Its stages; 0: it is a part of the passes of the language model's first chunk."""
    ahead: int
    """Microbatches that its last stage encodes before the first gradient comes back."""
    forward: Duration
    backward: Duration | None
    """None: it is frozen, and no gradient comes back."""


def pipeline(
    pp: int,
    vpp: int,
    microbatches: int,
    forward: Duration,
    backward: Duration | None,
    send: float = 0.0,
    encoder: EncoderPipeline | None = None,
) -> list[PipelineSlot]:
    """The schedule of one minibatch: a pass starts once its rank is free and its input has arrived.

    Args:
        pp, vpp: pipeline ranks, and model chunks of each rank.
        microbatches: with vpp > 1 a multiple of pp.
        forward, backward: time of a chunk on a microbatch [s]; backward None: forward passes only.
        send: time from a rank to the next [s]; it overlaps with computation.
        encoder: what encodes images first; its ranks have negative numbers, -1 is the last one.

    Returns:
        Slots rank by rank, in the order in which each rank runs them.
    """
    if encoder and not encoder.pp:
        forward = _longer(forward, encoder.forward)
        backward = None if backward is None else _longer(backward, encoder.backward or 0.0)
        encoder = None
    first = -encoder.pp if encoder else 0
    ranks = range(first, pp)
    orders = {rank: order(rank, pp, vpp, microbatches, backward is None) for rank in range(pp)}
    passes = {"llm": (forward, backward)}
    if encoder:
        passes["encoder"] = encoder.forward, encoder.backward if backward else None
        stages = encoder.pp + encoder.ahead
        back = passes["encoder"][1]
        orders |= {
            r: order(r - first, stages, 1, microbatches, back is None) for r in ranks if r < 0
        }
    took = {
        (kind, module): _as_function(0.0 if each is None else each)
        for module, both in passes.items()
        for kind, each in zip("FB", both, strict=True)
    }
    ends: dict[tuple[Kind, int, int], float] = {}  # by kind, place in the pipeline and microbatch
    slots: dict[int, list[PipelineSlot]] = {rank: [] for rank in ranks}
    last = pp * vpp - 1
    while any(len(slots[rank]) < len(orders[rank]) for rank in ranks):
        for rank in ranks:
            mine = slots[rank]
            wanted = orders[rank]
            free = mine[-1].end if mine else 0.0
            while len(mine) < len(wanted):
                kind, chunk, number = wanted[len(mine)]
                place = chunk * pp + rank
                ready = _ready(ends, kind, place, number, (first, last), send)
                if ready is None:
                    break
                start = max(free, ready)
                here = took[kind, "llm"] if rank >= 0 else took[kind, "encoder"]
                free = start + here(rank if rank >= 0 else rank - first, chunk, number)
                ends[kind, place, number] = free
                mine.append(PipelineSlot(rank, chunk, number, kind, start, free))
    return [slot for rank in ranks for slot in slots[rank]]


def _ready(
    ends: dict[tuple[Kind, int, int], float],
    kind: Kind,
    place: int,
    number: int,
    span: tuple[int, int],
    send: float,
) -> float | None:
    """When the input of a pass arrives; None: not known yet. `span`: first and last place."""
    if kind == "F":
        if place == span[0]:
            return 0.0
        before = ends.get(("F", place - 1, number))
    elif place == span[1]:
        return ends.get(("F", place, number))
    else:
        before = ends.get(("B", place + 1, number))
    return None if before is None else before + send


def _as_function(duration: Duration) -> Callable[[int, int, int], float]:
    if callable(duration):
        return duration
    return lambda rank, chunk, microbatch: duration


def _longer(duration: Duration, more: Duration) -> Duration:
    """`duration`, and `more` in the first chunk of the first stage."""
    all_chunks = _as_function(duration)
    first = _as_function(more)
    return lambda rank, chunk, microbatch: (
        all_chunks(rank, chunk, microbatch)
        + (first(rank, chunk, microbatch) if rank == chunk == 0 else 0.0)
    )
