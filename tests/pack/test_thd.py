"""packed_seq_params: the bounds that a plain loop gives, and what it refuses."""

import pytest
import torch
import torch.distributed as dist

from pyrl_ext import pack
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("seqlens", "cp", "tp", "align", "padded"),
    [
        ([5, 1, 8], 1, 1, 1, [5, 1, 8]),
        ([5, 1, 8], 2, 1, 1, [8, 4, 8]),
        ([5, 1, 8], 2, 2, 1, [8, 8, 8]),
        ([5, 0, 9], 1, 2, 8, [8, 0, 16]),
    ],
)
def test_bounds_count_padded_rows(seqlens, cp, tp, align, padded):
    found = pack.packed_seq_params(seqlens, cp, tp_size=tp, align=align)
    bounds = [0]
    for length in padded:
        bounds.append(bounds[-1] + length)
    for ends in (found.cu_seqlens_q, found.cu_seqlens_kv):
        assert ends.dtype == torch.int32 and ends.tolist() == bounds
    assert found.cu_seqlens_q_padded is found.cu_seqlens_q
    assert found.cu_seqlens_kv_padded is found.cu_seqlens_kv
    assert found.max_seqlen_q == found.max_seqlen_kv == max(padded)
    assert found.qkv_format == "thd" and found.cp_group is None and found.local_cp_size is None
    layout = pack.TokenLayout(tuple(seqlens), cp, tp, align)
    assert layout.padded_seqlens == tuple(padded)


def test_packed_seq_params_refuses():
    with pytest.raises(ValueError, match="0 sequences, expected at least 1"):
        pack.packed_seq_params([])
    with pytest.raises(ValueError, match=r"seqlens\[1\] is -1, expected >= 0"):
        pack.packed_seq_params([1, -1])


def on_rank(group: dist.ProcessGroup) -> None:
    found = pack.packed_seq_params([5, 9], 2, cp_group=group)
    assert found.cp_group is group and found.local_cp_size == 2
    with pytest.raises(ValueError, match=r"cp_group has 2 ranks, expected cp_size \(4\)"):
        pack.packed_seq_params([5, 9], 4, cp_group=group)


def test_packed_seq_params_of_a_dynamic_group():
    run_ranks(on_rank, 2)
