"""The check of routes against a loop over them, one id after another."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pyrl_ext.pack import route_check
from pyrl_ext.pack.route_check import WrongRoute, first_wrong

DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
LIMITS = (None, 1, 4, 8, 255, 256, 257, 40_000, 65_536, 65_537, 2**40)
# negative, equal in their last 8, 16 or 32 bits, and next to the limits
SMALL = (-256, -1, 0, 1, 3, 7, 8, 255, 256, 257, 32_767)
IDS = (*SMALL, 40_000, 65_535, 65_536, 65_537, 2**31 - 1, 2**32, 2**40, -(2**63), 2**63 - 1)


def plain(
    routes: Tensor, rows: Tensor, num_experts: int | None, rows_at_once: int
) -> WrongRoute | None:
    """The definition. Among ``rows_at_once`` rows, ids out of range come before repeated ones."""
    topk = routes.shape[2]
    for part in rows.split(rows_at_once):
        repeated = None
        for row in part.tolist():
            for slot, experts in enumerate(routes[row].tolist()):
                outside = [e for e in experts if e < 0 or (num_experts and e >= num_experts)]
                if num_experts is not None and outside:
                    found = f"experts {experts} are out of range"
                    return WrongRoute(row, slot, found, f"ids from 0 to {num_experts - 1}")
                if repeated is None and len(set(experts)) < topk:
                    found = f"experts {experts} repeat"
                    repeated = WrongRoute(row, slot, found, f"{topk} distinct ids")
        if repeated is not None:
            return repeated
    return None


def stored(routes: Tensor, layout: str) -> Tensor:
    """The same routes, laid out in memory in another way."""
    if layout == "layers first":
        return routes.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "among other layers":
        return routes.repeat(1, 3, 1)[:, routes.shape[1] : 2 * routes.shape[1]]
    if layout == "every second id":
        return routes.repeat_interleave(2, 2)[:, :, ::2]
    return routes


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, int | None]:
    """Routes of distinct ids, but for a few; the rows that are checked; experts of a layer."""
    dtype = draw(st.sampled_from(DTYPES))
    tokens = draw(st.integers(1, 12))
    layers = draw(st.integers(0, 3))
    topk = draw(st.integers(0, 9))
    routes = torch.arange(topk).expand(tokens, layers, topk).to(dtype)
    routes = (routes + torch.arange(layers, dtype=dtype)[:, None]) % max(1, topk)
    held = torch.iinfo(dtype)
    ids = [each for each in IDS if held.min <= each <= held.max]
    places = range(routes.numel())
    if places:
        changes = st.dictionaries(st.sampled_from(places), st.sampled_from(ids), max_size=3)
        for place, changed in draw(changes).items():
            routes.view(-1)[place] = changed
    layouts = ("plain", "layers first", "among other layers", "every second id")
    rows = draw(st.lists(st.integers(0, tokens - 1), max_size=16))
    routes = stored(routes, draw(st.sampled_from(layouts)))
    return routes, torch.tensor(rows, dtype=torch.int64), draw(st.sampled_from(LIMITS))


@given(cases(), st.integers(1, 16), st.sampled_from((1, 64, 1 << 18)))
@example((torch.tensor([[[-256, 0]]], dtype=torch.int16), torch.tensor([0]), 65_536), 4, 64)
@example((torch.zeros(0, 2, 4, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), 8), 4, 64)
def test_route_check_finds_what_a_loop_finds(
    case: tuple[Tensor, Tensor, int | None], rows_at_once: int, bytes_at_once: int
):
    routes, rows, num_experts = case
    with (
        patch.object(route_check, "_ROWS_AT_ONCE", rows_at_once),
        patch.object(route_check, "_BYTES_AT_ONCE", bytes_at_once),
    ):
        found = first_wrong(routes, rows, num_experts)
    assert found == plain(routes, rows, num_experts, rows_at_once)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("experts", "num_experts", "message"),
    [
        ([0, 1, 5, 1], None, "experts [0, 1, 5, 1] repeat"),
        ([0, 1, 5, 1], 5, "experts [0, 1, 5, 1] are out of range"),
        ([0, 1, 2, 8], 8, "experts [0, 1, 2, 8] are out of range"),
    ],
)
def test_route_check_looks_at_every_row(
    dtype: torch.dtype, experts: list[int], num_experts: int | None, message: str
):
    """One wrong token among more than are copied, or looked at, at once."""
    routes = torch.arange(4, dtype=dtype).repeat(40_000, 2, 1)
    for row in (0, 16_383, 16_384, 39_999):
        wrong = routes.clone()
        wrong[row, 1] = torch.tensor(experts, dtype=dtype)
        rows = torch.arange(len(routes))
        found = first_wrong(wrong, rows, num_experts)
        assert found is not None
        assert (found.row, found.slot, found.found) == (row, 1, message)
        assert first_wrong(wrong, rows[rows != row], num_experts) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_route_check_of_routes_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(route_check, "_ROWS_AT_ONCE", 3)
    routes = torch.arange(4, dtype=torch.int16).repeat(8, 2, 1)
    routes[6, 1, 2] = 3
    rows = torch.tensor([7, 0, 1, 2, 6])
    found = first_wrong(routes.cuda(), rows.cuda(), 4)
    assert found == first_wrong(routes, rows, 4)
    assert found == (6, 1, "experts [0, 1, 3, 3] repeat", "4 distinct ids")
