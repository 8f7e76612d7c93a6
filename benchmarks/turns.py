"""``python -m benchmarks.turns``: how much longer trajectories take when environments are slow.

Many trajectories of several turns on the embedded engine, with random weights: once with
environments that answer at once, once with a latency. A turn that waits holds up no other, so the
time should grow by little; the bar is 1.3 times. It is held against the processor's time and that
of waiting, so that other programs on the machine count little; wall time is printed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import torch

from pyrl_ext.data.environment import Reader, StepResult
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.plan.schema.turns import Turns
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.turns.conversation import ConversationConfig
from pyrl_ext.rollout.turns.turn_queue import Feed, converse
from pyrl_ext.samples import Prompt, Sampling

MODEL = Path(__file__).parents[1] / "configs" / "tiny"
BAR = 1.3


class Slow:
    """Answers after ``latency`` seconds, for ``turns`` turns."""

    def __init__(self, turns: int, latency: float):
        self.left = turns
        self.latency = latency

    def start(self, prompt: Prompt) -> None:
        """The prompt is the first context."""

    async def step(self, tokens: list[int], text: str) -> StepResult:
        """Answer with two tokens."""
        await asyncio.sleep(self.latency)
        self.left -= 1
        return StepResult([9, 9], 1.0, self.left == 0)


def seconds(
    engine: HFEngine, options: argparse.Namespace, latency: float
) -> tuple[float, float, float]:
    """Processor time of all trajectories, time in which the engine only waited, and wall time."""
    tokenizer = load_tokenizer(MODEL)
    longest = 4 + options.turns * (options.tokens + 2)
    turns = Turns(environment="slow", max_turns=options.turns, max_tokens=longest)
    manner = ConversationConfig(
        lambda: Slow(options.turns, latency),
        Reader(tokenizer, 128, 2),
        tokenizer.decode,
        (),
        turns,
        options.tokens,
    )
    prompts = [Prompt(i, (30, 40, 50, 60)) for i in range(options.trajectories)]
    feed = Feed(prompts, 1, manner)
    sampling = Sampling(max_new_tokens=options.tokens)
    began = time.process_time()
    clock = time.monotonic()
    over = [each for _, some in converse(engine, feed, sampling) for each in some]
    spent = time.process_time() - began
    wall = time.monotonic() - clock
    if len(over) != len(prompts) or any(len(each.turns) != options.turns for each in over):
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    engine = HFEngine(MODEL, max_num_seqs=options.sequences)
    paper = Destinations.from_config(MODEL)
    weights = {name: torch.randn(paper.shape(name)) / 20 for name in paper.parts}
    engine.load_weights(weights.items(), 0)
    seconds(engine, argparse.Namespace(**vars(options) | {"turns": 1}), 0.0)  # warm
    alone, _, wall_alone = seconds(engine, options, 0.0)
    slow, waited, wall = seconds(engine, options, options.latency)
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
