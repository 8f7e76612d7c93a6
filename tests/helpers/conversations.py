"""Conversations with a scripted engine over the tiny tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.data.workers import Pool
from pyrl_ext.plan.schema.turns import NamedEnvironment, Turns
from pyrl_ext.rollout.turns.conversation import Conversation, ConversationConfig
from pyrl_ext.rollout.turns.turn_queue import Feed, converse
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.environments import host
from tests.helpers.scripted import ScriptedEngine
from tests.helpers.tiny import CONFIG

TOKENIZER = load_tokenizer(CONFIG.parent / "tiny")
EOS = 1


def three_then_stop(prompt: int, index: int, place: int) -> int:
    """A stop token at every fourth place, else a digit."""
    return EOS if place % 4 == 3 else 25 + (7 * prompt + 3 * index + place) % 10


@cache
def pool() -> Pool:
    """One worker for environments that prompts carry."""
    return Pool("turns.environment: 'test'", host)


def carrying(prompt: Prompt, make: Callable[[], Any]) -> Prompt:
    """The prompt with a function that makes its environment in a worker."""
    return replace(prompt, meta={"make": make})


def config(in_waves: bool = False, **turns: Any) -> ConversationConfig:
    """Conversations of at most 32 tokens, four a turn."""
    options: dict[str, Any] = {
        "max_tokens": 32,
        "max_observation_tokens": 8,
        "max_turns": 4,
    } | turns
    section = Turns(environment="test", **options)
    environments = {"": NamedEnvironment("test", {})}
    given = pool(), environments, TOKENIZER, 128, (EOS,), section, 4
    return ConversationConfig(*given, in_waves)


def hold(
    make: Callable[[], Any] | Mapping[int, Callable[[], Any]],
    engine: ScriptedEngine | None = None,
    prompts: int = 2,
    size: int = 2,
    sampling_mask: bool = False,
    **turns: Any,
) -> tuple[dict[tuple[int, int], Conversation], Feed]:
    """All conversations of ``prompts``, by (prompt id, index), and their feed."""
    made = make if isinstance(make, Mapping) else dict.fromkeys(range(prompts), make)
    asked = [carrying(Prompt(i, (30 + i % 5, 40)), made[i]) for i in range(prompts)]
    feed = Feed(asked, size, config(**turns))
    engine = engine or ScriptedEngine(three_then_stop)
    sampling = Sampling(
        max_new_tokens=4, stop_ids=(EOS,), samples_per_prompt=size, sampling_mask=sampling_mask
    )
    over = [each for _, some in converse(engine, feed, sampling) for each in some]
    return {(each.prompt.id, each.index): each for each in over}, feed


def trained(conversation: Conversation) -> list[Sample]:
    """The samples of a trajectory that is not dropped."""
    assert conversation.samples is not None, conversation.dropped
    return conversation.samples


def reason(conversation: Conversation) -> str:
    """Why a trajectory is dropped."""
    assert conversation.dropped is not None
    return conversation.dropped.reason
