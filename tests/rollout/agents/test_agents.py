"""Agents of the official client in worker processes: what becomes of their calls, and of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from pyrl_ext.data.agent import AgentHost
from pyrl_ext.data.workers import Pool
from pyrl_ext.plan.schema.turns import Turns
from pyrl_ext.rollout.agents.agent_feed import AgentFeed, AgentsConfig
from pyrl_ext.rollout.agents.chat_format import ChatFormat
from pyrl_ext.rollout.agents.endpoint import Endpoint
from pyrl_ext.rollout.agents.protocol import Rules
from pyrl_ext.rollout.agents.trajectory import AgentTrajectory, TrajectoryConfig
from pyrl_ext.rollout.turns.turn_queue import converse
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.conversations import EOS, TOKENIZER, three_then_stop
from tests.helpers.scripted import ScriptedEngine

pytestmark = pytest.mark.multiprocess

AGENT = "tests.helpers.played_agents:run"
USER = TOKENIZER.get_vocab()["<|user|>"]
ASSISTANT = TOKENIZER.get_vocab()["<|assistant|>"]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    rules = Rules("policy", 1.0, 1.0, (), 4, 128)
    with closing(Endpoint(rules)) as server:
        server.start()
        yield server


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    host = partial(AgentHost.load, AGENT, (), {}, None)
    with closing(Pool("turns.agent: 'test'", host)) as workers:
        yield workers


def config_of(endpoint: Endpoint, pool: Pool, **turns: Any) -> AgentsConfig:
    options: dict[str, Any] = {"max_tokens": 40, "max_turns": 4, "timeout": 60.0} | turns
    section = Turns(agent=AGENT, **options)
    chat = ChatFormat.load(TOKENIZER, "auto")
    trajectory = TrajectoryConfig(chat, TOKENIZER, (EOS,), section, 4)
    return AgentsConfig(endpoint, pool, trajectory)


def play(
    config: AgentsConfig, plays: Mapping[int, str], size: int = 1
) -> tuple[dict[tuple[int, int], AgentTrajectory], AgentFeed, ScriptedEngine]:
    """All trajectories by (prompt id, index); ``plays`` names the agent of each prompt."""
    prompts = [Prompt(i, (30,), text=f"{i}3", meta={"play": name}) for i, name in plays.items()]
    feed = AgentFeed(prompts, size, config)
    engine = ScriptedEngine(three_then_stop)
    sampling = Sampling(max_new_tokens=4, stop_ids=(EOS,), samples_per_prompt=size)
    over = [each for _, some in converse(engine, feed, sampling) for each in some]
    return {(each.prompt.id, each.index): each for each in over}, feed, engine


def trained(trajectory: AgentTrajectory) -> list[Sample]:
    assert trajectory.samples is not None, trajectory.dropped
    return trajectory.samples


def dropped(trajectory: AgentTrajectory) -> tuple[str, str]:
    assert trajectory.dropped is not None
    return trajectory.dropped.reason, trajectory.dropped.message


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def test_calls_that_continue_each_other_are_one_sample(endpoint: Endpoint, pool: Pool):
    plays = {0: "three_calls", 1: "components", 2: "streams"}
    over, feed, engine = play(config_of(endpoint, pool), plays, size=2)
    assert len(over) == 6 and feed.counts["begun"] == 6 and feed.counts["turns"] == 2 * (3 + 1 + 2)
    (sample,) = trained(over[0, 1])
    sampled = [sample.tokens[begin:end].tolist() for begin, end in sample.spans]
    expected = [turn for turn in engine.turns if (turn.prompt.id, turn.index) == (0, 1)]
    for turn, (begin, _), tokens in zip(expected, sample.spans, sampled, strict=True):
        assert list(turn.prompt.tokens) == sample.tokens[:begin].tolist()
        assert tokens == [
            three_then_stop(0, 1, place) for place in range(begin, begin + len(tokens))
        ]
    messages = [USER, *encode("03"), ASSISTANT]
    for tokens in sampled:
        ends = [] if tokens[-1] == EOS else [EOS]
        messages += [*tokens, *ends, USER, *encode("+"), ASSISTANT]
    assert sample.tokens.tolist() == messages[: len(sample.tokens)]
    assert sample.loss_mask.sum() == sum(map(len, sampled)) and len(sampled) == 3
    assert (sample.reward, sample.last, sample.finish_reason) == (0.75, True, "stop")
    (rewarded,) = trained(over[1, 0])
    assert rewarded.reward == 0.75 and rewarded.components == {"answer": 0.5, "form": 0.25}
    assert len(trained(over[2, 0])[0].spans) == 2


def test_conversations_of_a_trajectory_are_samples_with_one_reward(endpoint: Endpoint, pool: Pool):
    config = config_of(endpoint, pool, form="stepwise")
    over, feed, engine = play(config, {0: "edits_history", 1: "sub_agent"})
    first, second = trained(over[0, 0])
    assert (first.turn, first.last, second.turn, second.last) == (0, False, 1, True)
    assert first.reward == second.reward == 1.0
    edited = encode(TOKENIZER.decode(first.response).removesuffix("<eos>") + "1")
    assert second.tokens[: second.prompt_len].tolist() == [
        USER, *encode("03"), ASSISTANT, *edited, EOS, USER, *encode("+"), ASSISTANT,
    ]  # fmt: skip
    assert not second.loss_mask[: second.prompt_len].any()  # what the agent wrote is not trained
    samples = trained(over[1, 0])
    assert [(s.turn, len(s.spans), s.reward) for s in samples] == [(0, 2, 0.5), (2, 2, 0.5)]
    assert {turn.branch for turn in engine.turns if turn.prompt.id == 1} == {0, 1}
    assert len({turn.stream for turn in engine.turns if turn.prompt.id == 1}) == 2
    assert feed.counts["forks"] == 2


def test_rewritten_history_is_refused_where_a_trajectory_is_one_sample(
    endpoint: Endpoint, pool: Pool
):
    over, feed, _ = play(config_of(endpoint, pool), {0: "edits_history"})
    reason, message = dropped(over[0, 0])
    assert reason == "fork" and "Set turns.form: stepwise" in message
    assert message.startswith("tests.helpers.played_agents:run(prompt 0, trajectory 0): ")
    assert feed.counts["dropped/fork"] == 1


def test_limits_are_errors_that_an_agent_may_handle(endpoint: Endpoint, pool: Pool):
    plays = {0: "too_many_calls", 1: "unhandled_limit", 2: "no_room", 3: "no_call", 4: "raises"}
    over, feed, _ = play(config_of(endpoint, pool), plays)
    (sample,) = trained(over[0, 0])
    assert len(sample.spans) == 4 and (sample.reward, sample.finish_reason) == (0.25, "stop")
    assert dropped(over[1, 0])[0] == "turns"
    assert dropped(over[1, 0])[1].endswith("expected at most turns.max_turns 4")
    (short,) = trained(over[2, 0])
    assert (short.reward, short.finish_reason, len(short.spans)) == (0.0, "length", 1)
    assert dropped(over[3, 0])[0] == "calls"
    reason, message = dropped(over[4, 0])
    assert reason == "error" and "raised OSError: no tool" in message
    assert feed.counts["begun"] == 5 and feed.counts["turns"] == 5


def test_agents_that_hang_or_die_are_dropped(endpoint: Endpoint):
    host = partial(AgentHost.load, AGENT, (), {}, None)
    with closing(Pool("turns.agent: 'test'", host, workers=3)) as workers:
        config = config_of(endpoint, workers, timeout=3.0)
        over, feed, _ = play(config, {0: "awaits_forever", 1: "blocks_forever"})
        assert dropped(over[0, 0])[0] == dropped(over[1, 0])[0] == "timeout"
        assert feed.counts["dropped/timeout"] == 2
        over, _, _ = play(config_of(endpoint, workers), {0: "kills_itself"})
        assert dropped(over[0, 0])[0] == "lost"
        over, _, _ = play(config_of(endpoint, workers), {0: "three_calls"})
        assert trained(over[0, 0])


def test_an_agent_begins_again_after_an_error(endpoint: Endpoint, pool: Pool):
    over, feed, engine = play(config_of(endpoint, pool, retries=2), {0: "raises"})
    assert dropped(over[0, 0])[0] == "error"
    assert feed.counts["retries"] == 2
    # the engine may answer a turn of an earlier attempt late, which is no turn of the next one
    assert [turn.number for turn in engine.turns] == [0, 1, 2]


def test_an_error_in_the_thread_of_the_endpoint_ends_the_rollout(endpoint: Endpoint, pool: Pool):
    prompt = Prompt(0, (30,), text="03", meta={"play": "awaits_forever"})
    with closing(AgentFeed([prompt], 1, config_of(endpoint, pool))) as feed:
        broken: Any = None
        feed.answered(broken)
        with pytest.raises(AttributeError, match="prompt_id"):
            while True:
                feed.take(wait=True)


def test_texts_continue_as_they_were_sampled(endpoint: Endpoint, pool: Pool):
    over, _, _ = play(config_of(endpoint, pool), {0: "texts"})
    (sample,) = trained(over[0, 0])
    (begin, end), (after, _) = sample.spans
    assert begin == len(encode("03")) and end - begin == 2
    assert sample.tokens[end:after].tolist() == encode("+") and sample.reward == after


def test_a_function_rewards_the_trajectory(endpoint: Endpoint):
    reward = "tests.helpers.played_agents:shortest"
    host = partial(AgentHost.load, AGENT, (), {}, reward)
    with closing(Pool("turns.agent: 'test'", host)) as workers:
        over, _, _ = play(config_of(endpoint, workers, reward=reward), {0: "three_calls"})
    assert trained(over[0, 0])[0].reward == 3.0
