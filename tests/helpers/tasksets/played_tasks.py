"""Tasks, good and hostile; `name` says what each does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

PLAYS = ("counts", "raises", "hangs", "not_a_number", "plays_twice", "plays_nothing")


class PlayConfig(vf.TasksetConfig):
    """The tasks by name."""

    plays: list[str] = Field(default=[*PLAYS])


class PlayTask(vf.Task[vf.TaskData]):
    """Rewarded by what its name says."""

    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        """Number of characters of the last answer."""
        if self.data.name == "raises":
            raise KeyError("no answer")
        if self.data.name == "hangs":
            await asyncio.Event().wait()
        return float("nan") if self.data.name == "not_a_number" else len(trace.last_reply or "")

    @vf.metric
    async def measured(self, trace: vf.Trace) -> dict[str, float]:
        """Number of calls; and a name as judges of the package have it."""
        return {"calls": float(trace.num_turns), "judge/is brief": 1.0}


class PlayTaskset(vf.Taskset[PlayTask, PlayConfig]):
    """A task for each name."""

    def load(self) -> Iterator[PlayTask]:
        """In the order of the names."""
        for name in self.config.plays:
            data = {"name": name, "prompt": f"Play {name}", "system_prompt": "Be brief."}
            yield PlayTask(vf.TaskData.model_validate(data), self.config.task)


class PlayEnvConfig(vf.EnvConfig):
    """One seat."""

    player: vf.AgentConfig = vf.AgentConfig()


class PlayEnv(vf.Env[PlayEnvConfig]):
    """Asks once more."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Two calls of one conversation; or of two, or none."""
        if task.data.name == "plays_nothing":
            return
        for _ in range(2 if task.data.name == "plays_twice" else 1):
            async with agents.player.interaction(task) as player:
                segment = await player.turn()
                if not segment.terminated:
                    await player.turn("Are you sure?")


__all__ = ["PlayEnv", "PlayTaskset"]
