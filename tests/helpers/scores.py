"""The trainer's log-probs next to recorded samples, against the samples and a metric."""

from pathlib import Path

import pytest
import torch

from pyrl_ext.data.recordings import load_samples
from pyrl_ext.rollout.recorded import load_scores


def check_scores(folder: Path, step: int, mean: float, dropped: int = 0) -> None:
    """Every token but the first of each trained sample has one, together as far from the engine's
    as ``mismatch/abs_mean`` says.

    Args:
        dropped: samples that were recorded and not trained on.
    """
    scores = load_scores(folder, step)
    gaps = []
    files = folder.glob(f"step-{step:06d}*.safetensors")
    samples = [sample for file in files for sample in load_samples(file)]
    assert len(scores) == len(samples) - dropped
    for sample in samples:
        if (key := (sample.prompt_id, sample.index, sample.turn)) in scores:
            tokens, logprobs = scores.pop(key)
            tokens, order = tokens.long().sort()
            assert torch.equal(tokens, torch.arange(1, sample.tokens.numel()))
            gap = logprobs[order] - sample.rollout_logprobs[1:]
            gaps.append(gap[sample.loss_mask[1:]])
    assert not scores
    assert torch.cat(gaps).double().abs().mean().item() == pytest.approx(mean, rel=1e-6)
