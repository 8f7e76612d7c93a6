"""Muon for the matrices of a model: megatron's, which also takes experts whose weights are stacked.

megatron-core 0.19.2 steps embeddings, the output layer and whatever has no two dimensions by Adam,
which would be all `GroupedExperts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.optimizer import emerging_optimizers as megatron
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor
from torch.nn import Module, Parameter

STACKED = re.compile(r"\.mlp\.experts\.linear_fc[12]$")


class Muon(megatron.TensorParallelMuon):
    """megatron's Muon, which makes the update of each matrix orthogonal; of stacked experts each is
    one.

    Communicates: an all-gather of the momentum of each matrix that tensor-parallel ranks split,
        over these ranks; each then computes the whole update and takes its part.
    """

    def orthogonalize(self, p: Tensor, grad: Tensor, **options: Any) -> Tensor:
        """The update of the parameter ``p``, in its shape.

        Args:
            grad: its momentum, [rows, columns] or [experts, rows, columns].
        """
        if p.dim() == 2:
            return super().orthogonalize(p, grad, **options)
        marked: Any = p
        split = marked.partition_dim - p.dim()  # from the end, as of one expert's matrix
        return self.scaled_orthogonalize_fn(grad, self.pg_collection.expt_tp, split)  # type: ignore


def use_stacked_experts() -> None:
    """Let megatron build `Muon` under the name muon, for all of `matrices`."""
    entries = megatron._EMERGING_OPTIMIZERS  # pyright: ignore[reportPrivateUsage]
    others = ParamWithNamePredicate("no matrix", lambda param, name: not _is_matrix(name, param))
    adam: Any = {ParamKey(with_name_predicate=others): {"optimizer": "adam"}}
    entries["muon"] = replace(entries["muon"], optimizer_cls=Muon, default_param_overrides=adam)


def matrices(chunks: Sequence[Module]) -> Iterator[Parameter]:
    """The trained parameters that Muon steps; AdamW steps the others."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and _is_matrix(name, parameter):
                yield parameter


def _is_matrix(name: str, parameter: Tensor) -> bool:
    if getattr(parameter, "is_embedding_or_output_parameter", False):
        return False
    return parameter.dim() == 2 or STACKED.search(name) is not None


def mark_whole(chunks: Sequence[Module]) -> None:
    """Mark matrices that every tensor-parallel rank holds whole as not split.

    TransformerEngine marks every weight of a linear as split by rows, and megatron-core 0.19.2
    takes that back of ``tensor_model_parallel`` alone, which its Muon does not read.
    """
    for parameter in matrices(chunks):
        marked: Any = parameter
        if not getattr(parameter, "tensor_model_parallel", True):
            marked.partition_dim = -1
