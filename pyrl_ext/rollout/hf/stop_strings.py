"""Stop strings: which responses hold one, from their last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyrl_ext.samples import Sampling


def need_tokenizer(engine: str, sampling: Sampling, tokenizer: object) -> None:
    """Raises ValueError for stop strings in an engine that has no tokenizer."""
    if sampling.stop and tokenizer is None:
        raise ValueError(
            f"{engine}.stream: stop strings {list(sampling.stop)} without a tokenizer, expected "
            "one, which makes text of tokens. Build the engine with tokenizer"
        )


class StopStrings:
    """Finds the token that completes a stop string, wherever in its tokens it begins and ends.

    Every token adds a byte to the text or more, so that a string which the newest token completes
    lies in as many tokens as it has bytes.

    Args:
        tokenizer: of transformers
        stop: texts, none empty

    Attributes:
        window: tokens at the end of a response that decide
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        # one more: some tokenizers drop the space that a text begins with
        self.window = max(len(text.encode()) for text in self.stop) + 1

    def complete(self, tails: Sequence[Sequence[int]]) -> np.ndarray:
        """[N] bool, whether each of the N tails (the last `window` tokens) holds a stop string."""
        texts = self.tokenizer.batch_decode(tails, clean_up_tokenization_spaces=False)
        return np.array([any(stop in text for stop in self.stop) for text in texts], dtype=bool)
