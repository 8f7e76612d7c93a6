"""A task with a tool."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from calc_tools import CalcTools


class AddTask(vf.Task[vf.TaskData]):
    """The sum of 1 and 3, by the tool."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """The tool."""
        return [CalcTools(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """True if the last answer is the sum."""
        return float((trace.last_reply or "") == "4")


class AddTaskset(vf.Taskset[AddTask, vf.TasksetConfig]):
    """One task."""

    def load(self) -> Iterator[AddTask]:
        """The task."""
        yield AddTask(vf.TaskData.model_validate({"prompt": "1+3"}), self.config.task)


__all__ = ["AddTaskset"]
