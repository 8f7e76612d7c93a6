"""Identity: what engine and trainer have to agree on before the engine may join."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.remote.wire import names_digest

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
        alpha: of the adapters that the engine applies, as text; "None": it applies none
    """

    model: str
    tensors: str
    dtype: str
    tokenizer: str
    alpha: str

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        dtype: str,
        tokenizer: str | Path | None,
        lora: Lora | None = None,
    ) -> Identity:
        """
        Args:
            config: Hugging Face config
            shapes: of all tensors that an engine holds, by name
            tokenizer: its folder
            lora: adapters that the engine applies; their ranks are in `shapes`
        """
        known = {key: value for key, value in config.items() if key not in _NOTES}
        model = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        alpha = None if lora is None else lora.alpha
        return cls(model, names_digest(shapes), dtype, _tokenizer(tokenizer), str(alpha))

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    def differs(self, other: Mapping[str, Any]) -> str | None:
        """Why an engine with the identity ``other`` may not join; None: it may."""
        for name, mine in asdict(self).items():
            its = other.get(name)
            if name == "tokenizer" and "" in (mine, its):
                continue  # an engine without one gets tokens all the same
            if mine != its:
                return f"its {name} is {str(its)[:12]!r}, expected {mine[:12]!r}, the trainer's"
        return None


def _tokenizer(folder: str | Path | None) -> str:
    paths = [] if folder is None else [Path(folder) / name for name in _TOKENIZER]
    found = [path.read_bytes() for path in paths if path.is_file()]
    return hashlib.sha256(found[0]).hexdigest() if found else ""
