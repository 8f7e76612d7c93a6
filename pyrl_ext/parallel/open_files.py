"""The limit of open files of this process, and whether another one has reached its own."""

from __future__ import annotations

import resource
from collections import Counter

import psutil

_OTHERS = 1024  # files that are open for other reasons
SERVER_CONNECTIONS = 16_384  # that an engine's server may have


def allow_open_files(number: int) -> None:
    """Raise this process's limit, as far as it may, to hold so many more files and connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _OTHERS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def none_free(pid: int) -> str | None:
    """How many files a process has open, and who has most connections to it, if it may open no
    further one; None: it may, or is not this user's."""
    try:
        process = psutil.Process(pid)
        count = process.num_fds()
        limit = process.rlimit(psutil.RLIMIT_NOFILE)[0]
        peers = Counter(c.raddr.ip for c in process.net_connections("tcp") if c.raddr)
    except psutil.Error:
        return None
    if count < limit:
        return None
    of_peer = ", {1} of them connections of {0}".format(*peers.most_common(1)[0]) if peers else ""
    return f"{count:,} files open{of_peer}, expected fewer than its limit of {limit:,}"
