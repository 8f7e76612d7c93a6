"""Chat formats: what is added to a conversation equals the whole, as the template writes it."""

from __future__ import annotations

import copy
import json
import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from renderers import qwen3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pyrl_ext.data.chat_template import Message
from pyrl_ext.data.files import Broken
from pyrl_ext.rollout.agents.chat_format import ChatFormat, Reply, ToolCall
from tests.helpers.conversations import TOKENIZER as TINY

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
XML = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]

# tool calls as JSON between tags; THOUGHT is how an assistant's reasoning is written
CHATML = """
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\\n\\n' }}{%- endif -%}
{{ HEADER }}
{%- for tool in tools -%}{{ '\\n' }}{{ tool | tojson }}{%- endfor -%}
{{ FOOTER }}{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' and tools and loop.first -%}
{%- elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- if THOUGHT -%}
{{ '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
{{ '\\n' if m.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{ '<|im_start|>user' }}
{%- endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
CHATML = CHATML.replace("HEADER", repr(qwen3._TOOLS_HEADER)).replace(
    "FOOTER", repr(qwen3._TOOLS_FOOTER)
)
QWEN3 = CHATML.replace("THOUGHT", "loop.index0 > ns.asked and (loop.last or m.reasoning_content)")
KEEPS = CHATML.replace("THOUGHT", "m.reasoning_content")
# knows reasoning only as a part of the content, and drops it
FORGETS_THOUGHTS = CHATML.replace("THOUGHT", "false").replace(
    "m.content or ''", "(m.content or '').split('</think>')[-1]"
)
# opens the reasoning itself, and writes it for every turn
PREFILLED = CHATML.replace("THOUGHT", "true").replace(
    "'<|im_start|>assistant\\n' }}{%- endif -%}\n",
    "'<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}\n",
)
# turns end when the next begins, with the token of its role
OPENS_ONLY = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# takes arguments as text, and a call for the only content
TEXT_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is none %}{{ '[' + m.tool_calls[0].function.arguments + ']' }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a “city”.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED: Message = {"role": "user", "content": "How is the weather in Paris?"}
RESULT: Message = {"role": "tool", "content": "rain, 12°", "tool_call_id": "c1"}
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = ToolCall("weather", '{"city": "Paris"}')
END = "<|im_end|>"


def calls(content: str | None = None, reasoning: str | None = None) -> Message:
    """An assistant's message that calls the tool."""
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    call = {"id": "c1", "type": "function", "function": function}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


@cache
def loaded(template: str, name: str) -> ChatFormat:
    form = ChatFormat.load(tokenizer(template), "auto" if name == "qwen3" else name)
    assert form.name == name
    return form


@cache
def trained(added: tuple[str, ...]) -> Any:
    """A tokenizer of bytes and some merges, with `added` tokens."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=MARKS, show_progress=False
    )
    model.train_from_iterator([CHATML], trainer)
    model.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")


@cache
def tokenizer(template: str, added: tuple[str, ...] = tuple(TAGS)) -> Any:
    made = copy.deepcopy(trained(added))
    made.chat_template = template
    return made


def ids(tokens: Any, text: str) -> list[int]:
    return list(tokens(text, add_special_tokens=False)["input_ids"])


def template_ids(tokens: Any, messages: list[Message], tools: Any, generate: bool) -> list[int]:
    """The oracle: the tokenizer's own rendering; the template takes arguments as objects."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    written = tokens.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=generate, return_dict=False
    )
    return list(written)


def names(template: str) -> list[str]:
    return ["qwen3", "default"] if template == QWEN3 else ["default"]


CASES = [(template, name) for template in (QWEN3, KEEPS) for name in names(template)]


@pytest.mark.parametrize(
    ("template", "added", "name"),
    [
        (QWEN3, TAGS, "qwen3"),
        (QWEN3, [], "default"),  # without the tokens that the renderer needs
        (QWEN3.replace("Tools", "tools"), TAGS, "default"),  # not what the renderer writes
        (OPENS_ONLY, TAGS, "default"),
    ],
)
def test_auto_takes_a_renderer_that_writes_as_the_template_does(
    template: str, added: list[str], name: str
):
    assert ChatFormat.load(tokenizer(template, tuple(added))).name == name


