"""Chat templates: messages as text, and as tokens with a mask of those that the assistant wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field, TypeAdapter, ValidationError

from pyrl_ext.data.files import Broken, DataError, cut
from pyrl_ext.data.time_limit import Late, time_limit
from pyrl_ext.data.tokenizer import Tokenizer

SECONDS = 30.0  # of rendering one conversation

# as transformers looks for it
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render(messages: Any, tokenizer: Tokenizer, generate: bool) -> str:
    """The text of a conversation.

    Args:
        generate: up to where the assistant begins its next turn

    Raises: Broken.
    """
    check_messages(messages, tokenizer)
    return apply_template(messages, tokenizer, tokenize=False, add_generation_prompt=generate)


@dataclass(frozen=True)
class Chat:
    """How a question becomes a conversation.

    Args:
        system: message before it; None: none
    """

    system: str | None = None

    def render(self, question: str, tokenizer: Tokenizer) -> str:
        """The conversation as text, up to where the assistant begins. Raises: Broken."""
        messages = [{"role": "user", "content": question}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return render(messages, tokenizer, generate=True)


_NonEmpty = Annotated[str, Field(min_length=1)]


class _TextPart(TypedDict):
    type: Literal["text"]
    text: _NonEmpty


class _ImagePart(TypedDict):
    type: Literal["image"]
    image: Any


class _ChatMessage(TypedDict):
    role: _NonEmpty
    content: _NonEmpty | Annotated[list[_TextPart | _ImagePart], Field(min_length=1)]


_MESSAGES = TypeAdapter(Annotated[list[_ChatMessage], Field(min_length=1)])


def check_messages(messages: Any, tokenizer: Tokenizer) -> None:
    """Refuse what is no conversation, and any if the tokenizer has no template. Raises: Broken.

    Content is a text, or a list of parts: {"type": "text", "text": ...} and {"type": "image",
    "image": ...}.
    """
    try:
        _MESSAGES.validate_python(messages, strict=True)
    except ValidationError as error:
        place = error.errors()[0]["loc"]
        fault = f"messages {cut(messages)}"
        if place:
            fault = f"messages[{place[0]}] {cut(messages[place[0]])}"
        rule = 'a non-empty list of {"role": text, "content": non-empty text or parts}'
        raise Broken(fault, rule) from None
    if not tokenizer.chat_template:
        raise Broken("messages, but the tokenizer has no chat template", "a tokenizer with one")


def tokens_of_chat(messages: list[Any], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(tokens, 1 for each token of an assistant's turn, else 0) of a conversation.

    A turn is what the template marks with ``{% generation %}``; without such marks it is what
    comes after the generation prompt, up to where the next turn begins: the tokens of the whole,
    without those of the conversation cut there.

    Raises:
        Broken: there is no assistant's turn, or the template does not render the conversation up to
            a turn as a part of the whole
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise Broken("messages without an assistant's turn", "at least one; the loss is over it")
    if not _GENERATION_MARK.search(tokenizer.get_chat_template()):
        return _tokens_by_prefixes(messages, tokenizer)
    marked = apply_template(
        messages,
        tokenizer,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(marked["input_ids"]), list(marked["assistant_masks"])


def _tokens_by_prefixes(messages: list[Any], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    def encode(end: int, generate: bool) -> list[int]:
        options = {"tokenize": False, "add_generation_prompt": generate}
        text = apply_template(messages[:end], tokenizer, **options)
        return encoded(text, tokenizer, add_special_tokens=False)

    if messages[0]["role"] == "assistant":
        raise Broken("messages[0] of the assistant", "a turn before it that it answers")
    whole = encode(len(messages), False)
    mask = [0] * len(whole)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = encode(turn, True)
        until = encode(turn + 1, False)
        if not len(before) < len(until) or any(p != whole[: len(p)] for p in (before, until)):
            raise Broken(
                f"messages[{turn}]: the chat template renders the turns up to it differently "
                "than within the whole conversation",
                "the same tokens; use a template with {% generation %} marks, or write `tokens` "
                "and `loss_mask`",
            )
        mask[len(before) : len(until)] = [1] * (len(until) - len(before))
    return whole, mask


def apply_template(messages: list[Any], tokenizer: Tokenizer, **options: Any) -> Any:
    """Render messages by the tokenizer's chat template.

    Raises:
        Broken: the template fails
        DataError: it takes more than `SECONDS`, in the main thread; so would other conversations
    """
    try:
        with time_limit(SECONDS):
            return tokenizer.apply_chat_template(messages, **options)
    except Late:
        raise DataError(
            f"chat template: {SECONDS:g} s were not enough to render {len(messages)} messages, "
            "expected a template that ends; check its loops"
        ) from None
    except Exception as error:  # templates raise what they like
        raise Broken(
            f"chat template: {type(error).__name__}: {error}", "messages it can render"
        ) from None


def check_size(text: str, tokenizer: Tokenizer, most: int, limit: str) -> None:
    """Refuse a text that has too many characters for ``most`` tokens, without encoding it: that
    takes minutes for the largest.

    Args:
        limit: the key that sets the limit

    Raises: Broken.
    """
    if len(text) <= 32 * most:
        return
    longest = max(map(len, tokenizer.get_vocab()))
    if len(text) > longest * most:
        raise Broken(
            f"{len(text):,} characters in {cut(text)}",
            f"1 to {limit} {most}; no token has more than {longest} characters",
        )


def encoded(text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> list[int]:
    """The tokens of a text. Raises: Broken where the tokenizer raises."""
    try:
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    except Exception as error:  # tokenizers raises no narrower one
        raise Broken(
            f"the tokenizer raised {type(error).__name__}: {error} for {cut(text)}",
            "characters the tokenizer knows",
        ) from error


def check_known(text: str, tokens: list[int], tokenizer: Tokenizer) -> None:
    """Refuse ``text`` if its ``tokens`` hold the unknown token. Raises: Broken."""
    if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in tokens:
        return
    for character in dict.fromkeys(text):
        if tokenizer.unk_token_id in tokenizer(character, add_special_tokens=False)["input_ids"]:
            found = f"character {character!r} (U+{ord(character):04X})"
            break
    else:
        found = "an unknown token"
    raise Broken(f"{found} in {cut(text)}", "characters the tokenizer knows")
