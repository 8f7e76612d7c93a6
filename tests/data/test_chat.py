"""Which tokens of a conversation the assistant wrote: by marks of the template and by prefixes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from pyrl_ext.data import chat
from pyrl_ext.data.chat import tokens_of_chat
from pyrl_ext.data.files import Broken, DataError
from pyrl_ext.data.tokenizer import load_tokenizer
from tests.helpers.configs import CONFIGS

TURN = "{{ '[' + m['role'] + ']\\n' }}"
PLAIN = (
    "{% for m in messages %}" + TURN + "{{ m['content'] + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
)
# the last answer alone is rendered whole, as templates do that drop earlier reasoning
FORGETFUL = PLAIN.replace(
    "m['content']",
    "(m['content'] if loop.last or m['role'] != 'assistant' else m['content'][1:])",
)


def tokenizer_with(template: str | None = None) -> Any:
    loaded: Any = load_tokenizer(CONFIGS / "tiny")
    if template is not None:
        loaded.chat_template = template
    return loaded


def turns(*contents: str) -> list[dict[str, str]]:
    """Contents of a system, a user, an assistant, a user, ...; "" leaves the turn out."""
    roles = ["system", *("user", "assistant") * len(contents)]
    return [
        {"role": role, "content": each} for role, each in zip(roles, contents, strict=False) if each
    ]


CONVERSATIONS = [
    turns("", "1+1?", "2"),
    turns("add", "1+1?", "2", "2+2?", "4, I think", "sure?", "yes"),
    turns("", "hi", "hello", "more"),  # the last turn is the user's
    [*turns("", "hi", "so"), {"role": "assistant", "content": "and so"}],
    turns("", "[assistant]\n2", "[user]\n1"),  # contents that look like headers
]


def read_turns(messages: list[dict[str, str]], encode: Any, marked: bool) -> tuple[list, list]:
    """The oracle: PLAIN or MARKED written out turn by turn, each piece with its flag."""
    tokens = []
    mask = []
    for message in messages:
        answer = int(message["role"] == "assistant")
        pieces = [(f"[{message['role']}]\n", 0), (message["content"] + "<eos>", answer)]
        for text, flag in [*pieces, ("\n", 0 if marked else answer)]:
            piece = encode(text)
            tokens += piece
            mask += [flag] * len(piece)
    return tokens, mask


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_tokens_of_chat_marks_what_a_reading_turn_by_turn_marks(template: str, messages: list):
    tokenizer = tokenizer_with(template)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    expected = read_turns(messages, encode, marked=template is MARKED)
    assert tokens_of_chat(messages, tokenizer) == expected
    assert tokenizer.unk_token_id not in expected[0] and 1 in expected[1]


def test_tokens_of_chat_ends_the_tiny_tokenizers_answers_with_eos():
    tokenizer = tokenizer_with()
    tokens, mask = tokens_of_chat(turns("", "ab", "xyz"), tokenizer)
    assert tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "xyz<eos>"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (PLAIN, turns("", "hi"), "messages without an assistant's turn, expected at least one"),
        (PLAIN, turns("", "", "hi"), r"messages\[0\] of the assistant, expected a turn before it"),
        (FORGETFUL, CONVERSATIONS[1], r"messages\[2\]: the chat template renders the turns up to"),
        ("{{ messages[9]['role'] }}", CONVERSATIONS[0], "chat template: UndefinedError"),
        ("{{ 'x' }}", CONVERSATIONS[0], r"messages\[1\]: the chat template renders"),
    ],
)
def test_tokens_of_chat_refuses(template: str, messages: list, message: str):
    with pytest.raises(Broken, match=message):
        tokens_of_chat(messages, tokenizer_with(template))


def test_render_ends_a_template_that_does_not(monkeypatch: pytest.MonkeyPatch):
    loops = "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(chat, "SECONDS", 0.3)
    with pytest.raises(
        DataError, match=r"chat template: 0\.3 s were not enough to render 2 messages"
    ):
        chat.render(CONVERSATIONS[0], tokenizer_with(loops), generate=True)
    monkeypatch.setattr(chat, "SECONDS", 600)
    assert chat.render(CONVERSATIONS[0], tokenizer_with(PLAIN), generate=True)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_tokens_of_chat_takes_one_answer_of_a_template_that_forgets():
    tokenizer = tokenizer_with(FORGETFUL)
    tokens, mask = tokens_of_chat(
        [{"role": "user", "content": "?"}, *turns("", "", "23")], tokenizer
    )
    assert tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "23<eos>\n"
