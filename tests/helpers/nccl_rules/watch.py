"""Looks at the lists of running ranks for ranks that wait for each other."""

from __future__ import annotations

import time
from pathlib import Path

from tests.helpers.nccl_rules.checks import path_of, problems, read
from tests.helpers.nccl_rules.simulation import Simulation

QUIET = 10.0  # s without a call of any rank, after which it looks


class Watch:
    """The ranks of one test.

    Args:
        folder: to which they write.
    """

    def __init__(self, folder: Path, world_size: int):
        self.folder = folder
        self.world_size = world_size
        self._written = -1
        self._since = time.monotonic()

    @property
    def _paths(self) -> list[Path]:
        return [path_of(self.folder, rank) for rank in range(self.world_size)]

    def stuck(self) -> str:
        """Who waits for whom, if no rank can go on; else nothing. Looks once in each silence."""
        if not all(path.exists() for path in self._paths):
            return ""
        written = sum(path.stat().st_size for path in self._paths)
        now = time.monotonic()
        if written != self._written:
            self._written = written
            self._since = now
            return ""
        if now - self._since < QUIET:
            return ""
        self._since = float("inf")
        simulation = Simulation(read(self.folder, self.world_size))
        if len(simulation.blocked) < self.world_size:
            return ""
        return "\n".join(["nccl_rules: all ranks wait for each other", *simulation.report()])

    def report(self) -> str:
        """All that ranks which have ended did against the rules; else nothing."""
        found = problems(read(self.folder, self.world_size))
        head = f"nccl_rules: {len(found)} problems, expected none"
        return "\n".join([head, *found]) if found else ""
