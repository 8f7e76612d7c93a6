"""Lengths of the records that a run without rollouts trains on, where they need no tokenizer."""

from __future__ import annotations

import json
from functools import lru_cache

MOST_BYTES = 16 << 20
MOST_RECORDS = 4096
"""The part of a file that is read: a plan answers in a second."""


@lru_cache(maxsize=8)
def record_lengths(path: str) -> tuple[tuple[int, int], ...]:
    """(tokens before the first one trained on, tokens from it on) of the first records of a file.

    Empty unless all of them hold `tokens` and `loss_mask`, in a .jsonl: only a tokenizer knows the
    lengths of messages, and a broken record is reported when the run reads it.
    """
    if not path.endswith(".jsonl"):
        return ()
    try:
        with open(path, "rb") as file:
            lines = file.readlines(MOST_BYTES)[:MOST_RECORDS]
        records = [json.loads(line) for line in lines if line.strip()]
        return tuple(
            (mask.index(1), len(mask) - mask.index(1))
            for mask in ([*map(int, each["loss_mask"])] for each in records if each["tokens"])
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()
