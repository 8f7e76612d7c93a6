"""Checkpoint tensors <-> megatron parameters, for any layout: one table row per parameter."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.megatron.te import local_name
from pyrl_ext.models.shards import Sliceable, shard_of
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan.model.weight import Weight

_STACKED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])")
_LOG_STEPS = math.log(0.001), math.log(0.1)


# a checkpoint <-> the live tensors of a rank -----------------------------------------------------


def named_global(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[torch.nn.Module, str, str, Tensor]]:
    """(chunk, name in it, name in the whole model, tensor) of every parameter and persistent
    buffer; the experts of a rank that are stacked are one tensor, factors of adapters left out.

    Layer ids come from the ``layer_number`` of the live layers, never from their order. The decoder
    layers inside MTP layers have the ids after the decoder's last.
    """
    for chunk in chunks:
        decoder: Any = chunk.get_submodule("decoder")
        layer_ids = [layer.layer_number - 1 for layer in decoder.layers]

        def rename(match: re.Match[str], ids: list[int] = layer_ids) -> str:
            return f"decoder.layers.{ids[int(match[1])]}."

        def rename_ahead(match: re.Match[str], first: int = decoder.config.num_layers) -> str:
            return f"decoder.layers.{first + int(match[1])}."

        for local, tensor in chunk.state_dict(keep_vars=True).items():
            if local.endswith(("_extra_state", ".lora_A", ".lora_B")):
                continue
            name = local
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # the last stage's copy
            name = re.sub(r"^decoder\.layers\.(\d+)\.", rename, name)
            name = re.sub(r"^mtp\.layers\.(\d+)\.mtp_model_layer\.", rename_ahead, name)
            yield chunk, local, name, tensor


def named_parameters_global(
    chunks: Sequence[torch.nn.Module], ep_rank: int, local_experts: int
) -> dict[str, Tensor]:
    """This rank's parameters and persistent buffers by their name in the whole model."""
    named: dict[str, Tensor] = {}
    for _, _, name, tensor in named_global(chunks):
        name = local_name(name, ep_rank * local_experts)
        if (experts := _STACKED.fullmatch(name)) is None:
            named[name] = tensor
            continue
        for expert, part in enumerate(by_expert(tensor), ep_rank * local_experts):
            named[f"{experts[1]}.local_experts.{expert}.{experts[2]}.weight"] = part
    return named


def global_name(name: str, first_expert: int) -> str:
    """The name in the weight table of a live tensor; of stacked experts that of the rank's first.

    Args:
        name: as `named_global` has it.
        first_expert: global id of the rank's first expert.
    """
    if (experts := _STACKED.fullmatch(name)) is not None:
        return f"{experts[1]}.local_experts.{first_expert}.{experts[2]}.weight"
    return local_name(name, first_expert)


def by_expert(stacked: Tensor) -> list[Tensor]:
    """The tensors [M, K] of a parameter [E, M, K], with their gradients unless offloaded."""
    parts = [part.requires_grad_(stacked.requires_grad) for part in stacked.detach()]
    gradients = getattr(stacked, "main_grad", None)
    if gradients is not None and gradients.untyped_storage().nbytes():
        for part, gradient in zip(parts, gradients, strict=True):
            part.main_grad = gradient  # type: ignore[attr-defined]
    return parts


def check_claims(table: Sequence[Weight], mine: Mapping[str, Tensor]) -> None:
    """Check that every live tensor has exactly one row in the table.

    Raises: ValueError listing live tensors without a row, and names with two rows.
    """
    names = [w.megatron_name for w in table]
    twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
    unclaimed = sorted(set(mine) - set(names))
    if unclaimed or twice:
        raise ValueError(
            f"models: live tensors without a row in the family's table {unclaimed[:8]}, names with "
            f"two rows {twice[:8]}; expected exactly one row for each of {len(mine)} tensors"
        )


@torch.no_grad()
def load(
    table: Iterable[Weight],
    mine: Mapping[str, Tensor],
    read: Callable[[str], Sliceable],
    topo: Topology,
) -> None:
    """Copy a checkpoint of any float type into this rank's live tensors.

    Args:
        mine: this rank's tensors by their name in the whole model.
        read: checkpoint name -> full tensor. It is called only for the names that this rank needs,
            and the result is sliced to this rank's part.

    Raises: ValueError naming a tensor whose shape differs from the model's.
    """
    for weight in table:
        if (target := mine.get(weight.megatron_name)) is None:
            continue
        size, rank, _ = tensor_split(weight, topo)
        tensors = [read(name) for name in weight.hf_names]
        for name, tensor, shape in zip(weight.hf_names, tensors, weight.shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"checkpoint: {name} is {list(tensor.shape)}, expected {list(shape)} for "
                    f"{weight.megatron_name}; is the checkpoint of another model?"
                )
        target.copy_(shard_of(weight, tensors, size, rank))


def tensor_split(weight: Weight, topo: Topology) -> tuple[int, int, Any]:
    """(size, rank, group) of the tensor-parallel group that splits this weight."""
    group = topo.groups.tp if weight.expert is None else topo.groups.expt_tp
    return group.size(), group.rank(), group


class RandomWeights:
    """Initial weights from a seed, the same under every layout: each tensor has its own random
    stream. Matrices are normal with standard deviation ``std``, norms one, biases zero, unless
    ``Weight.start`` gives another rule.
    """

    def __init__(self, table: Sequence[Weight], std: float, seed: int):
        self.std = std
        self.seed = seed
        self.rows = {n: (w, s) for w in table for n, s in zip(w.hf_names, w.shapes, strict=True)}

    def __call__(self, name: str) -> Tensor:
        row, shape = self.rows[name]
        stream = stream_of(name, self.seed)
        if row.start == "decays":
            return torch.empty(shape).uniform_(0.01, 16, generator=stream).log_()
        if row.start == "steps":  # time steps, uniform in their logarithm, before softplus
            steps = torch.empty(shape).uniform_(*_LOG_STEPS, generator=stream).exp_()
            return steps.expm1_().log_()
        if row.start == "ones" or (row.start is None and name.endswith("norm.weight")):
            return torch.ones(shape)
        if row.start == "zeros" or name.endswith("bias"):
            return torch.zeros(shape)
        return torch.randn(shape, generator=stream) * self.std


def stream_of(name: str, seed: int) -> torch.Generator:
    """Random numbers for one tensor: it does not depend on which others this rank draws.

    On a CPU torch reads the lower 32 bits of a generator's seed alone.
    """
    return torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
