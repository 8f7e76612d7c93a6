"""Load a tokenizer folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyrl_ext.data.chat import Tokenizer
from pyrl_ext.data.files import DataError


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
