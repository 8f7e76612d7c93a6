"""A tokenizer's chat template: conversations as token ids, and what further messages add to them.

An assistant's turn stays as it was sampled: what follows it is read from a short conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyrl_ext.data.chat import apply_template, check_known, encoded
from pyrl_ext.data.files import Broken, cut
from pyrl_ext.data.tokenizer import Tokenizer

Message = dict[str, Any]
"""In OpenAI's format: role, content (text or None), tool_calls, tool_call_id, name and
reasoning_content."""

Tool = Mapping[str, Any]
"""In OpenAI's format: {"type": "function", "function": {"name", "description", "parameters"}}."""

TALK: list[Message] = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00000",  # some templates want nine characters
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "content": "sun", "tool_call_id": "call00000", "name": "weather"},
]
"""A call of a tool and its result."""

_ASKED: Message = {"role": "user", "content": "@asked@"}
_SAID = "@said@"
_STUB: Message = {"role": "assistant", "content": _SAID}


class ChatTemplate:
    """The tokenizer's chat template.

    Raises:
        ValueError: it does not take content as text, or raises an error
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._arguments_as_text = False
        self._no_content: str | None = ""
        self._find_shape()
        opening = self._text([_ASKED], (), True)
        said = self._text([_ASKED, _STUB], (), False)
        if _SAID not in said:
            raise ValueError(
                f"the chat template writes an assistant's text {_SAID!r} as {cut(said)}, expected "
                "one that takes content as text"
            )
        self._end = said.rpartition(_SAID)[2]
        self._adds_thoughts = not said.startswith(opening + _SAID)
        thinking = {**_STUB, "reasoning_content": "@thought@"}
        self._takes_reasoning = "@thought@" in self._text([_ASKED, thinking], (), False)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The ids of a conversation, up to where the assistant begins. Raises: Broken."""
        return self._ids(self._text(messages, tools, True))

    def added(
        self,
        said: Message,
        new: Sequence[Message],
        tools: Sequence[Tool],
        last: int,
        thinks: bool = False,
    ) -> list[int] | None:
        """Token ids that messages add after an assistant's turn, up to where it begins its next.

        Args:
            said: a message like the assistant's; its texts do not matter
            new: the messages
            last: token of the turn; the template's end of a turn is added if it is another
            thinks: True if the turn has reasoning

        Returns: None if the template writes the assistant's turn differently once they follow.

        Raises: Broken.
        """
        behind = self._behind(said, new, tools, thinks)
        if behind is None:
            return None
        ids = self._ids(behind)
        return ids[1:] if ids[:1] == [last] else ids

    def keeps_turns(self, role: str, tools: Sequence[Tool]) -> bool:
        """True if assistants' turns stay as they are once a message of a role follows.

        Turns with reasoning count if the template adds one to a turn that has none.
        """
        new = [{**_ASKED, "role": role}]
        if self._adds_thoughts and self._behind(_STUB, new, tools, True) is None:
            return False
        return self._behind(_STUB, new, tools, False) is not None

    def stops(self) -> set[int]:
        """The tokens that end an assistant's turn, as far as the template shows them."""
        found = {self._tokenizer.eos_token_id}
        for role in ("user", "tool"):
            try:
                behind = self._behind(_STUB, [{**_ASKED, "role": role}], (), False)
            except Broken:  # the template has no such role
                continue
            found.update(encoded(behind or self._end, self._tokenizer, False)[:1])
        return found

    def shaped(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them.

        Raises:
            Broken: arguments of a tool call are no object
        """
        shaped = list[Message]()
        for place, message in enumerate(messages):
            message = dict(message)
            if message.get("content") is None:
                message["content"] = self._no_content
            if message.get("tool_calls"):
                calls = [self._shaped_call(call, place) for call in message["tool_calls"]]
                message["tool_calls"] = calls
            shaped.append(message)
        return shaped

    def _shaped_call(self, call: Message, place: int) -> Message:
        function = call["function"]
        try:
            arguments, text = read_arguments(function["arguments"])
        except (ValueError, RecursionError):
            shown = cut(function["arguments"])
            fault = f"messages[{place}]: arguments {shown} of a tool call"
            raise Broken(fault, "a JSON object") from None
        written = text if self._arguments_as_text else arguments
        return {**call, "function": {**function, "arguments": written}}

    def _find_shape(self) -> None:
        """Templates write a call's arguments from an object or from its text, and differ in whether
        a message without content has None or an empty text."""
        for text in (False, True):
            for no_content in (None, ""):
                self._arguments_as_text = text
                self._no_content = no_content
                try:
                    written = self._text(TALK, (), True)
                except Broken:
                    continue
                if "Paris" in written and "{'" not in written and "None" not in written:
                    return
        self._arguments_as_text = False

    def _behind(
        self, said: Message, new: Sequence[Message], tools: Sequence[Tool], thinks: bool
    ) -> str | None:
        """As `added`, as text that begins with the end of the turn."""
        stub = {**said, "content": _SAID}
        stub.pop("reasoning_content", None)
        in_content = thinks and not self._takes_reasoning
        if in_content:
            stub["content"] = f"<think>\n{_SAID}\n</think>\n\n{_SAID}"
        elif thinks:
            stub["reasoning_content"] = _SAID
        opening = self._text([_ASKED], tools, True)
        known = self._text([_ASKED, stub], tools, False)
        whole = self._text([_ASKED, stub, *new], tools, True)
        if not known.endswith(self._end) or (in_content and "</think>" not in known):
            return None
        known = known.removesuffix(self._end)
        if known.startswith(opening) and whole.startswith(known):
            return whole[len(known) :]
        # an empty thought before the last turn alone, which was not sampled
        known = opening + known[known.rindex(_SAID) :]
        if not thinks and whole.startswith(known):
            return whole[len(known) :]
        return None

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], generate: bool) -> str:
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        shaped = self.shaped(messages)
        options |= {"tokenize": False, "add_generation_prompt": generate}
        return apply_template(shaped, self._tokenizer, **options)

    def _ids(self, text: str) -> list[int]:
        ids = encoded(text, self._tokenizer, add_special_tokens=False)
        check_known(text, ids, self._tokenizer)
        return ids


def read_arguments(arguments: Any) -> tuple[dict[str, Any], str]:
    """Arguments of a tool call, an object or its JSON text, as both.

    Raises:
        ValueError, RecursionError: they are something else
    """
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments {cut(arguments)}, expected an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode("utf-8")
    return arguments, text
