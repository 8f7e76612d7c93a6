"""The run that a server belongs to: two trainers would replace each other's weights."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Run(NamedTuple):
    """A run, as its servers know it.

    Args:
        id: the same in every process of the run, and after it is resumed
        name: host and folder
    """

    id: str
    name: str

    @classmethod
    def of(cls, folder: str | Path) -> Run:
        """The run of a folder; without the folder: of this process alone."""
        path = Path(folder).absolute()
        number = path.stat().st_ino if path.exists() else f"process {os.getpid()}"
        digest = hashlib.sha256(f"{path} {number}".encode()).hexdigest()
        return cls(digest[:16], f"{socket.gethostname()}:{path}")


def salt_of(run: str, version: int) -> str:
    """The salt of requests to the weights of one version of one run: what a server cached for other
    weights is not used for them.

    Args:
        run: folder of the run; its path is what all ranks know of it
    """
    return f"{hashlib.sha256(str(Path(run).absolute()).encode()).hexdigest()[:16]} {version}"


@dataclass
class Holder:
    """The run that published to a server last, until it ends."""

    run: Run | None = None

    def claim(self, run: Run) -> str:
        """Give the server to a run. Returns: the name of another one that has it; "": none has."""
        if self.run is not None and self.run.id != run.id:
            return self.run.name
        self.run = run
        return ""

    def release(self, run: Run) -> str:
        """Take the server from a run, if it has it. Returns: ""."""
        if self.run is not None and self.run.id == run.id:
            self.run = None
        return ""
