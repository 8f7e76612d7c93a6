"""Identity: what engine and trainer have to agree on before the engine may join."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pyrl_ext.rollout.servers.wire import names_digest

# of a config: who wrote it and in which type, which `Identity` has apart
_NOTES = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests of a model without its weights.

    Args:
        model: of its Hugging Face config
        tensors: of the names and shapes of its weights
        dtype: of its weights in the engine
        tokenizer: of the tokenizer's file; empty: it has none
    """

    model: str
    tensors: str
    dtype: str
    tokenizer: str

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        dtype: str,
        tokenizer: str | Path | None,
    ) -> Identity:
        """
        Args:
            config: Hugging Face config
            shapes: of all tensors that an engine holds, by name
            tokenizer: its folder
        """
        known = {key: value for key, value in config.items() if key not in _NOTES}
        text = json.dumps(known, sort_keys=True)
        model = hashlib.sha256(text.encode()).hexdigest()
        return cls(model, names_digest(shapes), dtype, _tokenizer(tokenizer))

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    def differs(self, other: Mapping[str, Any]) -> str | None:
        """Why an engine with the identity ``other`` may not join; None: it may."""
        for field in fields(self):
            mine, its = getattr(self, field.name), other.get(field.name)
            if field.name == "tokenizer" and "" in (mine, its):
                continue  # an engine without one gets tokens all the same
            if mine != its:
                return (
                    f"its {field.name} is {str(its)[:12]!r}, expected {mine[:12]!r}, the trainer's"
                )
        return None


def _tokenizer(folder: str | Path | None) -> str:
    paths = [] if folder is None else [Path(folder) / name for name in _TOKENIZER]
    found = [path.read_bytes() for path in paths if path.is_file()]
    return hashlib.sha256(found[0]).hexdigest() if found else ""
