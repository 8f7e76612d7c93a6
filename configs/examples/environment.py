"""An environment with a tool: a question, a calculator, an answer."""

import asyncio
import re

CALL = "="


async def calculate(question):
    """The tool. A real one would wait for a server or a sandbox here: others go on meanwhile."""
    await asyncio.sleep(0)
    first, second = re.fullmatch(r"(\d+)\+(\d+)", question).groups()
    return str(int(first) + int(second))


class Calculator:
    """Rewards a first call a little, and the right answer with the rest up to 1.

    Args:
        for_call: reward of the call
    """

    def __init__(self, for_call=0.2):
        self.for_call = for_call
        self.earned = 0.0

    def start(self, prompt):
        """Nothing to read besides the prompt: an observation returned here would follow it."""
        self.question = prompt.text
        self.answer = prompt.answer

    async def step(self, tokens, text):
        """(observation, reward, done) for what the policy wrote; rewards of turns add up."""
        if text == CALL and not self.earned:
            self.earned = self.for_call
            return await calculate(self.question), self.for_call, False
        return None, (1 - self.earned) * (text.strip() == self.answer), True
