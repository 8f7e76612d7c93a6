"""Checkpoint tensors <-> megatron parameters, for any layout: one table row per parameter."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.megatron.te import local_name
from pyrl_ext.models.mamba_init import STARTS
from pyrl_ext.models.weight import Sliceable, Weight, shard_of
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan.model.sizes import ModelSizes

# rows that several families use ------------------------------------------------------------------


def language_model(sizes: ModelSizes, layers: Iterable[list[Weight]]) -> list[Weight]:
    """Embedding, ``layers``, final norm, and the head unless it is tied to the embedding."""
    hidden = sizes.hidden_size
    size = (sizes.vocab_size, sizes.hidden_size)
    table = [Weight.vocab("model.embed_tokens.weight", "embedding.word_embeddings.weight", *size)]
    for layer in layers:
        table += layer
    table.append(Weight.same("model.norm.weight", "decoder.final_layernorm.weight", hidden))
    if sizes.tie_word_embeddings:
        return table
    return [*table, Weight.vocab("lm_head.weight", "output_layer.weight", *size)]


def mlp(
    layer: int, name: str, sizes: ModelSizes, width: int, expert: int | None = None
) -> list[Weight]:
    """The MLP of a layer or of one expert; up, and gate where there is one, has ``width`` rows."""
    hidden = sizes.hidden_size
    kinds = ("gate", "up", "down")[-sizes.mlp_matrices :]
    hf = f"model.layers.{layer}.{name}."
    mc = f"decoder.layers.{layer}.{name}."
    mc = mc.replace(".experts.", ".experts.local_experts.")
    *inner, down = (f"{hf}{kind}_proj.weight" for kind in kinds)
    return [
        Weight.inner(inner, mc + "linear_fc1.weight", width, hidden, expert=expert),
        Weight.columns(down, mc + "linear_fc2.weight", hidden, width, expert=expert),
    ]


def routed_experts(layer: int, sizes: ModelSizes) -> list[Weight]:
    """The router of layer ``layer`` and its experts."""
    hf = f"model.layers.{layer}.mlp.gate.weight"
    mc = f"decoder.layers.{layer}.mlp.router.weight"
    table = [Weight.same(hf, mc, sizes.num_experts, sizes.hidden_size)]
    for e in range(sizes.num_experts):
        table += mlp(layer, f"mlp.experts.{e}", sizes, sizes.moe_intermediate_size, expert=e)
    return table


_STACKED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])")


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
    stream. Matrices are normal with standard deviation ``std``, norms one, biases zero, unless a
    row says how its tensors start: "zeros", "ones", or as those of states do (`STARTS`).
    """

    def __init__(self, table: Sequence[Weight], std: float, seed: int):
        self.std = std
        self.seed = seed
        self.rows = {n: (w, s) for w in table for n, s in zip(w.hf_names, w.shapes, strict=True)}

    def __call__(self, name: str) -> Tensor:
        row, shape = self.rows[name]
        numbers = stream_of(name, self.seed)
        if row.start in STARTS:
            return STARTS[row.start](torch.empty(shape), numbers)
        if row.start == "ones" or (row.start is None and name.endswith("norm.weight")):
            return torch.ones(shape)
        if row.start == "zeros" or name.endswith("bias"):
            return torch.zeros(shape)
        return torch.randn(shape, generator=numbers) * self.std


def stream_of(name: str, seed: int) -> torch.Generator:
    """Random numbers for one tensor: it does not depend on which others this rank draws.

    On a CPU torch reads the lower 32 bits of a generator's seed alone.
    """
    return torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
