"""The calls of one trajectory: which continue each other, are taken back, or come too late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pyrl_ext.data.chat_template import Message
from pyrl_ext.plan.schema.turns import Turns
from pyrl_ext.rollout.agents.chat_format import ChatFormat
from pyrl_ext.rollout.agents.protocol import Answer, ApiError, ChatRequest, CompletionRequest
from pyrl_ext.rollout.agents.trajectory import AgentTrajectory, Branch, TrajectoryConfig
from pyrl_ext.samples import Prompt, Sample, Sampling, Turn
from tests.helpers.conversations import EOS, TOKENIZER, three_then_stop
from tests.helpers.scripted import ScriptedEngine

SAMPLING = Sampling(max_new_tokens=4, stop_ids=(EOS,), samples_per_prompt=1)


class Played(AgentTrajectory):
    """A trajectory of at most 80 tokens, whose engine answers at once, or once ``go`` is set.

    Args:
        stops: the engine samples a stop token alone
        go: set: it answers
        first: number of the first turn
    """

    def __init__(self, stops: bool = False, first: int = 0):
        section = Turns(agent="a:b", max_tokens=80, max_turns=4, timeout=60.0, form="stepwise")
        chat = ChatFormat.load(TOKENIZER, "default")
        config = TrajectoryConfig(chat, TOKENIZER, (EOS,), section, 4)
        super().__init__(Prompt(0, (30,)), 0, config, self._answers, lambda: None, first)
        self.stops = stops
        self.go = asyncio.Event()
        self.go.set()
        self.asked: list[Turn] = []

    async def _answers(self, turn: Turn) -> Sample:
        self.asked.append(turn)
        await self.go.wait()
        stops = self.stops
        engine = ScriptedEngine(lambda *place: EOS if stops else three_then_stop(*place))
        return engine.sampled(turn, SAMPLING)

    async def say(self, *messages: Message) -> Answer:
        """The answer to messages."""
        return await self.chat(ChatRequest([*messages], [], True, None, False, False, False))

    async def write(self, prompt: str | list[int]) -> Answer:
        """The answer to a text, or token ids."""
        return await self.complete(CompletionRequest(prompt, None, False, False, False))

    def branches_asked(self) -> list[int]:
        """The conversation of each turn."""
        return [turn.branch for turn in self.asked]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(answer: Answer) -> Message:
    return {"role": "assistant", "content": answer.text}


def call(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    return [{"id": "call_0_0", "type": "function", "function": function}]


SAID: Message = {
    "role": "assistant", "content": None, "tool_calls": call("{}"), "reasoning_content": "so",
}  # fmt: skip
PLAIN: Message = {"role": "assistant", "content": "1"}


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (SAID, SAID, True),
        (SAID, SAID | {"content": ""}, True),
        (SAID, SAID | {"reasoning_content": None}, True),
        (SAID, SAID | {"reasoning_content": "no"}, False),
        (SAID, SAID | {"tool_calls": call("{ }")}, False),
        (SAID, SAID | {"tool_calls": []}, False),
        (SAID, SAID | {"name": "a"}, False),
        (PLAIN, PLAIN, True),
        (PLAIN, PLAIN | {"reasoning_content": "so"}, False),
        (PLAIN, PLAIN | {"content": "1 "}, False),
        (PLAIN, PLAIN | {"content": None}, False),
    ],
)
def test_an_edited_message_begins_another_conversation(ours: Message, theirs: Message, same: bool):
    sampled = ScriptedEngine(three_then_stop).sampled(Turn(Prompt(0, (30,)), 0, 0, 4), SAMPLING)
    branch = Branch(0, tools=[], messages=[user("0"), ours], turns=[sampled])
    messages = [user("0"), theirs, user("+")]
    request = ChatRequest(messages, [], True, None, False, False, False)
    assert branch.new_messages(request) == ([user("+")] if same else [])


def test_an_answer_is_taken_back_after_a_call_of_another_conversation():
    async def run() -> None:
        played = Played()
        lost = await played.say(user("0"))
        await played.say(user("1"))
        for _ in range(2):
            played.undelivered(lost)
        assert [each["messages"] for each in played.calls] == [[user("1")]]
        assert played.number_of_turns == 1
        again = await played.say(user("0"))
        await played.say(user("0"), assistant(again), user("+"))
        played.undelivered(again)  # the agent had it: it went on
        played.end(1.0, {})
        assert played.samples is not None and played.forks == 1
        assert [len(each.spans) for each in played.samples] == [1, 2]
        assert len(played.calls) == 3

    asyncio.run(run())


def test_an_answer_is_taken_back_while_a_later_call_waits():
    async def run() -> None:
        played = Played()
        lost = await played.say(user("0"))
        played.go.clear()
        later = asyncio.ensure_future(played.say(user("0"), assistant(lost), user("+")))
        while not played.waiting:
            await asyncio.sleep(0)
        played.undelivered(lost)
        played.go.set()
        await later
        played.end(1.0, {})
        assert played.samples is not None
        (sample,) = played.samples
        assert sample.spans == ((sample.prompt_len, len(sample.tokens)),)
        assert not sample.loss_mask[: sample.prompt_len].any()

    asyncio.run(run())


def test_calls_of_an_agent_that_has_ended_are_refused():
    async def run() -> None:
        played = Played()
        await played.say(user("0"))
        played.go.clear()
        waits = asyncio.ensure_future(played.say(user("1")))
        while not played.waiting:
            await asyncio.sleep(0)
        played.stop()
        played.go.set()  # the engine's answer and the agent's end come together
        for late in (waits, played.say(user("2")), played.write("3")):
            with pytest.raises(ApiError, match="the trajectory is over") as caught:
                await late
            assert caught.value.status == 503
        assert len(played.asked) == 2 and played.number_of_turns == len(played.calls) == 1

    asyncio.run(run())


def test_turns_of_a_later_attempt_have_other_numbers():
    async def run() -> None:
        played = Played(first=3)
        for number in range(4):
            await played.say(user(f"{number}"))
        assert [turn.number for turn in played.asked] == [3, 4, 5, 6]
        with pytest.raises(ApiError, match=r"^call 5 .* at most turns.max_turns 4$"):
            await played.say(user("4"))
        played.end(1.0, {})
        assert played.samples is not None
        assert [each.turn for each in played.samples] == [0, 1, 2, 3]

    asyncio.run(run())


def test_an_empty_answer_can_be_sent_back():
    async def run() -> None:
        played = Played(stops=True)
        answer = await played.say(user("0"))
        assert answer.text == ""
        await played.say(user("0"), assistant(answer), user("+"))
        assert played.branches_asked() == [0, 0]

    asyncio.run(run())


def test_texts_continue_the_longest_text():
    async def run() -> None:
        played = Played(stops=True)
        for prompt in ("01", "0", "01+", "02"):
            await played.write(prompt)
        assert played.branches_asked() == [0, 1, 0, 1]

    asyncio.run(run())


def test_the_same_text_again_is_another_conversation():
    async def run() -> None:
        played = Played(stops=True)
        for prompt in ("0", "0", [EOS], "1"):
            await played.write(prompt)
        assert played.branches_asked() == [0, 1, 2, 3]

    asyncio.run(run())


@pytest.mark.parametrize("part", ["content", "tool"])
def test_texts_that_cannot_fit_are_refused_before_they_are_encoded(part: str):
    """That would take minutes for the largest, and holds up all other calls."""
    tools: list[dict[str, Any]] = []
    messages = [user("0")]
    if part == "content":
        messages = [user("1" * 1_000_000)]
    else:
        described = {"name": "add", "description": "1" * 1_000_000, "parameters": {}}
        tools = [{"type": "function", "function": described}]

    async def run() -> None:
        trajectory = Played()
        with pytest.raises(ApiError) as caught:
            await trajectory.chat(ChatRequest(messages, tools, True, None, False, False, False))
        assert "expected 1 to turns.max_tokens 80" in caught.value.message
        assert caught.value.status == 400 and trajectory.asked == []

    asyncio.run(run())


def test_a_client_may_ask_for_fewer_tokens():
    async def run() -> None:
        trajectory = Played()
        for most in (1, None, 9):
            await trajectory.chat(ChatRequest([user("0")], [], True, most, False, False, False))
        assert [turn.max_new_tokens for turn in trajectory.asked] == [1, 4, 4]

    asyncio.run(run())
