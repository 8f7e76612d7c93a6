"""Merging statistics of parts of the vocabulary, against torch over all columns."""

import pytest
import torch

from pyrl_ext.loss.vocab_parallel import shard_columns
from pyrl_ext.ops import token_logprob_combine, token_logprob_stats
from pyrl_ext.ops.token_logprob.reference import merge_parts


def parts_of(logits, targets, scale, sizes):
    """[R, 4, T] statistics of column ranges of these sizes."""
    parts = []
    first = 0
    for size in sizes:
        columns = logits[:, first : first + size].contiguous()
        parts.append(token_logprob_stats(columns, targets, scale, first, size))
        first += size
    return torch.stack(parts)


@pytest.mark.parametrize("sizes", [(12,), (5, 7), (1, 1, 10), (3, 3, 3, 3)])
def test_token_logprob_combine_equals_log_softmax_over_all_columns(sizes):
    g = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(9, 12, generator=g, dtype=torch.float64)
    logits[2, :5] = -torch.inf  # a whole part without a finite logit
    targets = torch.arange(9) % 12
    scale = torch.linspace(0.5, 2, 9, dtype=torch.float64)
    whole = torch.log_softmax(logits * scale[:, None], -1)
    parts = parts_of(logits, targets, scale, sizes)
    logprob, entropy, top, _ = token_logprob_combine(parts, targets, scale, 12)
    wanted = whole[torch.arange(9), targets]
    assert torch.allclose(logprob.exp(), wanted.exp(), rtol=1e-12)
    assert torch.allclose(entropy, -(whole.exp() * whole.nan_to_num(neginf=0)).sum(-1), rtol=1e-12)
    assert torch.equal(top, logits.amax(-1))
    assert token_logprob_combine(parts, targets, scale, 4)[0].isnan().tolist() == [
        t >= 4 for t in targets
    ]


def test_merge_parts_may_be_done_in_two_steps():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 12, generator=g, dtype=torch.float64)
    targets = torch.arange(6)
    scale = torch.ones(6, dtype=torch.float64)
    parts = parts_of(logits, targets, scale, (3, 3, 6))
    first = torch.stack(merge_parts(parts[:2], scale))
    twice = merge_parts(torch.stack([first, parts[2]]), scale)
    for once, again in zip(merge_parts(parts, scale), twice, strict=True):
        assert torch.allclose(once, again, rtol=1e-13)


def test_shard_columns_without_a_group_leave_out_padding():
    assert shard_columns(16, 12, None) == (0, 12)
