"""Tasks, good and hostile; `name` says what each does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

PLAYS = (
    "counts",
    "continues",
    "rewards_twice",
    "raises",
    "hangs",
    "is_late",
    "not_a_number",
    "plays_twice",
    "plays_nothing",
)


class PlayConfig(vf.TasksetConfig):
    """The tasks by name."""

    plays: list[str] = Field(default=[*PLAYS])


class PlayTask(vf.Task[vf.TaskData]):
    """Rewarded by what its name says."""

    @vf.reward
    async def length(self, trace: vf.Trace) -> float | dict[str, float]:
        """Number of characters of the last answer."""
        size = float(len(trace.last_reply or ""))
        match self.data.name:
            case "raises":
                raise KeyError("no answer")
            case "hangs" | "is_late":
                await asyncio.Event().wait()
            case "not_a_number":
                return float("nan")
            case "rewards_twice":
                return {"length": size, "polite": 0.5}
        return size

    @vf.metric
    async def measured(self, trace: vf.Trace) -> dict[str, float]:
        """Number of calls; and a name as judges of the package have it."""
        return {"calls": float(trace.num_turns), "judge/is brief": 1.0}


class PlayTaskset(vf.Taskset[PlayTask, PlayConfig]):
    """A task for each name."""

    def load(self) -> Iterator[PlayTask]:
        """In the order of the names."""
        for name in self.config.plays:
            prompt: str | list[vf.Message] = f"Play {name}"
            if name == "continues":
                prompt = [
                    vf.UserMessage(content="Play"),
                    vf.AssistantMessage(content="What?"),
                    vf.UserMessage(content=name),
                ]
            limit = vf.TaskTimeout(scoring=0.1 if name == "is_late" else None)
            texts = {"name": name, "prompt": prompt, "system_prompt": "Be brief."}
            data = vf.TaskData.model_validate({**texts, "timeout": limit})
            yield PlayTask(data, self.config.task)


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
