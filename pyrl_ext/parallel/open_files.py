"""The limit of open files of this process."""

from __future__ import annotations

import resource

_OTHERS = 1024  # files that are open for other reasons


def allow_open_files(number: int) -> None:
    """Raise this process's limit, as far as it may, to hold so many more files and connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _OTHERS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
