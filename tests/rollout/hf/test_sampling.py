"""Sampling against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyrl_ext.rollout.hf.sampling import draw, processed_logprobs, stream_keys, uniforms
from pyrl_ext.samples import Sampling


def brute_force(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities of one row, token by token from the most likely one."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    kept = order[:top_k] if top_k else order
    mass = np.exp(scaled[kept] - scaled.max())
    mass /= mass.sum()
    chosen = []
    total = 0.0
    for token, p in zip(kept, mass, strict=True):
        if top_p < 1 and total >= top_p:
            break
        chosen.append((token, p))
        total += p
    probs = np.zeros(len(scaled))
    for token, p in chosen:
        probs[token] = p / sum(q for _, q in chosen)
    return probs


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.85, 0.2, 1e-6])
def test_processed_logprobs_equal_brute_force(temperature: float, top_k: int, top_p: float):
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)) * 3
    sampling = Sampling(1, temperature, top_p, top_k)
    got = processed_logprobs(logits, sampling).numpy()
    for row in range(6):
        expected = brute_force(logits[row].numpy(), temperature, top_k, top_p)
        np.testing.assert_allclose(np.exp(got[row]), expected, atol=1e-6)
        assert (np.isneginf(got[row]) == (expected == 0)).all()


def test_draw_follows_the_distribution_and_never_takes_a_cut_token():
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -2.0, 0.0]).expand(60_000, -1)
    keys = stream_keys(7, torch.arange(60_000), torch.zeros(60_000, dtype=torch.int64))
    sampling = Sampling(1, temperature=0.8, top_p=0.9)
    tokens, logprobs, kept = draw(logits, keys, torch.full((60_000,), 4), sampling)
    assert kept is None
    expected = brute_force(logits[0].numpy(), 0.8, 0, 0.9)
    counts = np.bincount(tokens.numpy(), minlength=6) / 60_000
    assert (counts[expected == 0] == 0).all()
    assert abs(counts - expected).max() < 4 * 0.5 / 60_000**0.5
    np.testing.assert_allclose(logprobs.exp().numpy(), expected[tokens.numpy()], atol=1e-6)


def test_uniforms_are_uniform_and_uncorrelated():
    ids = torch.arange(400)
    places = torch.arange(50)
    keys = stream_keys(0, ids, torch.zeros_like(ids))
    u = torch.stack([uniforms(keys, places[i].expand(400)) for i in range(50)]).numpy()
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / u.size) ** 0.5
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees, 0.1 %
    for axis in (0, 1):
        near = np.corrcoef(
            u.take(range(u.shape[axis] - 1), axis).ravel(), np.delete(u, 0, axis).ravel()
        )
        assert abs(near[0, 1]) < 4 / u.size**0.5
    assert len(np.unique(u)) == u.size


def test_uniforms_are_splitmix64_of_key_and_position():
    """The stream of key k at position p is splitmix64's output number p + 1 from the state k."""
    state = 1234567
    mask = 2**64 - 1
    for position in range(3):
        z = (state + (position + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        got = uniforms(torch.tensor([state]), torch.tensor([position])).item()
        assert got == ((z >> 16) + 0.5) * 2.0**-48
