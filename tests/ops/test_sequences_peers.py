"""Operators along sequences against transformers' models, a sequence alone."""

import pytest
import torch

from pyrl_ext.ops import causal_conv1d, gated_delta_rule, ssd_scan
from tests.helpers.recurrences import ALONG, boundaries

pytestmark = pytest.mark.multiprocess

nemotron_h = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


def _conv(x, weight, bias):
    return nemotron_h.causal_conv1d_fn(x.T[None], weight, bias, activation="silu")[0].T


def _ssd(x, dt, A, B, C, D, dt_bias):
    rows = (each[None] for each in (x, dt))
    shared = (each[None] for each in (B, C))
    more = {"D": D, "dt_bias": dt_bias, "dt_softplus": True}
    return nemotron_h.mamba2_chunk_scan(*rows, A, *shared, 16, **more)[0]


def _delta(*args):
    return qwen3_next.torch_chunk_gated_delta_rule(*(each[None] for each in args))[0][0]


PEERS = {
    "causal_conv1d, 4 wide": (causal_conv1d, _conv),
    "ssd_scan": (ssd_scan, _ssd),
    "gated_delta_rule": (gated_delta_rule, _delta),
}


@pytest.mark.parametrize("name", PEERS)
def test_sequences_operators_equal_transformers(name):
    run, peer = PEERS[name]
    for rows in (1, 70):
        leaves = [x.requires_grad_() for x in ALONG[name].arguments(rows, torch.float32)]
        ours = run(*leaves, boundaries([rows, 0]))
        theirs = peer(*leaves)
        weights = torch.sin(torch.arange(ours.numel())).view(ours.shape)
        pairs = zip(
            (ours, *torch.autograd.grad(ours, leaves, weights)),
            (theirs, *torch.autograd.grad(theirs, leaves, weights)),
            strict=True,
        )
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
