"""Prompts from files: read, checked and encoded before any model is built."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import pyarrow
import pyarrow.parquet

from pyrl_ext.samples import Prompt

AnswerRule = tuple[str, Callable[[Any], bool]]  # the rule, and whether an answer fulfils it

_SHOWN_PROBLEMS = 50


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts and rewards use."""

    eos_token_id: int
    unk_token_id: int | None
    chat_template: str | None

    def __call__(self, text: str, add_special_tokens: bool = True) -> Mapping[str, list[int]]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(
        self, conversation: list[Any], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


class DataError(ValueError):
    """All problems of a prompt file, one a line."""


class _Broken(Exception):
    """One record cannot be used: (what, expected rule)."""


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    answer_rule: AnswerRule | None = None,
) -> list[Prompt]:
    """Read a file of prompts; a prompt's id is the place of its record in the file.

    A record holds either `prompt`, a text that is encoded as it is, or `messages`, a list of
    {"role": ..., "content": ...} rendered by the tokenizer's chat template up to where the
    assistant begins. `answer` and any other field are kept.

    Args:
        path: .jsonl (UTF-8, one object a line, blank lines ignored) or .parquet
        tokenizer: from `load_tokenizer`
        max_prompt_tokens: a longer prompt is an error [tokens]
        answer_rule: what the reward needs as `answer`, and whether one is that; None: anything

    Raises:
        DataError: listing every record that cannot be used, as file:line: what, expected rule
    """
    path = Path(path)
    prompts: list[Prompt] = []
    problems: list[str] = []
    for where, read in _records(path):
        try:
            prompt = _prompt(read(), tokenizer, max_prompt_tokens)
            if answer_rule is not None and not answer_rule[1](prompt.answer):
                what = "no answer" if prompt.answer is None else f"answer {_cut(prompt.answer)}"
                raise _Broken(what, f"{answer_rule[0]}; data.reward compares with it")
            prompts.append(replace(prompt, id=len(prompts)))
        except _Broken as broken:
            problems.append(f"{where}: {broken.args[0]}, expected {broken.args[1]}")
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        lines = problems[:_SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise DataError(
            f"{path}: {len(problems)} of {len(problems) + len(prompts)} records cannot be used\n  "
            + "\n  ".join(lines)
        )
    if not prompts:
        raise DataError(f"{path}: no records, expected at least one prompt")
    return prompts


class PromptSource:
    """A stream of training prompts over a list, and a held-out set.

    Epoch e is shuffled by (seed, e), and the place of a step in the stream follows from its number:
    a resumed run needs no cursor.

    Args:
        prompts: to train on
        held_out: to evaluate on; None: an eighth of `prompts`, chosen by a hash of the tokens and
            not trained on
        seed: of the order
        shuffle: False: file order

    Raises:
        ValueError: nothing to train on or nothing to evaluate on
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt] | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ):
        train = list(prompts)
        if held_out is None:
            train, held_out = _split(train)
        if not train or not held_out:
            raise ValueError(
                f"PromptSource: {len(train)} prompts to train on and {len(held_out)} held out, "
                "expected at least one of each; give more prompts or an evaluation file"
            )
        self.prompts, self.seed, self.shuffle = train, seed, shuffle
        self._held_out = [replace(p, id=-1 - i) for i, p in enumerate(held_out)]

    def take(self, step: int, n: int) -> list[Prompt]:
        """The n prompts of a training step; an id is the place in the stream, step * n + i."""
        size = len(self.prompts)
        orders: dict[int, list[int]] = {}
        taken = []
        for place in range(step * n, (step + 1) * n):
            epoch, offset = divmod(place, size)
            if epoch not in orders:
                orders[epoch] = self._order(epoch)
            taken.append(replace(self.prompts[orders[epoch][offset]], id=place))
        return taken

    def held_out(self, n: int) -> list[Prompt]:
        """The first n held-out prompts, or all if there are fewer; ids are -1, -2, ..."""
        return self._held_out[:n]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
        return order


def _split(prompts: list[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out): an eighth of the distinct prompts, at least one, by rank of a hash."""
    # a cryptographic hash: a checksum would hold out related prompts together
    marks = {p.tokens: sha256(repr(p.tokens).encode()).digest() for p in prompts}
    ranked = sorted(marks, key=lambda tokens: marks[tokens])
    chosen = set(ranked[: max(1, len(ranked) // 8)])
    train = [p for p in prompts if p.tokens not in chosen]
    return train, list({p.tokens: p for p in prompts if p.tokens in chosen}.values())


def _records(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(where, read) of each record; read() gives it or raises _Broken."""
    if path.is_dir():
        raise DataError(f"{path}: a folder, expected a .jsonl or .parquet file")
    if not path.is_file():
        raise DataError(f"{path}: no such file, expected a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if line.strip():
                yield f"{path}:{number}", lambda line=line: _parse(line)
    elif path.suffix == ".parquet":
        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: {error}, expected a parquet file") from error
        for number, row in enumerate(rows):
            # a column that a row does not use is null, the same as an absent field
            yield (
                f"{path}: row {number}",
                lambda r=row: {k: v for k, v in r.items() if v is not None},
            )
    else:
        raise DataError(f"{path}: suffix {path.suffix!r}, expected .jsonl or .parquet")


def _parse(line: bytes) -> Any:
    rule = "one JSON object a line"
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_distinct)
        if b"\\u" in line:  # the escape of half a character is valid JSON
            json.dumps(record, ensure_ascii=False).encode("utf-8")
        return record
    except UnicodeDecodeError as error:
        raise _Broken(
            f"byte {line[error.start]:#04x} at column {error.start + 1}", "UTF-8"
        ) from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise _Broken(f"{half!r}, a lone surrogate", "whole Unicode characters") from None
    except json.JSONDecodeError as error:
        raise _Broken(f"{error.msg} at column {error.colno}", rule) from None
    except RecursionError:
        raise _Broken("objects or lists nested too deeply to read", rule) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise _Broken(str(error).partition(";")[0], "a shorter number, or a text") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise _Broken(f"field {_cut(repeated)} repeated", "each field once")
    return record


def _prompt(record: Any, tokenizer: Tokenizer, max_prompt_tokens: int) -> Prompt:
    if not isinstance(record, dict):
        raise _Broken(f"a {type(record).__name__}", "a JSON object")
    if ("prompt" in record) == ("messages" in record):
        has = ", ".join(record) or "nothing"
        raise _Broken(f"fields {has[:200]}", "either `prompt` or `messages`")
    is_text = "prompt" in record
    text = record["prompt"] if is_text else _render(record["messages"], tokenizer)
    if not isinstance(text, str) or not text:
        raise _Broken(f"prompt {_cut(text)}", "a non-empty text")
    _check_size(text, tokenizer, max_prompt_tokens)
    tokens = list(tokenizer(text, add_special_tokens=is_text)["input_ids"])
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
        raise _Broken(
            f"{_unknown(text, tokenizer)} in {_cut(text)}", "characters the tokenizer knows"
        )
    if not 1 <= len(tokens) <= max_prompt_tokens:
        raise _Broken(
            f"{len(tokens)} tokens in {_cut(text)}", f"1 to max_prompt_tokens {max_prompt_tokens}"
        )
    rest = {k: v for k, v in record.items() if k not in ("prompt", "messages", "answer")}
    return Prompt(0, tuple(tokens), record.get("answer"), text, rest)


def _check_size(text: str, tokenizer: Tokenizer, max_prompt_tokens: int) -> None:
    """Refuse a text that has too many characters for the limit, without encoding it: that takes
    minutes for the largest."""
    if len(text) <= 32 * max_prompt_tokens:
        return
    longest = max(map(len, tokenizer.get_vocab()))
    if len(text) > longest * max_prompt_tokens:
        raise _Broken(
            f"{len(text):,} characters in {_cut(text)}",
            f"1 to max_prompt_tokens {max_prompt_tokens}; no token has more than {longest} "
            "characters",
        )


def _render(messages: Any, tokenizer: Tokenizer) -> str:
    rule = 'a non-empty list of {"role": text, "content": non-empty text}'
    if not isinstance(messages, list) or not messages:
        raise _Broken(f"messages {_cut(messages)}", rule)
    for number, message in enumerate(messages):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else (0, 0)
        )
        if not (isinstance(role, str) and role and isinstance(content, str) and content):
            raise _Broken(f"messages[{number}] {_cut(message)}", rule)
    if not tokenizer.chat_template:
        raise _Broken("messages, but the tokenizer has no chat template", "one, or `prompt`")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise _Broken(
            f"chat template: {type(error).__name__}: {error}", "messages it can render"
        ) from None


def _unknown(text: str, tokenizer: Tokenizer) -> str:
    for character in dict.fromkeys(text):
        if tokenizer.unk_token_id in tokenizer(character, add_special_tokens=False)["input_ids"]:
            return f"character {character!r} (U+{ord(character):04X})"
    return "an unknown token"


def _cut(value: Any) -> str:
    shown = repr(value[:80] if isinstance(value, str) else value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
