"""Tasks of a taskset that says that it has no end."""

from __future__ import annotations

from loaded_tasks import LoadedTaskset


class EndlessTaskset(LoadedTaskset):
    """More tasks than are used."""

    INFINITE = True


__all__ = ["EndlessTaskset"]
