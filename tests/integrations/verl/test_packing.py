"""Packed sequences: equal to verl's functions where those are defined."""

from itertools import product

import pytest
import torch

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]  # (TP, CP)
PARAMS = ("qkv_format", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv")
PARAMS += ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def same_params(ours, theirs):
    for name in PARAMS:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), name
        else:
            assert a == b, name


def gradients(output, source):
    """Gradients of a sum of outputs, each weighted by its position."""
    weights = torch.arange(1.0, output.numel() + 1).view(output.shape) / output.numel()
    (grad,) = torch.autograd.grad((output * weights).sum(), source)
    return grad


def check_jagged(util, ours, lengths):
    pre, post = util.preprocess_thd_engine, util.postprocess_thd_engine
    tokens = [torch.randint(1, 99, (n,)) for n in lengths]
    ids = torch.nested.as_nested_tensor(tokens, layout=torch.jagged)
    theirs, their_params, their_positions = pre(ids)
    found, params, positions = ours.preprocess_thd_engine(pre, ids)
    assert torch.equal(found, theirs)
    same_params(params, their_params)
    assert torch.equal(positions[found > 0], their_positions[found > 0])
    assert not positions[found == 0].any()
    # labels, where a token has a next one
    their_labels, *_ = pre(ids, need_roll=True)
    labels, _, _ = ours.preprocess_thd_engine(pre, ids, need_roll=True)
    followed = [torch.arange(1, n + 1) % n for n in lengths]
    marks = torch.nested.as_nested_tensor(followed, layout=torch.jagged)
    followed = pre(marks)[0] > 0
    assert torch.equal(labels[followed], their_labels[followed])
    assert not labels[~followed].any()
    none = ours.preprocess_thd_engine(pre, ids, pre_process=False)
    assert none[0] is ids and none[2] is None
    output = torch.randn(*found.shape, 2, requires_grad=True)
    want = post(output, their_params, ids, len(lengths))
    back = ours.postprocess_thd_engine(post, output, params, ids, len(lengths))
    assert torch.equal(back.offsets(), want.offsets())
    assert torch.equal(back.values(), want.values())
    assert torch.equal(gradients(back.values(), output), gradients(want.values(), output))
    # rows that verl packed are unpacked by verl, and what we do not cover is packed by it
    again = ours.postprocess_thd_engine(post, output, their_params, ids, len(lengths))
    assert torch.equal(again.values(), want.values())
    last = {"post_process": False}
    assert ours.postprocess_thd_engine(post, output, params, ids, len(lengths), **last) is output
    for option in ({"use_fp8_padding": True}, {"pad_to_length_bucket": 64}, {"min_local_rows": 64}):
        theirs = pre(ids, **option)
        found = ours.preprocess_thd_engine(pre, ids, **option)
        assert torch.equal(found[0], theirs[0]) and torch.equal(found[2], theirs[2])
        assert not hasattr(found[1], ours.LAYOUT)
    contiguous = [lambda f: ours.preprocess_thd_engine(f, ids, cp_layout="contiguous")]
    contiguous += [lambda f: f(ids, cp_layout="contiguous")]
    results = []
    for call in contiguous:
        try:
            results.append(call(pre)[0].tolist())
        except ValueError as error:  # this megatron-core has the zigzag alone
            results.append(str(error))
    assert results[0] == results[1]


def on_rank(group):
    from verl.models.mcore import util

    from pyrl_ext.integrations import verl
    from tests.helpers.verl_cpu import megatron_groups

    for (tp, cp), seed in product(LAYOUTS, range(4)):
        torch.manual_seed(seed)
        lengths = torch.randint(1, 28, (1 + seed,)).tolist()
        with megatron_groups(tp, 1, cp):
            check_jagged(util, verl, lengths)
            if seed == 3:  # shorter than the alignment, and as long
                check_jagged(util, verl, [1, 8, 2])


def test_packing_equals_theirs():
    run_ranks(on_rank, 4, preload=("tests.helpers.verl_cpu",))
