"""Trajectories of several turns as samples: one a trajectory, one a turn, or merged to a fork."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pyrl_ext.loss.inputs import AdvantageFn
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.samples import Sample
from tests.helpers.passes import WholeBatch

FORMS = ("concatenated", "stepwise", "merged")
PROMPT = 2  # tokens of every prompt


def turns_of(length: int) -> list[tuple[int, int]]:
    """The spans that turns sample in a trajectory of so many tokens: 1 to 5 each, with 0 to 3
    observed tokens between them."""
    spans, at, turn = list[tuple[int, int]](), PROMPT, 0
    while at < length:
        end = min(at + 1 + (3 * turn + length) % 5, length)
        spans.append((at, end))
        at, turn = end + (turn + length) % 4, turn + 1
    return spans


def parts_of(form: str, turns: int) -> list[range]:
    """The turns of each sample of a trajectory; merged: a fork in its middle."""
    middle = (turns + 1) // 2
    return {
        "concatenated": [range(turns)],
        "stepwise": [range(turn, turn + 1) for turn in range(turns)],
        "merged": [part for part in (range(middle), range(middle, turns)) if part],
    }[form]


def cut(
    batch: WholeBatch, groups: Sequence[int], rewards: Sequence[float], form: str
) -> tuple[list[Sample], torch.Tensor]:
    """The rows of each sample of ``batch`` as the samples of one trajectory, and which they are.

    Returns: the samples; [T] int64, the row of ``batch`` of each of their rows.
    """
    found, rows = list[Sample](), list[torch.Tensor]()
    for number, (first, end) in enumerate(zip(batch.starts, batch.starts[1:], strict=False)):
        tokens = torch.cat([batch.tokens[first:end], batch.targets[end - 1 : end]])
        spans = turns_of(len(tokens))
        for part in parts_of(form, len(spans)):
            held = [spans[turn] for turn in part]
            stop = len(tokens) if part.stop == len(spans) else held[-1][1]
            inside = torch.zeros(stop, dtype=torch.bool)
            for begin, close in held:
                inside[begin:close] = True
            inside[1:] &= batch.loss_mask[first : first + stop - 1]
            scores = torch.cat([torch.zeros(1), batch.rollout_logprobs[first : first + stop - 1]])
            rows.append(torch.arange(first, first + stop - 1))
            assert batch.routes is not None
            routes = batch.routes[rows[-1]]
            found.append(
                Sample(
                    prompt_id=groups[number],
                    index=number,
                    tokens=tokens[:stop],
                    prompt_len=held[0][0],
                    loss_mask=inside,
                    rollout_logprobs=torch.where(inside, scores, 0),
                    routes=torch.cat([routes, routes[-1:]]),
                    layer_ids=batch.layer_ids,
                    route_mask=torch.cat([batch.route_mask[rows[-1]], torch.zeros(1) > 0]),
                    weight_version=0,
                    finish_reason="stop",
                    reward=rewards[number],
                    turn=part.start,
                    spans=tuple(held),
                    last=part.stop == len(spans),
                )
            )
    return found, torch.cat(rows)


def batch_of(
    batch: WholeBatch, samples: Sequence[Sample], rows: torch.Tensor, advantage: AdvantageFn
) -> tuple[WholeBatch, BatchIndex]:
    """The samples as rows, with the log-probs that ``batch`` has of them, and their numbers."""
    index = BatchIndex.of(samples)
    whole = Batch.of(samples, index.advantages(advantage))
    fields = {name: value for name, value in vars(whole).items() if name in _FIELDS}
    found = WholeBatch(**fields)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    return replace(
        found, old_logprobs=batch.old_logprobs[rows], ref_logprobs=batch.ref_logprobs[rows]
    ), index


_FIELDS = set(Batch.__dataclass_fields__)
