"""One trajectory of an agent: its calls as conversations of token ids."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyrl_ext.data.chat import check_known, check_size, encoded
from pyrl_ext.data.chat_template import Message
from pyrl_ext.data.files import Broken
from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.data.workers import CallFailed
from pyrl_ext.plan.schema.turns import Turns
from pyrl_ext.rollout.agents.chat_format import ChatFormat, Reply
from pyrl_ext.rollout.agents.protocol import (
    Answer,
    ApiError,
    ChatRequest,
    CompletionRequest,
    message_of,
)
from pyrl_ext.rollout.turns.trajectory import samples_of
from pyrl_ext.samples import Prompt, Sample, Turn

Ask = Callable[[Turn], Awaitable[Sample]]


@dataclass(frozen=True)
class TrajectoryConfig:
    """Settings of all trajectories of a run.

    Args:
        chat: renders messages
        tokenizer: of the model
        stop_ids: tokens that end a turn
        turns: section of the plan
        max_new_tokens: response budget of a turn
    """

    chat: ChatFormat
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    turns: Turns
    max_new_tokens: int


@dataclass(frozen=True, eq=False)
class LastCall:
    """State of a conversation before its last call, to take the call back.

    Args:
        answer: to the call
        messages, text: of the conversation before the call
        shown: the call for a reward function
    """

    answer: Answer
    messages: list[Message]
    text: str | None
    shown: dict[str, Any]


@dataclass(eq=False)
class Branch:
    """A conversation of a trajectory: calls that continue each other.

    Attributes:
        number: of the conversation, from 0
        tools: of its calls
        messages: up to the last answer; of a conversation of texts, none
        text: up to the last answer; None: it has messages
        turns: what the engine sampled, a sample a call
        last: the last call, unless it was taken back
        busy: a call of it waits for the engine
    """

    number: int
    tools: Sequence[Mapping[str, Any]] = ()
    messages: list[Message] = field(default_factory=list[Message])
    text: str | None = None
    turns: list[Sample] = field(default_factory=list[Sample])
    last: LastCall | None = None
    busy: bool = False

    @property
    def tokens(self) -> list[int]:
        """All of its tokens."""
        return self.turns[-1].tokens.tolist()  # pyright: ignore[reportUnknownVariableType]

    def new_messages(self, request: ChatRequest) -> list[Message]:
        """The messages of a request that follow this conversation; none if it is another one."""
        size = len(self.messages)
        if self.busy or not self.turns or self.text is not None or self.tools != request.tools:
            return []
        if not all(map(_same, self.messages, request.messages[:size])):
            return []
        new = request.messages[size:]
        return [] if any(each["role"] == "assistant" for each in new) else new


def _same(ours: Message, theirs: Message) -> bool:
    """True if a client sent back the message that it got, or wrote, before.

    Clients may leave out reasoning, but not change it, and write no content as null or as an empty
    text.
    """

    def known(message: Message, *names: str) -> list[Any]:
        return [message.get(name) or None for name in names]

    names = ("role", "content", "tool_calls", "tool_call_id", "name")
    reasoning = theirs.get("reasoning_content")
    if reasoning and reasoning != ours.get("reasoning_content"):
        return False
    return known(ours, *names) == known(theirs, *names)


class AgentTrajectory:
    """The calls of one agent; see `endpoint.Callee`. All methods run in the endpoint's loop.

    A call whose messages continue a conversation extends its tokens; another one begins a
    conversation, with another random stream.

    Args:
        ask: hands a turn to the engine, and waits for what it samples
        changed_state: called when a call begins or ends
        first: number of its first turn; greater than 0 if the agent began again: the engine may
            still answer turns of the attempt before

    Attributes:
        branches: conversations, in the order in which they began
        waiting: calls that the engine has not answered
        refused: why a call was refused that the limits of the run do not allow
        calls: messages and answer of each call, for a reward function
        forks: conversations besides the first, once it is done
        next_number: of the next turn
        seconds: between calls
        samples: of the trajectory, once it is done
        dropped: why there are none
    """

    def __init__(
        self,
        prompt: Prompt,
        index: int,
        config: TrajectoryConfig,
        ask: Ask,
        changed_state: Callable[[], None],
        first: int = 0,
    ):
        self.prompt = prompt
        self.index = index
        self.config = config
        self.branches: list[Branch] = []
        self.waiting = 0
        self.refused: CallFailed | None = None
        self.calls: list[dict[str, Any]] = []
        self.forks = 0
        self.changed = 0
        self.seconds = 0.0
        self.samples: list[Sample] | None = None
        self.dropped: CallFailed | None = None
        self._ask = ask
        self._changed_state = changed_state
        self.next_number = first
        self._most = first + config.turns.max_turns
        self._cut = False
        self._over = False

    @property
    def number_of_turns(self) -> int:
        """Number of turns that are trained on."""
        return sum(len(branch.turns) for branch in self.branches)

    async def chat(self, request: ChatRequest) -> Answer:
        """Answer messages. Raises: ApiError."""
        self._need_turn()
        chat = self.config.chat
        tools = request.tools
        try:
            self._need_size(json.dumps([request.messages, tools], ensure_ascii=False))
            branch, context = self._continued(request)
            if context is None:
                context = chat.open(request.messages, tools)
                branch = self._of_tokens(branch, context)
        except Broken as error:
            raise ApiError(400, str(error), param="messages") from None
        branch = branch or self._begun(Branch(len(self.branches), tools))
        sample = await self._sampled(branch, context, request.max_tokens)
        reply = chat.parse(context, sample.response, tools, request.calls)
        number = sample.turn
        calls = tuple(
            (f"call_{number}_{place}", call.name, call.arguments)
            for place, call in enumerate(reply.tool_calls)
        )
        if reply.content is None and not calls:
            reply = replace(reply, content="")  # clients send a message without content as none
        answer = self._answer(sample, reply, calls, request.logprobs)
        message = message_of(answer)
        shown = {"messages": request.messages, "reply": message}
        self._take(branch, sample, answer, shown)
        branch.tools = tools
        branch.messages = [*request.messages, message]
        return answer

    async def complete(self, request: CompletionRequest) -> Answer:
        """Continue a text, or token ids. Raises: ApiError."""
        self._need_turn()
        try:
            branch, context, text = self._continued_text(request.prompt)
        except Broken as error:
            raise ApiError(400, str(error), param="prompt") from None
        branch = branch or self._begun(Branch(len(self.branches), text=""))
        sample = await self._sampled(branch, context, request.max_tokens)
        said = self._decoded(sample.response)
        answer = self._answer(sample, Reply(said, None, ()), (), request.logprobs)
        self._take(branch, sample, answer, {"prompt": request.prompt, "reply": {"text": said}})
        branch.text = text + said
        return answer

    def undelivered(self, answer: Answer) -> None:
        """Take back an answer that the agent did not get: it is not trained on."""
        for branch in self.branches:
            last = branch.last
            if last is not None and last.answer is answer:
                branch.messages = last.messages
                branch.text = last.text
                branch.last = None
                branch.turns.pop()
                self.calls = [call for call in self.calls if call is not last.shown]

    def stop(self) -> None:
        """The agent has ended: calls that wait, or come later, are not answered."""
        self._over = True

    def end(self, reward: float, components: Mapping[str, float]) -> None:
        """Make the samples. Raises: CallFailed."""
        samples: list[Sample] = []
        turns = self.config.turns
        number = 0
        answered = [branch for branch in self.branches if branch.turns]
        self.forks = max(0, len(answered) - 1)
        for branch in answered:
            parts, changed = samples_of(branch.turns, turns.merges, turns.routes)
            self.changed += changed
            samples += [replace(part, turn=part.turn + number, last=False) for part in parts]
            number += len(branch.turns)
        if not samples:
            rule = "expected at least one"
            raise CallFailed("calls", f"ended without a call that was answered, {rule}")
        samples[-1] = replace(samples[-1], last=True)
        reason = "length" if self._cut else "stop"
        given = {"reward": reward, "components": components, "finish_reason": reason}
        self.samples = [replace(sample, **given) for sample in samples]

    def _continued(self, request: ChatRequest) -> tuple[Branch | None, list[int] | None]:
        """The conversation that a request continues, and its context; None: to be rendered."""
        found: Branch | None = None
        for branch in self.branches:
            longer = found is None or len(branch.messages) > len(found.messages)
            if longer and branch.new_messages(request):
                found = branch
        if found is None:
            return None, None
        last = found.turns[-1]
        context = self.config.chat.extend(
            found.tokens[: last.prompt_len],
            last.response,
            found.messages,
            found.new_messages(request),
            request.tools,
        )
        return found, context

    def _of_tokens(self, branch: Branch | None, context: list[int]) -> Branch | None:
        """The conversation if a rendered context begins with its tokens."""
        if branch is None:
            return None
        tokens = branch.tokens
        return branch if context[: len(tokens)] == tokens else None

    def _continued_text(self, prompt: str | list[int]) -> tuple[Branch | None, list[int], str]:
        """The conversation that a prompt continues, its context, and all of its text."""
        texts = [each for each in self.branches if each.text is not None and not each.busy]
        begun = [each for each in texts if each.turns and self._continues(each, prompt)]
        found = max(begun, key=lambda branch: len(branch.tokens), default=None)
        if not isinstance(prompt, str):
            return found, prompt, self.config.tokenizer.decode(prompt)
        self._need_size(prompt)
        if found is None:
            return None, self._encoded(prompt), prompt
        assert found.text is not None  # as chosen above
        return found, found.tokens + self._encoded(prompt[len(found.text) :]), prompt

    def _continues(self, branch: Branch, prompt: str | list[int]) -> bool:
        """True if a prompt begins with all of a conversation of texts."""
        tokens = branch.tokens
        if not isinstance(prompt, str):
            return prompt[: len(tokens)] == tokens
        if prompt == branch.text and tokens[-1] in self.config.stop_ids:
            return False  # the same prompt again, to which the answer was empty
        return bool(branch.text) and prompt.startswith(branch.text)

    def _begun(self, branch: Branch) -> Branch:
        """A further conversation. Raises: ApiError if there may be only one."""
        turns = self.config.turns
        others = any(each.turns or each.busy for each in self.branches)
        if others and turns.form == "concatenated":
            raise self._refuse(
                "fork",
                "this call begins another conversation, or rewrites an earlier one; expected "
                "messages that continue those of the call before. Set turns.form: stepwise to "
                "train each conversation as a sample",
            )
        self.branches.append(branch)
        return branch

    async def _sampled(self, branch: Branch, context: list[int], most: int | None) -> Sample:
        turns = self.config.turns
        room = turns.max_tokens - len(context)
        if not context or room < 1:
            self._cut = self._cut or room < 1
            raise self._refuse(
                "room",
                f"{len(context)} tokens, expected 1 to {turns.max_tokens - 1}, less than "
                "turns.max_tokens",
                "context_length_exceeded",
            )
        budget = min(self.config.max_new_tokens, room, most or room)
        prompt = replace(self.prompt, tokens=tuple(context))
        turn = Turn(prompt, self.index, self.next_number, budget, branch.number)
        self.next_number += 1
        branch.busy = True
        self.waiting += 1
        self._changed_state()
        try:
            sample = await self._ask(turn)
        finally:
            branch.busy = False
            self.waiting -= 1
            self._changed_state()
        if self._over:
            raise over_error()
        return sample

    def _take(self, branch: Branch, sample: Sample, answer: Answer, shown: dict[str, Any]) -> None:
        """Record a call, before the conversation goes on."""
        branch.last = LastCall(answer, branch.messages, branch.text, shown)
        branch.turns.append(sample)
        self.calls.append(shown)

    def _answer(
        self,
        sample: Sample,
        reply: Reply,
        calls: tuple[tuple[str, str, str], ...],
        show_tokens: bool,
    ) -> Answer:
        ids = sample.response
        reason = "tool_calls" if calls and sample.finish_reason == "stop" else sample.finish_reason
        logprobs: list[float] = sample.rollout_logprobs[sample.prompt_len :].tolist()  # pyright: ignore
        # decoding token by token takes longer than the rest of a call
        texts = [self.config.tokenizer.decode([token]) for token in ids] if show_tokens else ids
        return Answer(
            text=reply.content,
            reasoning=reply.reasoning,
            tool_calls=calls,
            finish_reason=reason,  # pyright: ignore[reportArgumentType]
            prompt_tokens=sample.prompt_len,
            token_texts=tuple(map(str, texts)),
            logprobs=tuple(logprobs),
        )

    def _need_turn(self) -> None:
        if self._over:
            raise over_error()
        if self.next_number >= self._most:
            most = self.config.turns.max_turns
            text = f"call {most + 1} of the trajectory, expected at most turns.max_turns {most}"
            raise self._refuse("turns", text)

    def _refuse(self, reason: str, message: str, code: str | None = None) -> ApiError:
        """The error of a call that the limits of the run do not allow."""
        self.refused = self.refused or CallFailed(reason, message)
        return ApiError(400, message, code or f"pyrl_{reason}")

    def _need_size(self, text: str) -> None:
        check_size(text, self.config.tokenizer, self.config.turns.max_tokens, "turns.max_tokens")

    def _encoded(self, text: str) -> list[int]:
        tokens = encoded(text, self.config.tokenizer, add_special_tokens=False)
        check_known(text, tokens, self.config.tokenizer)
        return tokens

    def _decoded(self, tokens: list[int]) -> str:
        ends = bool(tokens) and tokens[-1] in self.config.stop_ids
        return self.config.tokenizer.decode(tokens[:-1] if ends else tokens)


def over_error() -> ApiError:
    """The answer to a call of an agent that has ended."""
    return ApiError(503, "the trajectory is over", "trajectory_over", kind="server_error")