def test_auto_takes_the_template_of_a_tokenizer_that_no_renderer_knows():
    form = ChatFormat.load(TINY)
    assert form.name == "default"
    first = form.open([ASKED], [])
    said = {"role": "assistant", "content": "ok"}
    more = form.extend(first, [*ids(TINY, "ok"), TINY.eos_token_id], [ASKED, said], [ASKED], [])
    assert more == template_ids(TINY, [ASKED, said, ASKED], [], True)


@pytest.mark.parametrize(("template", "name"), CASES)
def test_open_writes_as_the_template_does(template: str, name: str):
    tokens = tokenizer(template)
    form = ChatFormat.load(tokens, name)
    messages = [{"role": "system", "content": "Be brief."}, ASKED, calls(reasoning="r"), RESULT]
    for tools in ([], [TOOL]):
        for end in (1, 2, 4):
            shown = messages[:end]
            assert form.open(shown, tools) == template_ids(tokens, shown, tools, True)


def test_open_takes_developers_for_the_system():
    tokens = tokenizer(KEEPS)
    form = ChatFormat.load(tokens)
    messages = [{"role": "developer", "content": "Be brief."}, ASKED]
    plain = [{"role": "system", "content": "Be brief."}, ASKED]
    assert form.open(messages, []) == template_ids(tokens, plain, [], True)


def test_a_template_gets_arguments_as_text_and_no_content_if_it_takes_only_those():
    tokens = tokenizer(TEXT_CALLS)
    shown = tokens.decode(ChatFormat.load(tokens).open([ASKED, calls(), RESULT], []))
    assert '<|im_start|>assistant\n[{"city": "Paris"}]<|im_end|>' in shown


def test_a_template_gets_empty_content_if_it_takes_text_only():
    tokens = tokenizer(KEEPS.replace("m.content or ''", "m.content + ''"))
    shown = tokens.decode(ChatFormat.load(tokens).open([ASKED, calls(), RESULT], []))
    assert f"<|im_start|>assistant\n{WRITTEN}{END}" in shown


def test_results_are_named_after_the_tool_that_was_called():
    tokens = tokenizer(KEEPS.replace("<tool_response>", "<tool_response>' + m.name + '"))
    form = ChatFormat.load(tokens)
    assert "<tool_response>weather\nrain" in tokens.decode(form.open([ASKED, calls(), RESULT], []))
    prompt = form.open([ASKED], [])
    more = form.extend(prompt, ids(tokens, WRITTEN), [ASKED, calls()], [RESULT], [])
    assert more is not None and "<tool_response>weather\nrain" in tokens.decode(more)


WORDS = st.text(st.sampled_from("abc é☃\n"), min_size=1, max_size=8).filter(
    lambda text: text == text.strip()
)
FOLLOWS = st.one_of(
    st.lists(st.builds(lambda text: {**RESULT, "content": text}, WORDS), min_size=1, max_size=3),
    st.lists(
        st.builds(
            lambda role, text: {"role": role, "content": text},
            st.sampled_from(["user", "system"]),
            WORDS,
        ),
        min_size=1,
        max_size=2,
    ),
)


@pytest.mark.parametrize(("template", "name"), [*CASES, (PREFILLED, "default")])
@settings(max_examples=60, deadline=None)
@given(
    before=st.lists(WORDS, min_size=1, max_size=2),
    said=WORDS,
    reasoning=st.one_of(st.none(), WORDS),
    new=FOLLOWS,
    tools=st.sampled_from([[], [TOOL]]),
    ended=st.booleans(),
)
def test_extend_equals_the_whole_conversation_rendered(
    template: str,
    name: str,
    before: list[str],
    said: str,
    reasoning: str | None,
    new: list[Message],
    tools: list[Any],
    ended: bool,
):
    tokens = tokenizer(template)
    form = loaded(template, name)
    messages = [{"role": "user", "content": text} for text in before]
    message: Message = {"role": "assistant", "content": said}
    if new[0]["role"] == "tool":
        message = calls(said)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    elif template == PREFILLED:
        message["reasoning_content"] = ""
    whole = template_ids(tokens, [*messages, message, *new], tools, True)
    prompt = form.open(messages, tools)
    # as the template writes it while it is the last, unless that has a thought that nobody had
    turn = template_ids(tokens, [*messages, message], tools, False)
    if template == QWEN3 and reasoning is None:
        turn = whole
    assume(turn[: len(prompt)] == prompt)
    end = turn.index(tokens.eos_token_id, len(prompt))
    completion = turn[len(prompt) : end + ended]
    more = form.extend(prompt, completion, [*messages, message], new, tools)
    forgets = template == QWEN3 and reasoning is not None and any(m["role"] == "user" for m in new)
    if more is None:
        assert forgets
    else:
        assert more == whole and not forgets
        assert more[: len(prompt) + len(completion)] == [*prompt, *completion]


