"""Environments of messages: what the template adds is appended, and equals the whole rendered."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any, Literal

import pytest

from pyrl_ext.data.chat_turns import ChatTurns, Messages, Tools, check_template, schema
from pyrl_ext.data.environment import Context
from pyrl_ext.samples import Prompt
from tests.helpers.conversations import EOS, TOKENIZER

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' }}"
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# drops what assistants said before the last message of the user
FORGETS = TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' }}"
)

# writes the reasoning of turns after the last message of the user, an empty one in the last turn
THINKS = (
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
) + TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or m.reasoning_content)"
    " %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}{{ m.content }}",
)
# ends a turn with the role of the next
OPENS_ONLY = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def with_template(template: str) -> Any:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    return tokenizer


def add(first: int, second: int = 1) -> int:
    """Add two numbers.

    More about it.
    """
    return first + second


def fails(text: Literal["a", "b"]) -> str:
    """Fail."""
    raise OSError(f"no {text}")


class Echo:
    """Asks to repeat, twice; rewards each answer that is ok."""

    left = 2

    def reset(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say ok"}]

    def step(self, message: dict[str, str]) -> Any:
        self.left -= 1
        assert message["role"] == "assistant"
        reward = float(message["content"] == "ok")
        return [{"role": "user", "content": "again"}], reward, self.left == 0


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_messages_append_what_the_whole_conversation_renders(template: str | None):
    tokenizer = with_template(template or TOKENIZER.get_chat_template())
    environment = Messages("tests.data.test_chat_turns:Echo", tokenizer)
    first = environment.start(Prompt(0, (5,)))
    assert isinstance(first, Context)
    result = environment.step([*encode("ok"), EOS], "ok")
    assert isinstance(result.observation, list)
    known = [*first.tokens, *encode("ok"), EOS, *result.observation]
    said = {"role": "assistant", "content": "ok"}
    messages = [*Echo().reset(), said, {"role": "user", "content": "again"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert known == encode(whole)
    assert result[1:3] == (1.0, False) and environment.step([9], "no")[:3] == (None, 0.0, True)


def test_after_closes_a_turn_that_was_cut():
    chat = ChatTurns(with_template(TEMPLATE))
    message = [{"role": "user", "content": "go"}]
    rest = encode("\n<|user|>go\n<|assistant|>")
    assert chat.after(encode("ok"), "ok", message) == [EOS, *rest]
    assert chat.after([*encode("ok"), EOS], "ok", message) == rest


def test_after_repeats_no_role_that_was_sampled():
    chat = ChatTurns(with_template(OPENS_ONLY))
    message = [{"role": "user", "content": "go"}]
    rest = encode("<|user|>go<|assistant|>")
    assert chat.after(encode("ok"), "ok", message) == rest
    assert chat.after([*encode("ok"), rest[0]], "ok", message) == rest[1:]


def test_after_renders_the_whole_once_a_message_of_another_role_rewrites_a_turn():
    """The template forgets what was said before a message of the system, not of the user."""
    forgets = (
        "m.content if m.role != 'assistant' or messages[-1].role == 'user' or loop.last else ''"
    )
    chat = ChatTurns(with_template(TEMPLATE.replace("m.content", forgets)))
    first = chat.opening([{"role": "user", "content": "a"}])
    said = [*encode("b"), EOS]
    added = chat.after(said, "b", [{"role": "user", "content": "c"}])
    text = "<|user|>a\n<|assistant|>b{0}\n<|user|>c\n<|assistant|>"
    assert isinstance(added, list)
    assert [*first.tokens, *said, *added] == encode(text.format(TOKENIZER.eos_token))
    whole = chat.after([*encode("d"), EOS], "d", [{"role": "system", "content": "e"}])
    assert isinstance(whole, Context)
    text = "<|user|>a\n<|assistant|>{0}\n<|user|>c\n<|assistant|>{0}\n<|system|>e\n<|assistant|>"
    assert list(whole.tokens) == encode(text.format(TOKENIZER.eos_token))


def test_unknown_characters_of_messages_are_refused():
    chat = ChatTurns(with_template(TEMPLATE))
    with pytest.raises(ValueError, match="character '☃'"):
        chat.opening([{"role": "user", "content": "☃"}])
    with pytest.raises(ValueError, match="character '☃'"):
        chat.after([EOS], "", [{"role": "user", "content": "☃"}])


def test_results_of_tools_follow_a_turn_with_reasoning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "renderers", None)  # the template is enough
    tokenizer = with_template(THINKS)
    check_template("tools", tokenizer, False)
    with pytest.raises(ValueError, match="a message of role user follows"):
        check_template("messages", tokenizer, False)
    environment = Tools(["tests.data.test_chat_turns:add"], tokenizer)
    first = environment.start(Prompt(0, (5,), text="2+3?"))
    call = '<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}</tool_call>'
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": call, "reasoning_content": "so"},
        {"role": "tool", "content": "5"},
    ]
    for said in (f"<think>so</think>{call}", call):
        observation = environment.step([*encode(said), EOS], said).observation
        assert isinstance(observation, list)
        whole = tokenizer.apply_chat_template(
            messages, tools=[schema(add)], tokenize=False, add_generation_prompt=True
        )
        assert [*first.tokens, *encode(said), EOS, *observation] == encode(whole)
        messages[1].pop("reasoning_content", None)


def test_check_template_refuses_one_that_forgets_or_says_that_turns_fork(capsys: Any):
    with pytest.raises(ValueError, match=r"a message of role user follows, expected .* fork"):
        check_template("messages", with_template(FORGETS), False)
    check_template("messages", with_template(TEMPLATE), False)
    with pytest.raises(ValueError, match="a message of role tool follows"):
        check_template("tools", with_template(FORGETS), False)
    check_template("guess", with_template(FORGETS), False)
    assert not capsys.readouterr().err
    check_template("messages", with_template(FORGETS), True)
    assert "every turn is a fork, and a sample" in capsys.readouterr().err


def test_messages_of_a_template_that_forgets_are_rendered_whole():
    tokenizer = with_template(FORGETS)
    environment = Messages("tests.data.test_chat_turns:Echo", tokenizer, forks=True)
    environment.start(Prompt(0, (5,)))
    result = environment.step([*encode("ok"), EOS], "ok")
    assert isinstance(result.observation, Context)
    text = "<|system|>be brief\n<|user|>say ok\n<|assistant|>{}\n<|user|>again\n<|assistant|>"
    want = text.format(tokenizer.eos_token)  # without the ok
    assert list(result.observation.tokens) == encode(want)


def tools(*names: str, **options: Any) -> Tools:
    paths = [f"tests.data.test_chat_turns:{name}" for name in names]
    return Tools(paths, with_template(TEMPLATE), **options)


def test_tools_are_shown_called_and_answered():
    environment = tools("add", "fails")
    first = environment.start(Prompt(0, (5,), answer="5", text="2+3?"))
    assert list(first.tokens) == encode("[addfails]<|user|>2+3?\n<|assistant|>")
    call = '<tool_call>{"name": "add", "arguments": {"first": 2, "second": 3}}</tool_call>'
    result = environment.step([*encode(call), EOS], call)
    assert result.observation == encode("\n<|user|>5\n<|assistant|>")
    assert (result.reward, result.done) == (0.0, False)
    assert environment.step([30, EOS], "5") == (None, 1.0, True, None)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ('{"name": "sub"}', "error: no tool 'sub', expected one of add, fails"),
        ('{"name": "fails", "arguments": {"text": "a"}}', "error: OSError: no a"),
        ('{"name": "add", "arguments": {"x": 1}}', "error: TypeError: add() got an unexpected"),
        ("{", "error: JSONDecodeError: "),
    ],
)
def test_tools_tell_the_policy_what_was_wrong(call: str, answer: str):
    environment = tools("add", "fails")
    environment.start(Prompt(0, (5,), text="?"))
    text = f"<tool_call>{call}</tool_call>"
    observation = environment.step([EOS], text).observation
    assert isinstance(observation, list) and answer in TOKENIZER.decode(observation)


def test_schema_follows_type_hints():
    assert schema(add)["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
            "required": ["first"],
        },
    }
    assert schema(fails)["function"]["parameters"]["properties"]["text"]["enum"] == ["a", "b"]

    def bad(x: complex) -> None: ...

    with pytest.raises(ValueError, match=re.escape("bad(x): type <class 'complex'>, expected")):
        schema(bad)
