"""Checkpoints whole, and how close a run that goes on from one stays to one never stopped."""

import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyrl_ext.parallel import topology
from tests.helpers.tiny import tiny_plan


@cache
def content(folder: Path) -> dict[str, Tensor]:
    """All of a checkpoint, tensors put together."""
    from megatron.core import dist_checkpointing

    with topology.start(tiny_plan()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that it reads in a single process
        return dist_checkpointing.load_plain_tensors(str(folder))


def assert_goes_on(
    metrics: dict, weights: dict, wanted: tuple[dict, dict], bf16: bool, rounded: float = 0.0
) -> None:
    """``metrics`` and ``weights`` after a step are those ``wanted``, of a run never stopped.

    Args:
        rounded: how much further weights may differ, where moments are rounded to bfloat16.
    """
    want, want_weights = wanted
    close, close_weights = ((0.03, 1e-2), (2e-3, 0.02)) if bf16 else ((2e-5, 1e-6), (1e-6, 1e-4))
    assert metrics == pytest.approx(want, rel=close[0], abs=close[1])
    for key, tensor in weights.items():
        torch.testing.assert_close(
            tensor,
            want_weights[key],
            atol=close_weights[0] + rounded,
            rtol=close_weights[1],
            msg=key,
        )
