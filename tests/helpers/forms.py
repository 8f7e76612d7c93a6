"""Trajectories of several turns as samples: one a trajectory, one a turn, or merged to a fork."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pyrl_ext.loss.inputs import AdvantageFn
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.rollout.turns.trajectory import samples_of
from pyrl_ext.samples import Sample
from tests.helpers.passes import WholeBatch
from tests.helpers.samples import EXPERTS, LAYERS, TOPK

FORMS = ("concatenated", "stepwise", "merged")
PROMPT = 2  # tokens of every prompt


def drawn(lengths: Sequence[int]) -> WholeBatch:
    """Random samples of so many rows: numbers, no model."""
    rows = sum(lengths)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 90, (rows + 1,), generator=g)

    def logprobs() -> torch.Tensor:
        return -torch.rand(rows, generator=g)

    return WholeBatch(
        seqlens=tuple(lengths),
        tokens=tokens[:-1],
        targets=tokens[1:],
        loss_mask=torch.rand(rows, generator=g) > 0.2,
        rollout_logprobs=logprobs(),
        advantages=torch.zeros(rows),
        routes=torch.rand(rows, len(LAYERS), EXPERTS, generator=g).argsort(-1)[..., :TOPK].byte(),
        layer_ids=LAYERS,
        route_mask=torch.rand(rows, generator=g) > 0.2,
        old_logprobs=logprobs(),
        ref_logprobs=logprobs(),
    )


def turns_of(length: int) -> list[tuple[int, int]]:
    """The spans that turns sample in a trajectory of so many tokens: 1 to 5 each, with 0 to 3
    observed tokens between them."""
    spans = list[tuple[int, int]]()
    at = PROMPT
    turn = 0
    while at < length:
        end = min(at + 1 + (3 * turn + length) % 5, length)
        spans.append((at, end))
        at = end + (turn + length) % 4
        turn = turn + 1
    return spans


def parts_of(form: str, turns: int, fork: bool) -> list[range]:
    """The turns of each sample of a trajectory; merged: with ``fork`` cut in its middle."""
    middle = (turns + 1) // 2 if fork else turns
    return {
        "concatenated": [range(turns)],
        "stepwise": [range(turn, turn + 1) for turn in range(turns)],
        "merged": [part for part in (range(middle), range(middle, turns)) if part],
    }[form]


def cut(
    batch: WholeBatch, groups: Sequence[int], rewards: Sequence[float], form: str
) -> tuple[list[Sample], torch.Tensor]:
    """The rows of each sample of ``batch`` as the samples of one trajectory, and which they are.

    The routes of a concatenated one are those of the batch, as if one forward had reported them;
    merged ones get them from their turns.

    Returns: the samples; [T] int64, the row of ``batch`` of each of their rows.
    """
    found = list[Sample]()
    rows = list[torch.Tensor]()
    for number, reward in enumerate(rewards):
        first, end = batch.starts[number : number + 2]
        spans = turns_of(int(end - first) + 1)
        for part in parts_of(form, len(spans), number % 2 == 1):
            held = [spans[turn] for turn in part]
            if form == "concatenated":
                sample = sample_of(batch, number, held)
            else:
                turns = [sample_of(batch, number, [span]) for span in held]
                (sample,), changed = samples_of(turns, merge=True, routes="first")
                assert changed == 0
            last = part.stop == len(spans)
            ids = {"prompt_id": groups[number], "index": number, "reward": reward}
            found.append(replace(sample, turn=part.start, last=last, **ids))
            rows.append(torch.arange(first, first + sample.tokens.numel() - 1))
    return found, torch.cat(rows)


def sample_of(batch: WholeBatch, number: int, spans: list[tuple[int, int]]) -> Sample:
    """Sample ``number`` of ``batch`` up to the last of ``spans``, in which it was sampled."""
    first = int(batch.starts[number])
    stop = spans[-1][1]
    none = torch.zeros(1)
    rows = slice(first, first + stop - 1)
    sampled = torch.zeros(stop, dtype=torch.bool)
    for begin, end in spans:
        sampled[begin:end] = True
    mask = sampled & torch.cat([none > 0, batch.loss_mask[rows]])
    assert batch.routes is not None
    return Sample(
        prompt_id=0,
        index=0,
        tokens=torch.cat([batch.tokens[rows], batch.targets[rows][-1:]]),
        prompt_len=spans[0][0],
        loss_mask=mask,
        rollout_logprobs=torch.cat([none, batch.rollout_logprobs[rows]]).where(mask, 0),
        routes=torch.cat([batch.routes[rows], batch.routes[rows][-1:]]),
        layer_ids=batch.layer_ids,
        route_mask=torch.cat([batch.route_mask[rows], none > 0]),
        weight_version=0,
        finish_reason="stop",
        spans=tuple(spans),
    )


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
