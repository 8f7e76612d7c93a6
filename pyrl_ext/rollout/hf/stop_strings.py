"""Stop strings: finds the responses that contain one, from their last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyrl_ext.data.chat import Tokenizer
from pyrl_ext.samples import Sampling


def need_tokenizer(call: str, sampling: Sampling, tokenizer: object) -> None:
    """Raises ValueError if there are stop strings and the engine has no tokenizer."""
    if sampling.stop and tokenizer is None:
        raise ValueError(
            f"{call}: stop strings {list(sampling.stop)} without a tokenizer, expected "
            "one to decode tokens with. Build the engine with tokenizer"
        )


class StopStrings:
    """Finds the token that completes a stop string, which may begin and end within tokens.

    Each token adds at least one byte, so a stop string of n bytes lies within the last n tokens.

    Args:
        tokenizer: a transformers tokenizer
        stop: texts, none empty

    Attributes:
        window: number of last tokens that have to be looked at
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]):
        assert tokenizer is not None  # see `need_tokenizer`
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        # one more: some tokenizers drop a space at the beginning of a text
        self.window = max(len(text.encode()) for text in self.stop) + 1

    def complete(self, tails: Sequence[Sequence[int]]) -> np.ndarray:
        """[N] bool, which of the N tails (the last `window` tokens) contain a stop string."""
        texts = self.tokenizer.batch_decode(tails, clean_up_tokenization_spaces=False)
        return np.array([any(stop in text for stop in self.stop) for text in texts], dtype=bool)
