"""A game of several turns: guess a number from the answers "higher" and "lower"."""

from __future__ import annotations

import re

from pyrl_ext.data.environment import StepResult
from pyrl_ext.prompt import Prompt


class Guess:
    """The number is the prompt's ``answer``; the last number of a response is the guess.

    The reward is 1 for the number. Without it, it is at most a half: the share of guesses that
    agreed with all answers before them, halved.

    Args:
        guesses: turns of a game
        higher, lower: answers to a guess below and above the number
        unclear: answer to a response without a number
    """

    def __init__(
        self,
        guesses: int = 4,
        higher: str = "higher",
        lower: str = "lower",
        unclear: str = "?",
    ):
        self.guesses = guesses
        self.answers = (higher, lower, unclear)
        self.number = 0
        self.range = (float("-inf"), float("inf"))
        self.made = 0

    def start(self, prompt: Prompt) -> None:
        """Take the number; the prompt is all that the policy sees.

        Raises:
            ValueError: the answer is no whole number
        """
        self.number = int(prompt.answer)
        low, high = (prompt.meta or {}).get("range", self.range)
        self.range = (low, high)

    def step(self, tokens: list[int], text: str) -> StepResult:
        """Compare the guess with the number."""
        self.made += 1
        found = re.findall(r"\d+", text)
        guess = int(found[-1][:18]) if found else None
        if guess == self.number:
            return StepResult(None, 1.0 - self._earned, True)
        low, high = self.range
        reward = 0.0
        done = self.made == self.guesses
        if guess is None:
            answer = self.answers[2]
        else:
            reward = 0.5 / self.guesses if low <= guess <= high else 0.0
            answer = self.answers[guess > self.number]
            self.range = (low, min(high, guess - 1))
            if guess < self.number:
                self.range = (max(low, guess + 1), high)
        self._earned += reward
        return StepResult(answer, reward, done)

    _earned = 0.0
