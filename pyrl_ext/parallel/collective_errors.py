"""Agreement of ranks before they go on: none has failed, and all do the same."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from pyrl_ext.parallel.waiting import Stopped


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

    Other ranks wait at the end of the block, also for one whose block raises.
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
        group:  None = this process alone.

    Raises: RuntimeError naming the ranks and their errors; `Stopped` if a stop signal ended a wait
        of one; in a single process the error itself.
    Communicates: a line of text of every rank.
    """
    if group is None:
        if error is not None:
            raise error
        return
    failed = None if error is None else f"{type(error).__name__}: {error}"
    stop = str(error) if isinstance(error, Stopped) else None
    states = gather_objects((failed, stop, digest), group)
    stops = [text for _, text, _ in states if text is not None]
    if stops:
        raise Stopped(stops[0]) from error
    lines = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(states) if text is not None]
    if lines:
        raise RuntimeError(
            f"{call}: {len(lines)} of {len(states)} ranks failed, expected none\n  "
            + "\n  ".join(lines)
        ) from error
    other = [rank for rank, (_, _, sent) in enumerate(states) if sent != states[0][2]]
    if other:
        raise RuntimeError(
            f"{call}: ranks {other} got other {what} than rank 0, expected the same on every rank"
        )
