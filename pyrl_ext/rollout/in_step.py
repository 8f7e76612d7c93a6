"""The ranks of one engine leave its stream together if one of them fails between two samples.

A sample, a reward or the progress line may fail. An error inside a forward pass still leaves the
other ranks in the engine's collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from pyrl_ext.rollout.prompt_groups import Event

_EVENT, _END, _FAILED = range(3)


def for_each_in_step(
    events: Iterator[Event], take: Callable[[Event], bool], holders: dist.ProcessGroup | None
) -> bool:
    """Calls ``take`` with each event until it returns True or none is left.

    The engine computes each event on all ``holders`` together: a rank that left on its own would
    leave the others in a collective of the engine, which may have no timeout. So they agree after
    each event that none of them has failed.

    Args:
        events: the same ones on all holders
        take: returns the same on all holders, whose other work may differ
        holders: the ranks that hold the engine together; None: this rank alone

    Returns: False if another rank failed, which raises its error.

    Raises: what ``events`` and ``take`` raise; RuntimeError on all holders if their events differ.

    Communicates: holders, an all-gather of two numbers for each event, over the CPU.
    """
    while True:
        error: Exception | None = None
        event: Event | None = None
        over = True
        try:
            event = next(events, None)
            over = event is None or take(event)
        except Exception as caught:  # the others have to know
            error = caught
            if holders is not None:  # the others may be in a collective that this rank never joins
                print(f"generate_on_ranks: {error}", file=sys.stderr, flush=True)
        any_failed = holders is not None and _any_failed(holders, event, error)
        if error is not None:
            raise error
        if any_failed:
            return False
        if over:
            return True


def _any_failed(holders: dist.ProcessGroup, event: Event | None, error: Exception | None) -> bool:
    """True if a rank failed in this event. Raises: RuntimeError if ranks got different events."""
    state = _FAILED if error is not None else _END if event is None else _EVENT
    mine = torch.tensor([state, -1 if event is None else event.prompt_id])
    everyone = torch.empty(2 * holders.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(everyone, mine, group=holders)
    states = everyone.view(-1, 2).tolist()
    if any(each == _FAILED for each, _ in states):
        return True
    if any(each != states[0] for each in states):
        ranks = dist.get_process_group_ranks(holders)
        got = ["none" if each == _END else prompt for each, prompt in states]
        raise RuntimeError(
            f"generate_on_ranks: ranks {ranks} of one engine got samples of prompts {got}, "
            "expected the same prompt on each; an engine has to return samples in one order on all "
            "its ranks"
        )
    return False
