"""Tokenizer folders, and the tiny tokenizer itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.data.files import DataError
from pyrl_ext.data.tokenizer import load_tokenizer
from tests.helpers.configs import CONFIGS, hf_of


def test_load_tokenizer_has_a_token_for_each_character():
    tokenizer: Any = load_tokenizer(CONFIGS / "tiny")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>"]
    assert tokenizer.convert_ids_to_tokens(range(7)) == special
    assert len(tokenizer) == 128
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 3)
    text = "\n\t" + "".join(map(chr, range(32, 127))) + "  two  spaces "
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert sorted(set(ids)) == list(range(7, 104))
    assert tokenizer("\u00e9")["input_ids"] == [3]
    assert tokenizer.decode([*ids[:4], 1], skip_special_tokens=True) == text[:4]
    config = hf_of()
    for name in ("pad", "eos", "bos"):
        assert config[f"{name}_token_id"] == getattr(tokenizer, f"{name}_token_id")
    assert config["vocab_size"] == len(tokenizer)


def test_load_tokenizer_refuses_folders_without_one(tmp_path: Path):
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="expected a folder that AutoTokenizer loads"):
        load_tokenizer(tmp_path)
