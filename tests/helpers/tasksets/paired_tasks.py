"""A taskset with two agents."""

from __future__ import annotations

import verifiers.v1 as vf
from loaded_tasks import LoadedTaskset


class PairConfig(vf.EnvConfig):
    """Two seats."""

    one: vf.AgentConfig = vf.AgentConfig()
    two: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    """Never plays."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Not called."""


__all__ = ["LoadedTaskset", "Pair"]
