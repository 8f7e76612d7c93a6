"""``python -m benchmarks.turns``: how much longer trajectories take when environments are slow.

Many trajectories of several turns on the embedded engine, with random weights: once with
environments that answer at once, once with a latency. With ``--agents`` they are agents instead,
which call the policy through the official OpenAI client. A turn that waits holds up no other, so
the time should grow by little; the bar is 1.3 times. It is held against the processor's time and
that of waiting, so that other programs on the machine count little. The workers are not in the
processor's time, so wall time, which is printed too, has the cost of a whole run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pyrl_ext.data.agent import AgentHost
from pyrl_ext.data.environment import EnvironmentHost, StepResult
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.data.workers import Pool
from pyrl_ext.plan.schema.turns import NamedEnvironment, Turns
from pyrl_ext.rollout.agents.agent_feed import MODEL as MODEL_NAME
from pyrl_ext.rollout.agents.agent_feed import AgentFeed, AgentsConfig
from pyrl_ext.rollout.agents.chat_format import ChatFormat
from pyrl_ext.rollout.agents.endpoint import Endpoint
from pyrl_ext.rollout.agents.protocol import Rules
from pyrl_ext.rollout.agents.trajectory import TrajectoryConfig
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.turns.conversation import ConversationConfig
from pyrl_ext.rollout.turns.turn_queue import Feed, converse
from pyrl_ext.rollout.turns.waiting_feed import WaitingFeed
from pyrl_ext.samples import Prompt, Sampling

MODEL = Path(__file__).parents[1] / "configs" / "tiny"
BAR = 1.3


class Slow:
    """Answers after a latency, for a number of turns; the prompt says both."""

    def start(self, prompt: Prompt) -> None:
        """The prompt is the first context."""
        self.left, self.latency = prompt.answer

    async def step(self, tokens: list[int], text: str) -> StepResult:
        """Answer with two tokens."""
        await asyncio.sleep(self.latency)
        self.left -= 1
        return StepResult([9, 9], 1.0, self.left == 0)


async def slow_agent(client: Any, prompt: Prompt) -> float:
    """Calls the policy, with a latency after each answer; the prompt says how often."""
    turns, latency = prompt.answer
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    for _ in range(turns):
        answer = await client.chat.completions.create(model=MODEL_NAME, messages=messages)
        await asyncio.sleep(latency)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "+"})
    return 1.0


class Players:
    """Environments, or agents, of a benchmark: makes their feeds."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        workers = min(8, os.cpu_count() or 1)
        longest = 8 + options.turns * (options.tokens + 5)
        limits = {"max_turns": options.turns, "max_tokens": longest, "max_observation_tokens": 2}
        tokenizer = load_tokenizer(MODEL)
        if not options.agents:
            environments = {"": NamedEnvironment("benchmarks.turns:Slow", {})}
            host = partial(EnvironmentHost.load, environments)
            self.pool = Pool("turns.environment: 'slow'", host, workers)
            turns = Turns(environment="slow", **limits)
            given = self.pool, environments, tokenizer, 128, (), turns, options.tokens
            self.environments = ConversationConfig(*given, in_waves=True)
            return
        host = partial(AgentHost.load, "benchmarks.turns:slow_agent", (), {}, None)
        self.pool = Pool("turns.agent: 'slow_agent'", host, workers)
        endpoint = Endpoint(Rules(MODEL_NAME, 1.0, 1.0, (), options.tokens, 128))
        endpoint.start()
        turns = Turns(agent="slow_agent", **limits)
        given = ChatFormat.load(tokenizer), tokenizer, (), turns, options.tokens
        self.agents = AgentsConfig(endpoint, self.pool, TrajectoryConfig(*given), in_waves=True)

    def feed(self, turns: int, latency: float) -> WaitingFeed[Any]:
        """Trajectories of so many turns."""
        count = range(self.options.trajectories)
        prompts = [Prompt(i, (30, 40, 50, 60), (turns, latency), "5+6=") for i in count]
        if self.options.agents:
            return AgentFeed(prompts, 1, self.agents)
        return Feed(prompts, 1, self.environments)


def seconds(
    engine: HFEngine, feed: WaitingFeed[Any], turns: int, tokens: int
) -> tuple[float, float, float]:
    """Processor time of all trajectories, time in which the engine only waited, and wall time."""
    sampling = Sampling(max_new_tokens=tokens)
    began = time.process_time()
    clock = time.monotonic()
    over = [each for _, some in converse(engine, feed, sampling) for each in some]
    spent = time.process_time() - began
    wall = time.monotonic() - clock
    if len(over) != feed.trajectories or any(each.number_of_turns != turns for each in over):
        raise RuntimeError("benchmarks.turns: not every trajectory had all its turns")
    return spent, feed.waited, wall


def main() -> int:
    """Prints both times and their ratio; a missed bar is printed, other machines are slower."""
    parser = argparse.ArgumentParser("benchmarks.turns", description=__doc__)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="of a turn")
    parser.add_argument("--latency", type=float, default=0.2, help="of an environment [s]")
    parser.add_argument("--sequences", type=int, default=64, help="that the engine runs at once")
    parser.add_argument("--agents", action="store_true", help="agents, not environments")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    engine = HFEngine(MODEL, max_num_seqs=options.sequences)
    paper = Destinations.from_config(MODEL)
    weights = {name: torch.randn(paper.shape(name)) / 20 for name in paper.parts}
    engine.load_weights(weights.items(), 0)
    players = Players(options)
    shape = options.turns, options.tokens
    seconds(engine, players.feed(1, 0.0), 1, options.tokens)  # warm
    alone, _, wall_alone = seconds(engine, players.feed(options.turns, 0.0), *shape)
    slow, waited, wall = seconds(engine, players.feed(options.turns, options.latency), *shape)
    slow += waited
    ratio = slow / alone
    print(
        f"{options.trajectories} trajectories of {options.turns} turns of {options.tokens} tokens, "
        f"{options.sequences} at once: {alone:.1f} s of the processor with answers at once; "
        f"{slow:.1f} s with {options.latency:g} s of latency each, {waited:.1f} s of it waiting: "
        f"{ratio:.2f} times, {'within' if ratio <= BAR else 'beyond'} {BAR}. Wall time: "
        f"{wall_alone:.1f} and {wall:.1f} s, {wall / wall_alone:.2f} times"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