def test_extend_ends_a_turn_that_was_cut():
    tokens = tokenizer(KEEPS)
    form = ChatFormat.load(tokens)
    prompt = form.open([ASKED], [])
    cut = ids(tokens, "It is")
    said = {"role": "assistant", "content": "It is"}
    more = form.extend(prompt, cut, [ASKED, said], [{"role": "user", "content": "Go on."}], [])
    assert more is not None
    added = tokens.decode(more[len(prompt) + len(cut) :])
    assert added == f"{END}\n<|im_start|>user\nGo on.{END}\n<|im_start|>assistant\n"


def test_extend_takes_the_next_role_that_was_sampled_as_the_end_of_a_turn():
    tokens = tokenizer(OPENS_ONLY, ("<|user|>", "<|assistant|>", "<|tool|>"))
    form = ChatFormat.load(tokens)
    prompt = form.open([ASKED], [])
    completion = ids(tokens, "calling<|tool|>")
    said = {"role": "assistant", "content": "calling"}
    more = form.extend(prompt, completion, [ASKED, said], [RESULT], [])
    assert more == template_ids(tokens, [ASKED, said, RESULT], [], True)
    assert form.parse(prompt, completion, []) == Reply("calling", None, ())


@pytest.mark.parametrize(
    "template",
    [
        KEEPS.replace("m.content or ''", "m.content if loop.last else ''"),  # forgets turns
        FORGETS_THOUGHTS,
        KEEPS.replace("m.reasoning_content", "loop.last and m.reasoning_content"),
        KEEPS + "{{ '<think>\\n\\n</think>' if add_generation_prompt }}",  # is not kept
    ],
)
def test_extend_gives_none_if_the_template_rewrites_earlier_turns(template: str):
    tokens = tokenizer(template)
    form = ChatFormat.load(tokens)
    prompt = form.open([ASKED], [])
    completion = ids(tokens, f"<think>\nhm\n</think>\n\nrain{END}")
    said = {"role": "assistant", "content": "rain", "reasoning_content": "hm"}
    assert form.extend(prompt, completion, [ASKED, said], [ASKED], []) is None


def test_extend_goes_on_by_the_template_only_if_the_renderer_is_proven():
    tokens = tokenizer(QWEN3)
    said = {"role": "assistant", "content": "rain"}
    proven = ChatFormat.load(tokens)
    prompt = proven.open([ASKED], [])
    turn = (prompt, ids(tokens, f"rain{END}"), [ASKED, said], [ASKED], [])
    assert proven.extend(*turn) == template_ids(tokens, [ASKED, said, ASKED], [], True)
    assert ChatFormat.load(tokens, "qwen3").extend(*turn) is None


PARSED = [
    ("rain", Reply("rain", None, ())),
    ("", Reply("", None, ())),
    (WRITTEN, Reply(None, None, (WEATHER,))),
    (f"Wait.\n{WRITTEN}\n{WRITTEN}", Reply("Wait.", None, (WEATHER, WEATHER))),
    ("<think>\nhm\n</think>\n\nrain", Reply("rain", "hm", ())),
    (f"<think>\nhm\n</think>\n\n{WRITTEN}", Reply(None, "hm", (WEATHER,))),
]
# what is not complete stays in the content
for broken in (
    WRITTEN.removesuffix("</tool_call>"),
    WRITTEN.replace("}}", "}"),
    WRITTEN.replace("name", "nam"),
    WRITTEN.replace('{"city": "Paris"}', "[1]"),
    WRITTEN.replace('"Paris"', "NaN"),
    WRITTEN.replace("Paris", "\\ud800"),
    WRITTEN.replace('"Paris"', "1" * 5000),
    WRITTEN.replace('"Paris"', "[" * 100_000),
):
    PARSED.append((broken, Reply(broken, None, ())))
PARSED.append((f"{WRITTEN}\n<tool_call>", Reply(f"{WRITTEN}\n<tool_call>", None, (WEATHER,))))
THOUGHT_HALF = "<think>\nhm\n</think>\n\n<tool_call>{"
PARSED.append((THOUGHT_HALF, Reply("<tool_call>{", "hm", ())))


