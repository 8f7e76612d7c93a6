"""Agreement of ranks before they go on: none has failed, and all do the same."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from pyrl_ext.parallel.waiting import Stopped


class AgreedError(RuntimeError):
    """A failure that every rank of the run raises at the same place, wherever it began: all can
    still communicate, so they write a checkpoint together."""


class AgreedStop(Stopped):
    """A stop signal that ended a wait of one rank; every rank raises it at the same place."""


class OtherRank(Exception):
    """The traceback of an error on another rank, as text: the cause of an `AgreedError`."""


def gather_objects[T](value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The value of every rank, pickled. Communicates: over the group's CPU backend."""
    if group is None:
        return [value]
    gathered: list[T] = [value] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


@contextmanager
def agreeing(call: str, what: str, group: dist.ProcessGroup | None) -> Generator[list[Any]]:
    """What the block appends to the list has to be the same on every rank; see `agree`.

    The block does not communicate. Other ranks wait at its end, also for one whose block raises.
    """
    doing: list[Any] = []
    error = None
    try:
        yield doing
    except Exception as caught:  # every rank has to know, or the others wait forever
        error = caught
    agree(call, error, doing, what, group)


def agree(
    call: str, error: Exception | None, digest: Any, what: str, group: dist.ProcessGroup | None
) -> None:
    """Raise on every rank if a rank failed, or if ranks are about to do different things.

    Args:
        call:   name of the function, for the message.
        error:  what failed here; None: nothing.
        digest: of what this rank is about to do.
        what:   names what ``digest`` is of, for the message.
        group:  all ranks of the run; None = this process alone.

    Raises: AgreedError naming the ranks and their errors; AgreedStop if a stop signal ended a wait
        of one; in a single process the error itself.
    Communicates: a line of text of every rank.
    """
    if group is None:
        if error is not None:
            raise error
        return
    failed = None
    stop = None
    if isinstance(error, Stopped):
        stop = str(error)
    elif error is not None:
        trace = "".join(traceback.format_exception(error))
        failed = (f"{type(error).__name__}: {error}", trace)
    states = gather_objects((failed, stop, digest), group)
    stops = [text for _, text, _ in states if text is not None]
    if stops:
        raise AgreedStop(stops[0]) from error
    failures = {rank: failed for rank, (failed, _, _) in enumerate(states) if failed is not None}
    if failures:
        lines = [f"\n  rank {rank}: {text}" for rank, (text, _) in failures.items()]
        first = min(failures)
        cause = error or OtherRank(f"rank {first}:\n{failures[first][1]}")
        raise AgreedError(
            f"{call}: {len(lines)} of {len(states)} ranks failed, expected none" + "".join(lines)
        ) from cause
    other = [rank for rank, (_, _, sent) in enumerate(states) if sent != states[0][2]]
    if other:
        raise AgreedError(
            f"{call}: ranks {other} got other {what} than rank 0, expected the same on every rank"
        )
