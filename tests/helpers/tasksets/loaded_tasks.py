"""Tasks that load, or do not; the setting `does` says how."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import verifiers.v1 as vf


class LoadedConfig(vf.TasksetConfig):
    """Settings: how the taskset loads, its number of tasks, and how they set up."""

    does: str = "counts"
    tasks: int = 3
    setup: str = ""


class LoadedTask(vf.Task[vf.TaskData]):
    """A task without rewards."""

    @property
    def key(self) -> str:
        """The same of all tasks, in one case."""
        return "task" if self.data.name == "repeats keys" else super().key

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Sleep in another process, in one case."""
        if self.data.description == "sleep":
            await runtime.run(["sleep", "3600"], {})


class LoadedTaskset(vf.Taskset[LoadedTask, LoadedConfig]):
    """Tasks of which every sixteenth has the same data."""

    def load(self) -> Iterator[LoadedTask]:
        """The tasks."""
        does = self.config.does
        if does == "raises":
            raise KeyError("no file")
        if does == "exits":
            sys.exit("goodbye")
        for number in range(self.config.tasks):
            prompt = number if does == "breaks" else str(number % 16)
            data = {"prompt": prompt, "name": does, "description": self.config.setup}
            yield LoadedTask(vf.TaskData.model_validate(data), self.config.task)


__all__ = ["LoadedTaskset"]
