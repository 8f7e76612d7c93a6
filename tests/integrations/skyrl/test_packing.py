"""Packed rows and megatron's parameters are those of SkyRL's `preprocess_packed_seqs`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state as mpu
from skyrl.backends.skyrl_train.distributed.megatron import megatron_utils
from skyrl.backends.skyrl_train.distributed.megatron.packing_utils import get_packed_seq_align_size

from pyrl_ext.integrations import skyrl

skyrl.install()
OURS: Any = megatron_utils.preprocess_packed_seqs
THEIRS: Any = OURS.__wrapped__


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments and the sizes and rank of a grid."""
    tp_size = draw(st.sampled_from([1, 2, 4]))
    cp_size = draw(st.sampled_from([1, 2, 3]))
    fp8 = draw(st.booleans())
    ranks = {
        "get_tensor_model_parallel_world_size": tp_size,
        "get_context_parallel_world_size": cp_size,
        "get_context_parallel_rank": draw(st.integers(0, cp_size - 1)),
    }
    align = get_packed_seq_align_size(tp_size, cp_size, fp8_enabled=fp8)
    batch = draw(st.integers(1, 4))
    length = draw(st.integers(1, 40))
    inner = None
    mask = torch.zeros(batch, length, dtype=torch.bool)
    if draw(st.booleans()):  # several sequences in a row, each padded
        inner = [draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)) for _ in range(batch)]
        length = max(sum(-(-n // align) * align for n in row) for row in inner)
        mask = torch.ones(batch, length, dtype=torch.bool)
    else:
        kind = draw(st.sampled_from(["left", "right", "holes"]))
        for row in mask:
            rows = draw(st.integers(1, length))
            if kind == "holes":
                row[draw(st.permutations(range(length)))[:rows]] = True
            else:
                row[:rows] = True
        mask = mask.flip(1) if kind == "left" else mask
    shape = (batch, length, 2) if draw(st.booleans()) else (batch, length)
    ids = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
    if ids.ndim == 3 and cp_size > 1:
        ids = ids[..., 0]  # theirs pads the last dimension
    return {
        "ranks": ranks,
        "pre_process": draw(st.booleans()),
        "sub_seq_lengths": inner,
        "fp8_enabled": fp8,
        "input_ids": ids,
        "attention_mask": mask,
    }


@settings(deadline=None, max_examples=300)
@given(calls())
def test_packed_rows_are_theirs(call: dict[str, Any]):
    with pytest.MonkeyPatch.context() as patch:
        for name, number in call.pop("ranks").items():
            patch.setattr(mpu, name, lambda number=number: number)
        ours, our_params = OURS(**call)
        theirs, their_params = THEIRS(**call)
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    for field in fields(their_params):
        mine, other = getattr(our_params, field.name), getattr(their_params, field.name)
        if isinstance(other, torch.Tensor):
            assert mine.dtype == other.dtype and torch.equal(mine, other), field.name
        else:
            assert mine == other, field.name


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ([[4]], r"sub_seq_lengths \[\[4\]\], expected"),
        ([[4], [4, 5]], r"rows of input_ids \[2, 8\]"),
    ],
)
def test_wrong_lengths_are_refused(
    inner: list[list[int]], message: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("get_tensor_model_parallel_world_size", "get_context_parallel_world_size"):
        monkeypatch.setattr(mpu, name, lambda: 1)
    monkeypatch.setattr(mpu, "get_context_parallel_rank", lambda: 0)
    ids = torch.ones(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        OURS(ids, ids.bool(), sub_seq_lengths=inner)
