"""Large results on a CPU ask for huge pages: page faults would cost more than the kernels."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyrl_ext.ops import expand_runs, gather_fields, gather_routes, replay_probs
from pyrl_ext.ops.gather_rows import native as gather_rows
from pyrl_ext.ops.sum_rows import native as sum_rows
from pyrl_ext.ops.token_logprob import native as token_logprob

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)
BYTES = 48 << 20  # malloc maps as much as this anew


def wants_huge_pages(tensor: Tensor) -> bool:
    """True if the mapping of the middle of ``tensor`` was advised to use huge pages."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head:
            begin, end = (int(x, 16) for x in head.split("-"))
            inside = begin <= middle < end
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    return False


def large_results() -> dict[str, Tensor]:
    rows = torch.zeros(BYTES // 64, dtype=torch.int64)
    wide = torch.zeros(1, 64, dtype=torch.uint8)
    starts = torch.arange(len(rows) + 1)
    order = torch.arange(len(rows))
    floats = torch.zeros(1, 16).expand(len(rows), -1)
    scores = torch.zeros(BYTES // 4 // 512, 512)
    ids = torch.zeros(BYTES // 4 // 512, 1).long()
    one = torch.ones(1)
    logits = torch.zeros(1, BYTES // 4)
    return {
        "expand_runs": expand_runs(torch.tensor([0]), torch.tensor([BYTES // 8]), BYTES // 8),
        "gather_rows": gather_rows.gather_rows(wide, rows, wide[0]),
        "gather_fields": gather_fields([wide], rows, [0]).flat,
        "gather_routes": gather_routes(wide.view(1, 8, 8), rows, range(8), 64),
        "sum_rows": sum_rows.sum_rows(floats, rows, starts, order),
        "replay_probs": replay_probs(scores, ids)[0],
        "token_logprob_grad": token_logprob.grad(
            logits, torch.tensor([0]), one, 0, logits.shape[1], one, one, one, one, one
        ),
    }


def test_native_operators_ask_for_huge_pages():
    results = large_results()
    assert {name for name, result in results.items() if not wants_huge_pages(result)} == set()
    plain = torch.frombuffer(mmap.mmap(-1, BYTES), dtype=torch.uint8)  # malloc's may be used again
    assert not wants_huge_pages(plain)
