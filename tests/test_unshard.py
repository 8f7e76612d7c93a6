"""unshard over gloo ranks against one process, and its gradient against a loop over rows."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from pyrl_ext.layout import TokenLayout
from pyrl_ext.ops import gather_rows
from pyrl_ext.unshard import unshard

CASES = [((), torch.float32), ((5,), torch.bfloat16), ((2, 3), torch.float64)]


def layouts(cp_size):
    return [
        TokenLayout((5, 1, 9, 16), cp_size=cp_size, tp_size=2),
        TokenLayout((0, 3), cp_size=cp_size, starts=(7, 4)),
        TokenLayout((0,), cp_size=cp_size),
        TokenLayout((), cp_size=cp_size),
    ]


def normal(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shard(stream, layout, cp_rank):
    """The local rows of ``stream``, which is ragged; padding holds what nobody may see."""
    part = len(stream) and layout.num_local
    ours = layout.gathered_rows()[cp_rank * part : (cp_rank + 1) * part]
    return gather_rows(stream, ours, stream.new_full(stream.shape[1:], -7)), ours


def gradient_by_loop(upstream, rows):
    """The sum over ranks of what each wants of a row, row by row; [cp][T, ...] -> [M, ...]."""
    out = torch.zeros(len(rows), *upstream[0].shape[1:], dtype=upstream[0].dtype)
    for m, row in enumerate(rows.tolist()):
        for of_rank in upstream:
            if row >= 0:
                out[m] += of_rank[row]
    return out


def check(layout, group, cp_rank, shape, dtype):
    """Whole numbers, so that sums are exact in any type; then any, twice, for the same bits."""
    whole = [(4 * normal((layout.num_tokens, *shape), seed)).round().to(dtype) for seed in range(5)]
    stream, upstream = whole[0], whole[1 : 1 + layout.cp_size]
    local, rows = shard(stream, layout, cp_rank)
    local.requires_grad_()
    out = unshard(local, layout, group)
    assert torch.equal(out, stream) and out.dtype == dtype
    (grad,) = torch.autograd.grad(out, local, upstream[cp_rank])
    assert torch.equal(grad, gradient_by_loop(upstream, rows))

    wanted = [normal(stream.shape, 10 + r, dtype) for r in range(layout.cp_size)]
    once, again = (
        torch.autograd.grad(unshard(local, layout, group), local, wanted[cp_rank]) for _ in range(2)
    )
    assert torch.equal(once[0], again[0])
    exact = gradient_by_loop([w.double() for w in wanted], rows)
    size = gradient_by_loop([w.double().abs() for w in wanted], rows)
    assert ((once[0] - exact).abs() <= torch.finfo(dtype).eps * layout.cp_size * size).all()


def on_every_rank(world):
    for cp_size in (1, 2, 4):
        group, _ = dist.new_subgroups(cp_size)
        assert isinstance(group, dist.ProcessGroup)
        for layout in layouts(cp_size):
            for shape, dtype in CASES:
                check(layout, group, group.rank(), shape, dtype)
            tokens = torch.arange(layout.num_tokens)
            found = unshard(shard(tokens, layout, group.rank())[0], layout, group)
            assert torch.equal(found, tokens)
        with pytest.raises(ValueError, match=f"group has {cp_size} ranks, expected .* of 3"):
            unshard(torch.zeros(6), TokenLayout((5,), cp_size=3), group)
    return True


def test_ranks_see_the_stream_and_their_gradients_add_up():
    assert run_ranks(on_every_rank, 4) == [True] * 4


def test_without_a_group_padding_is_dropped():
    for layout in layouts(1):
        for shape, dtype in CASES:
            check(layout, None, 0, shape, dtype)
    layout = TokenLayout((3, 2), tp_size=4)
    local = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unshard(x, layout, None), local)
    transposed = torch.randn(2, 8).T
    assert torch.equal(unshard(transposed, layout, None), transposed[[0, 1, 2, 4, 5]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu():
    layout = TokenLayout((300, 1, 70), tp_size=8)
    local = normal((layout.num_local, 40), 0).cuda().bfloat16().requires_grad_()
    out = unshard(local, layout, None)
    assert torch.equal(out, local[layout.inverse().cuda()])
    (grad,) = torch.autograd.grad(out, local, out)
    real = (layout.gathered_rows() >= 0).cuda()[:, None]
    assert torch.equal(grad, local.detach().where(real, 0))


@pytest.mark.parametrize("rows", [7, 9])
def test_rows_that_do_not_fit(rows):
    with pytest.raises(ValueError) as error:
        unshard(torch.zeros(rows, 2), TokenLayout((3, 2), tp_size=4), None)
    assert str(error.value) == (
        f"unshard: local is [{rows}, 2], expected [8, ...], the rows of one rank. Cut off what a "
        "capacity added"
    )
