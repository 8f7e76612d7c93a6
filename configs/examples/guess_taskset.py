"""The game of agent.py as an environment of the package verifiers: 210 tasks, each a range and a
number in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class GuessConfig(vf.TasksetConfig):
    """Settings, which `turns.options` names."""

    guesses: int = 4
    higher: str = "higher"
    lower: str = "lower"


class GuessData(vf.TaskData):
    """A game; the prompt is the range, such as "38"."""

    low: int
    high: int
    number: int
    guesses: int
    answers: tuple[str, str]


class GuessTask(vf.Task[GuessData]):
    """A game that the policy plays."""


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    """All ranges of digits, and each number of them."""

    def load(self) -> Iterator[GuessTask]:
        """The games, always in the same order."""
        config = self.config
        answers = config.higher, config.lower
        for low in range(10):
            for high in range(low + 1, 10):
                for number in range(low, high + 1):
                    game = {
                        "prompt": f"{low}{high}",
                        "low": low,
                        "high": high,
                        "number": number,
                        "guesses": config.guesses,
                        "answers": answers,
                    }
                    yield GuessTask(GuessData.model_validate(game), config.task)


class GuessEnvConfig(vf.EnvConfig):
    """The policy has the only seat."""

    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Answers guesses."""

    async def run(self, task: vf.Task[Any], agents: vf.Agents) -> None:
        """One game: 1 for the number; without it half of the share of guesses that were still
        possible."""
        game: GuessData = task.data
        higher, lower = game.answers
        low, high = game.low, game.high
        possible = 0
        reward = 0.0
        answer = None
        async with agents.player.interaction(task) as player:
            for _ in range(game.guesses):
                segment = await (player.turn() if answer is None else player.turn(answer))
                if segment.terminated:
                    break
                said = segment.last_reply
                guess = int(said) if said.isdecimal() else None
                if guess == game.number:
                    reward = 1.0
                    break
                answer = "?"
                if guess is not None:
                    possible += low <= guess <= high
                    answer = higher if guess < game.number else lower
                    if guess < game.number:
                        low = max(low, guess + 1)
                    else:
                        high = min(high, guess - 1)
        player.trace.record_reward("guess", reward or 0.5 * possible / game.guesses)


__all__ = ["GuessEnv", "GuessTaskset"]
