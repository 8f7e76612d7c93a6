"""Ctrl-C: stop after the running step, with a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from pyrl_ext.parallel.topology import launched
from pyrl_ext.parallel.waiting import stop_waits


class Interrupt:
    """Ctrl-C asks for a stop after the running step; a second Ctrl-C stops at once. In a wait
    (`parallel/waiting.py`) the first one stops at once.

    Under torchrun one Ctrl-C arrives twice, from the terminal and from torchrun: signals within
    ``SAME`` seconds count as one. SIGTERM is treated as Ctrl-C.
    """

    SAME = 2.0

    def __init__(self) -> None:
        self.asked_at: float | None = None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is not None:
            if now - self.asked_at > self.SAME:
                raise KeyboardInterrupt
            return
        self.asked_at = now
        if stop_waits(number) or launched("RANK", 0):
            return
        print("\nstopping after this step, with a checkpoint; Ctrl-C again stops now", flush=True)

    @contextmanager
    def handled(self) -> Generator[Interrupt]:
        """Handle SIGINT and SIGTERM inside the block; then restore the handlers."""
        before = [signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)]
        try:
            yield self
        finally:
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                signal.signal(number, handler)

    def agreed(self) -> bool:
        """True if any rank was asked to stop; the same answer on every rank.

        Communicates: one number over the world, between hosts.
        """
        asked = torch.tensor(float(self.asked_at is not None))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked.item())
