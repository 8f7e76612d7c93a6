"""Weights that are not trained, on the live model: they require no gradient."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from pyrl_ext.models.weight_table import global_name, named_global


def freeze(models: Sequence[nn.Module], names: Set[str], first_expert: int) -> None:
    """Let the parameters ``names`` of the whole model require no gradient.

    Before megatron's DistributedDataParallel: what requires no gradient then has no place in its
    buffers, nor in the optimizer.

    Args:
        names: of all experts of a layer, or of none.
        first_expert: global id of this rank's first expert.
    """
    for _, _, name, tensor in named_global(models):
        if global_name(name, first_expert) in names:
            tensor.requires_grad_(False)
    for model in models:
        start_gradients(model)


def start_gradients(model: nn.Module) -> None:
    """Let gradients begin at the embedding's output, where ``model`` has an embedding.

    Otherwise nothing before the first trained weight requires one. Recomputed layers would have
    outputs without a gradient then, and lose those of their weights; and the schedule of a pipeline
    asks every stage for one.
    """
    if (embedding := getattr(model, "embedding", None)) is not None:
        embedding.register_forward_hook(_with_gradient)


def _with_gradient(_embedding: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
