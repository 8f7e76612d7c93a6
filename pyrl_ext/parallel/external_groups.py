"""Process groups next to torch's default one, of processes that share nothing but a store."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pyrl_ext.parallel.ports import family_of


def own_address(host: str | None, port: int | None) -> str:
    """This host's address on the way to another; no packet is sent. Raises: OSError for no way."""
    for family, kind, number, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, number) as way:
            way.connect(place)
            return way.getsockname()[0]
    raise OSError(f"no address of {host}")


def listening(host: str) -> socket.socket:
    """A socket for the store of a group: without one it listens on every address of the host.

    Raises: OSError.
    """
    door = socket.socket(family_of(host))
    door.bind((host, 0))
    door.listen()
    return door


def store_of(
    host: str, port: int, size: int, limit: timedelta, door: socket.socket | None = None
) -> Any:
    """The store of a group.

    Args:
        host, port: where it listens
        size: number of processes
        limit: longest time to reach it, and for an answer
        door: the first process's, from `listening`; others connect to it
    """
    number = None if door is None else door.detach()
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, size, door is not None, limit, False, master_listen_fd=number
    )


def gloo_group(store: Any, rank: int, size: int, host: str, limit: timedelta) -> Any:
    """A group on a CPU; waits until all are in it.

    Args:
        host: address of this host, by which the others reach it
        limit: longest time for that, and of an operation
    """
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, rank, size, options)