@pytest.mark.parametrize("ended", ["", END])
@pytest.mark.parametrize(("text", "reply"), PARSED)
@pytest.mark.parametrize("added", [TAGS, []])
def test_parse_reads_reasoning_and_tool_calls(
    text: str, reply: Reply, ended: str, added: list[str]
):
    tokens = tokenizer(QWEN3, tuple(added))
    form = ChatFormat.load(tokens)
    assert form.name == ("qwen3" if added else "default")
    prompt = form.open([ASKED], [TOOL])
    assert form.parse(prompt, ids(tokens, text + ended), [TOOL]) == reply


@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_parse_leaves_tool_calls_in_the_text_if_none_may_be_made(name: str):
    tokens = tokenizer(QWEN3)
    form = ChatFormat.load(tokens, name)
    completion = ids(tokens, f"<think>\nhm\n</think>\n\n{WRITTEN}{END}")
    reply = form.parse(form.open([ASKED], []), completion, [TOOL], calls=False)
    assert reply == Reply(WRITTEN, "hm", ())


def test_parse_finds_a_tool_call_that_is_one_token():
    tokens = tokenizer(KEEPS, (WRITTEN,))
    completion = ids(tokens, WRITTEN)
    assert len(completion) == 1
    assert ChatFormat.load(tokens).parse([], completion, [TOOL]) == Reply(None, None, (WEATHER,))


def test_parse_knows_that_the_prompt_opened_the_reasoning():
    tokens = tokenizer(PREFILLED)
    form = ChatFormat.load(tokens)
    prompt = form.open([ASKED], [])
    assert form.parse(prompt, ids(tokens, f"hm\n</think>\n\nrain{END}"), []) == Reply(
        "rain", "hm", ()
    )
    assert form.parse(prompt, ids(tokens, "hm"), []) == Reply(None, "hm", ())
    unfinished = "hm <tool_call>"
    assert form.parse(prompt, ids(tokens, unfinished), []) == Reply(unfinished, None, ())


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("<function=", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"),
        ("<arg_key>", "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"),
    ],
)
def test_parse_reads_tool_calls_that_are_no_json(mark: str, text: str):
    tokens = tokenizer(KEEPS + "{# " + mark + " #}", (*TAGS, *XML))
    form = ChatFormat.load(tokens)
    assert form.name == "default"
    prompt = form.open([ASKED], [TOOL])
    thought = "<think>\nhm\n</think>\n\n"
    close = "</function>\n</tool_call>" if mark == "<function=" else "</tool_call>"
    reply = form.parse(prompt, ids(tokens, thought + text + close + END), [TOOL])
    assert (reply.reasoning or "").strip() == "hm" and reply.tool_calls == (WEATHER,)
    assert form.parse(prompt, ids(tokens, text), [TOOL]) == Reply(text, None, ())


@pytest.mark.parametrize("arguments", ["city=Paris", "[1]", '{"city": "\\ud800"}'])
@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_open_refuses_arguments_that_are_no_object(name: str, arguments: str):
    said = calls()
    said["tool_calls"][0]["function"]["arguments"] = arguments
    with pytest.raises(Broken) as error:
        ChatFormat.load(tokenizer(QWEN3), name).open([ASKED, said], [])
    shown = repr(arguments)
    rule = "of a tool call, expected a JSON object"
    assert str(error.value) == f"messages[1]: arguments {shown} {rule}"


def test_open_says_what_the_template_raised_and_which_character_is_unknown():
    form = ChatFormat.load(TINY)
    with pytest.raises(Broken, match="role tool, expected system, user or assistant"):
        form.open([ASKED, calls(), RESULT], [])
    with pytest.raises(Broken, match="character '☃'"):
        form.open([{"role": "user", "content": "☃"}], [])


def test_load_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"renderer 'qwen4', expected auto or one of deepseek-r1,"):
        ChatFormat.load(TINY, "qwen4")
    with pytest.raises(ValueError, match="renderer qwen3 does not fit the tokenizer: Assertion"):
        ChatFormat.load(TINY, "qwen3")
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        ChatFormat.load(trained(tuple(TAGS)))
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="expected one that takes content as text"):
        ChatFormat.load(tokenizer(parts))
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ValueError, match=r"pip install 'pyrl-ext\[agents\]'"):
        ChatFormat.load(TINY)
