"""Tokenizers of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pyrl_ext.data.files import DataError


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts, records and rewards use."""

    eos_token_id: int
    unk_token_id: int | None
    chat_template: str | None

    def __call__(self, text: str, add_special_tokens: bool = True) -> Mapping[str, list[int]]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[str]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def get_chat_template(self) -> str: ...

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> Any: ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The Hugging Face tokenizer in a folder, without network.

    Raises:
        DataError: no such folder, or no tokenizer in it
    """
    if not Path(path).is_dir():
        raise DataError(f"tokenizer {path}: no such folder, expected one with a tokenizer.json")
    from transformers import AutoTokenizer  # brings the hub, and takes seconds

    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        return loaded
    except Exception as error:
        raise DataError(
            f"tokenizer {path}: {type(error).__name__}: {error}, expected a folder that "
            "AutoTokenizer loads (tokenizer.json and tokenizer_config.json)"
        ) from error


def check_same_tokens(ours: Tokenizer, of_teacher: Tokenizer, name: str) -> None:
    """Check that a teacher reads the policy's token ids as the policy does.

    Raises:
        DataError: a token has another id, or is in one vocabulary alone
    """
    own = ours.get_vocab()
    other = of_teacher.get_vocab()
    if own == other:
        return
    different = [text for text in sorted({*own, *other}) if own.get(text) != other.get(text)]
    first = different[0]
    ids = f"{own.get(first, 'no token')} and {other.get(first, 'no token')}"
    raise DataError(
        f"teacher {name}: its tokenizer differs from model.tokenizer in {len(different):,} "
        f"tokens, such as {first!r}: {ids}. Expected equal vocabularies; the teacher would score "
        "other text"
    )
