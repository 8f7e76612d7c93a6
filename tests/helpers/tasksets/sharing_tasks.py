"""A task whose tool all tasks share."""

from __future__ import annotations

import verifiers.v1 as vf
from calc_tools import CalcTools


class ShareTask(vf.Task[vf.TaskData]):
    """The sum of 1 and 3."""

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """True if the last answer is the sum."""
        return float((trace.last_reply or "") == "4")


class ShareTaskset(vf.Taskset[ShareTask, vf.TasksetConfig]):
    """One task."""

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        """The tool."""
        return [CalcTools(vf.ToolsetConfig())]

    def load(self) -> list[ShareTask]:
        """The task."""
        return [ShareTask(vf.TaskData.model_validate({"prompt": "1+3"}), self.config.task)]


__all__ = ["ShareTaskset"]
