"""From logits to tokens: temperature, top-k, top-p, a counter-based draw, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.ops.digest import GOLDEN, splitmix64
from pyrl_ext.samples import Sampling


def stream_keys(seed: int, prompt_ids: Tensor, indices: Tensor) -> Tensor:
    """One random stream per (seed, prompt id, sample index).

    Args:
        seed: any integer; its low 64 bits are used
        prompt_ids: [N] int64
        indices: [N] int64, sample index in the group

    Returns:
        [N] int64 keys
    """
    low = seed % 2**64
    key = splitmix64(torch.full_like(prompt_ids, low - 2**64 if low >= 2**63 else low))
    for part in (prompt_ids, indices):  # each part selects an output of the stream so far
        key = splitmix64(key + (part + 1) * GOLDEN)
    return key


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers of the streams at the token positions.

    Args:
        keys: [N] int64 from `stream_keys`
        positions: [N] int64, position of the token to be drawn in its sequence

    Returns:
        [N] float64 in the open interval (0, 1), multiples of 2^-48 plus 2^-49
    """
    bits = splitmix64(keys + (positions + 1) * GOLDEN)
    return (((bits >> 16) & (2**48 - 1)).double() + 0.5) * 2.0**-48


def processed_logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs of the distribution tokens are drawn from: temperature, then top-k, then top-p.

    Top-k keeps every token as likely as the k-th one. Top-p keeps tokens, from the most likely on,
    until the probability kept before them reaches top_p; the most likely token always stays.

    Args:
        logits: [N, V] any float dtype
        sampling: temperature, top_k and top_p are read

    Returns:
        [N, V] float32, -inf for tokens that cannot be drawn
    """
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if sampling.top_p < 1:
        probs, order = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
        cut = probs.cumsum(-1) - probs >= sampling.top_p
        cut[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(cut).scatter_(1, order, cut), float("-inf"))
    return scores.log_softmax(-1)


def draw(
    logits: Tensor, keys: Tensor, positions: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draws one token a row by inverting the distribution function in float64.

    Args:
        logits: [N, V] any float dtype
        keys: [N] int64, random stream of each row
        positions: [N] int64, position of the token to be drawn
        sampling: see `Sampling`

    Returns:
        tokens [N] int64; their log-probs [N] float32 (greedy: of the unfiltered model at
        temperature 1); what could be drawn [N, V] bool, if ``sampling`` asks for it
    """
    kept = None
    if sampling.greedy:
        logprobs = logits.float().log_softmax(-1)
        tokens = logprobs.argmax(-1, keepdim=True)
    else:
        logprobs = processed_logprobs(logits, sampling)
        kept = logprobs > -torch.inf if sampling.sampling_mask else None
        reached = logprobs.double().exp().cumsum(-1)
        point = uniforms(keys, positions)[:, None] * reached[:, -1:]
        # the first token whose distribution function exceeds the point: never one of probability 0
        tokens = torch.searchsorted(reached, point, right=True)
        # nan logits reach nothing; their nan log-prob is what the caller sees
        tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0], kept


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
