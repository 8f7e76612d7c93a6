"""One new token of each sequence attends as transformers' own attention does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pyrl_ext.rollout.hf import attention
from pyrl_ext.rollout.hf.attention import grouped_attention
from pyrl_ext.samples import Sampling
from tests.helpers.engines import QWEN, engine_of, prompts_of, random_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(6, 2), (6, 1), (4, 4)])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("masked", ["each", "one for all", "none"])
def test_grouped_attention_is_transformers_own(
    dtype: torch.dtype, heads: tuple[int, int], tokens: int, masked: str
):
    """Against float64 with keys and values repeated, and the shape and bits of transformers' where
    it is called."""
    torch.manual_seed(0)
    of_query, of_key = heads
    groups = of_query // of_key
    query = torch.randn(5, of_query, tokens, 16, dtype=dtype)
    cache = [torch.randn(5, of_key, 40, width, dtype=dtype) for width in (16, 8)]
    key, value = (x[:, :, :33] for x in cache)  # views of longer rows, as the engine's
    mask = None
    if masked != "none":
        mask = torch.rand(5 if masked == "each" else 1, 1, tokens, 33) > 0.5
        mask[..., 0] = True
    module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=False)
    scale = 0.3
    given = (module, query, key, value, mask)
    found, weights = grouped_attention(*given, scaling=scale)
    theirs, _ = sdpa_attention_forward(*given, scaling=scale)
    assert weights is None and found.shape == theirs.shape and found.dtype == dtype
    assert found.is_contiguous()
    repeated = [x.double().repeat_interleave(groups, 1) for x in (key, value)]
    scores = query.double() @ repeated[0].transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    exact = (scores.softmax(-1) @ repeated[1]).transpose(1, 2)
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound)
    if tokens > 1 or groups == 1:
        assert torch.equal(found, theirs)


def test_engine_copies_no_cache_for_new_tokens(monkeypatch: pytest.MonkeyPatch):
    """transformers' attention, which would, sees whole prompts alone."""
    assert QWEN["num_attention_heads"] > QWEN["num_key_value_heads"]
    lengths: list[int] = []

    def watched(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths.append(query.shape[2])
        return sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", watched)
    engine = engine_of(random_model(QWEN), QWEN)
    engine.generate(prompts_of([5, 7], QWEN["vocab_size"]), Sampling(4, seed=1))
    assert lengths and min(lengths) > 1
