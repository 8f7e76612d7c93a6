"""Samples with everything that an engine returns, drawn from their prompt and index."""

from dataclasses import replace

import numpy as np
import torch

from pyrl_ext.samples import Sample

LAYERS = (1, 2, 5)
TOPK = 4
EXPERTS = 16


def distinct_routes(rng: np.random.Generator, tokens: int, num_experts: int) -> torch.Tensor:
    order = rng.random((tokens, len(LAYERS), num_experts)).argsort(-1)[..., :TOPK]
    return torch.from_numpy(order).to(torch.uint8 if num_experts <= 256 else torch.uint16)


def make_sample(
    prompt: int, index: int, prompt_len: int, response_len: int, num_experts: int = EXPERTS
) -> Sample:
    rng = np.random.default_rng((prompt, index))
    n = prompt_len + response_len
    chosen = torch.arange(n) >= prompt_len
    logprobs = torch.from_numpy(-rng.random(n)).float()
    return Sample(
        prompt_id=prompt,
        index=index,
        tokens=torch.from_numpy(rng.integers(0, 99, n)),
        prompt_len=prompt_len,
        loss_mask=chosen,
        rollout_logprobs=torch.where(chosen, logprobs, 0),
        routes=distinct_routes(rng, n, num_experts),
        layer_ids=LAYERS,
        route_mask=torch.arange(n) < n - 1,
        weight_version=0,
        finish_reason="length" if index else "stop",
        reward=float(rng.random()),
    )


def make_samples(groups: int = 4, size: int = 2, **kwargs) -> list[Sample]:
    return [
        make_sample(10 + g, i, 2 + g, 1 + (3 * g + i) % 5, **kwargs)
        for g in range(groups)
        for i in range(size)
    ]


def with_kept(sample: Sample, vocab_size: int) -> Sample:
    """The sample with sets of up to six tokens that each of its response was drawn from."""
    rng = np.random.default_rng((sample.prompt_id, sample.index, 7))
    counts = [-1] * sample.prompt_len
    ids = []
    for token in sample.response:
        others = rng.choice(vocab_size, rng.integers(0, 6), replace=False).tolist()
        counts.append(len({token, *others}))
        ids += sorted({token, *others})
    return replace(
        sample,
        kept_counts=torch.tensor(counts, dtype=torch.int32),
        kept_ids=torch.tensor(ids, dtype=torch.int32),
    )
