"""unpack_rows: every token's value on every rank, and the gradient of this rank's rows."""

import pytest
import torch
import torch.distributed as dist

from pyrl_ext.ops import gather_rows
from pyrl_ext.pack import TokenLayout, unpack_rows
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

SEQLENS = (5, 0, 1, 12, 3)


def on_rank(group: dist.ProcessGroup) -> None:
    values = torch.randn(21, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for seqlens, tp_size in ((SEQLENS, 1), (SEQLENS, 2), ((21,), 1)):
        layout = TokenLayout(seqlens, group.size(), tp_size)
        rows = layout.rows(group.rank())
        local = gather_rows(values, rows).requires_grad_()
        found = unpack_rows(local, layout, group)
        assert torch.equal(found, values)
        weights = torch.arange(42.0).view(21, 2)
        (grad,) = torch.autograd.grad((found * weights).sum(), local)
        assert torch.equal(grad, gather_rows(weights.double(), rows))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_unpack_rows_is_the_order_of_the_sequences(ranks: int):
    run_ranks(on_rank, ranks)


def test_unpack_rows_of_one_rank_needs_no_group():
    layout = TokenLayout(SEQLENS, tp_size=4)
    tokens = torch.arange(21)
    assert torch.equal(unpack_rows(gather_rows(tokens, layout.rows(0)), layout), tokens)


def test_unpack_rows_refuses_rows_of_another_layout():
    layout = TokenLayout(SEQLENS, tp_size=4)
    with pytest.raises(
        ValueError, match="21 rows and 1 ranks, expected 28 rows on each of cp_size 1"
    ):
        unpack_rows(torch.zeros(21), layout)
    with pytest.raises(
        ValueError, match=r"10 rows and 1 ranks, expected 10 rows .* cp_size 4 ranks"
    ):
        unpack_rows(torch.zeros(10), TokenLayout(SEQLENS, cp_size=4))
