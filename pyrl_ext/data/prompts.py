"""Prompts from files: read, checked and encoded before any model is built."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from pyrl_ext.data.chat import Chat, check_known, check_size, encoded, render
from pyrl_ext.data.files import Broken, Records, cut, refuse
from pyrl_ext.data.images import ImageReader, images_of, place
from pyrl_ext.data.sampler import Epochs
from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.plan.records import Mistakes, check_fields
from pyrl_ext.samples import Prompt

AnswerRule = tuple[str, Callable[[Any], bool]]  # the rule, and whether an answer fulfils it


def load_prompts(
    records: Records,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    answer_rule: AnswerRule | None = None,
    reader: ImageReader | None = None,
    chat: Chat | None = None,
) -> list[Prompt]:
    """Read all prompts of a file or dataset; a prompt's id is the place of its record in it.

    A record holds either `prompt`, a text that is encoded as it is, or `messages`, a list of
    {"role": ..., "content": ...} rendered by the tokenizer's chat template up to where the
    assistant begins. `answer` and any other field are kept. Content may be a list of parts:
    {"type": "text", "text": ...} and {"type": "image", "image": path or bytes}.

    Args:
        records: from `open_records`
        tokenizer: from `load_tokenizer`
        max_prompt_tokens: a longer prompt is an error [tokens]
        answer_rule: what the reward needs as `answer`, and whether one is that; None: anything
        reader: of the images in messages; None: the model takes none
        chat: makes a `prompt` a conversation; None: it is encoded as it is

    Raises:
        DataError: with every record that cannot be used, as file:line: what, expected rule; those
            that share a mistake on one line
    """
    prompts: list[Prompt] = []
    mistakes = Mistakes()
    for number in range(len(records)):
        try:
            prompt = _prompt(records, number, tokenizer, max_prompt_tokens, reader, chat)
            if answer_rule is not None and not answer_rule[1](prompt.answer):
                what = "no answer" if prompt.answer is None else f"answer {cut(prompt.answer)}"
                raise Broken(what, f"{answer_rule[0]}; data.reward compares with it")
            prompts.append(replace(prompt, id=len(prompts)))
        except Broken as broken:
            mistakes.add(number, records.where(number), str(broken))
    refuse(records.path, mistakes, len(records))
    return prompts


class PromptSource:
    """A stream of training prompts over a list, and a held-out set.

    The place of a step in the stream follows from its number; see `Epochs`.

    Args:
        prompts: to train on
        held_out: to evaluate on; None: an eighth of `prompts`, chosen by a hash of the tokens and
            not trained on
        seed: of the order
        shuffle: False: file order
        content: of a prompt; those with equal contents are on one side of the split

    Raises:
        ValueError: nothing to train on or nothing to evaluate on
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        content: Callable[[Prompt], Hashable] | None = None,
    ):
        content = content or _content
        train = list(prompts)
        if held_out is None:
            train, held_out = _split(train, content)
        if not train or not held_out:
            different = len({content(p) for p in prompts})
            raise ValueError(
                f"PromptSource: {len(prompts)} prompts, {different} of them different: "
                f"{len(train)} to train on and {len(held_out)} held out, expected at least one of "
                "each. Give more prompts, or data.eval_prompts"
            )
        self.prompts = train
        self._epochs = Epochs(len(train), seed, shuffle)
        self._held_out = [replace(p, id=-1 - i) for i, p in enumerate(held_out)]

    def take(self, step: int, n: int, first: int | None = None) -> list[Prompt]:
        """See `Prompts.take`; an id is the place in the stream."""
        start = step * n if first is None else first
        taken = enumerate(self._epochs.take(start, n), start=start)
        return [replace(self.prompts[number], id=place) for place, number in taken]

    def held_out(self, n: int) -> list[Prompt]:
        """The first n held-out prompts, or all if there are fewer; ids are -1, -2, ..."""
        return self._held_out[:n]


def _split(
    prompts: list[Prompt], content: Callable[[Prompt], Hashable]
) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out): an eighth of the distinct prompts, at least one, by rank of a hash."""
    # a cryptographic hash: a checksum would hold out related prompts together
    marks = {content(p): sha256(repr(content(p)).encode()).digest() for p in prompts}
    ranked = sorted(marks, key=lambda content: marks[content])
    chosen = set(ranked[: max(1, len(ranked) // 8)])
    train = [p for p in prompts if content(p) not in chosen]
    return train, list({content(p): p for p in prompts if content(p) in chosen}.values())


def _content(prompt: Prompt) -> tuple[Any, ...]:
    """The tokens and images of a prompt, by which it differs from others."""
    images: Any = prompt.images
    return (prompt.tokens, *(each.source for each in images)) if images else prompt.tokens


def _prompt(
    records: Records,
    number: int,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    reader: ImageReader | None,
    chat: Chat | None,
) -> Prompt:
    record = check_fields(records.read(number), rollouts=True)
    has_messages = "messages" in record
    if has_messages:
        text = render(record["messages"], tokenizer, generate=True)
    else:
        text = record["prompt"]
        if not isinstance(text, str) or not text:
            raise Broken(f"prompt {cut(text)}", "a non-empty text")
        if chat is not None:
            text = chat.render(text, tokenizer)
    check_size(text, tokenizer, max_prompt_tokens, "max_prompt_tokens")
    is_plain = not has_messages and chat is None
    tokens = encoded(text, tokenizer, add_special_tokens=is_plain)
    check_known(text, tokens, tokenizer)
    images = images_of(record["messages"]) if has_messages else []
    tokens, placed = place(reader, tokens, images)
    if not 1 <= len(tokens) <= max_prompt_tokens:
        rule = f"1 to max_prompt_tokens {max_prompt_tokens}"
        raise Broken(f"{len(tokens)} tokens in {cut(text)}", rule)
    placed = tuple(replace(image, record=records.where(number)) for image in placed)
    rest = {k: v for k, v in record.items() if k not in ("prompt", "messages", "answer")}
    return Prompt(0, tuple(tokens), record.get("answer"), text, rest, placed)
