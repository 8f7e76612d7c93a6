"""Microbatch: the rows of a rank, for every place that a rank can have."""

import pytest
import torch

from pyrl_ext.dist.topology import Place
from pyrl_ext.pack.microbatch import Microbatch
from tests.helpers.probe import local_rows
from tests.helpers.tiny import random_batch

PLACES = [
    Place(cp, cp_rank, tp_size=tp, tp_rank=tp - 1, align=align)
    for cp in (1, 2, 4)
    for cp_rank in range(cp)
    for tp in (1, 2)
    for align in (1, 16 * cp)
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_of_takes_the_rows_of_its_place(place):
    batch, ids = random_batch(6), [4, 0, 3]
    micro = Microbatch.of(batch, ids, place)
    rows = micro.rows
    if place.align == 1:
        assert rows.tolist() == local_rows(batch, ids, place)
    assert all(n % place.align == 0 for n in micro.layout.padded_seqlens)
    part = len(rows) // place.tp_size
    assert torch.equal(micro.router_rows, rows[place.tp_rank * part :][:part])
    for name in ("tokens", "targets", "positions"):
        want = torch.where(rows >= 0, getattr(batch, name)[rows.clamp(min=0)], 0)
        assert torch.equal(getattr(micro, name), want)
    assert torch.equal(micro.inputs.loss_mask, (rows >= 0) & batch.loss_mask[rows.clamp(min=0)])


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_of_no_samples_is_padding_alone(place):
    """The rank takes part in collectives, and computes no row of the batch."""
    batch = random_batch(2)
    batch = batch.with_(loss_mask=torch.ones_like(batch.loss_mask))
    micro = Microbatch.of(batch, (), place, depths=2)
    assert len(micro.rows) == micro.layout.num_local > 0
    assert (micro.rows == -1).all() and (micro.router_rows == -1).all()
    assert not micro.tokens.any() and not micro.targets.any()
    assert not micro.inputs.loss_mask.any() and not micro.inputs.rollout_logprobs.any()
    assert not any(inputs.loss_mask.any() or inputs.tokens.any() for inputs in micro.mtp)
    assert sum(segment.q_len for segment in micro.layout.segments(place.cp_rank)) == len(micro.rows)
