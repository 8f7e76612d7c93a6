"""Checkpoint tensors <-> megatron parameters, for any layout: one table row per parameter."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pyrl_ext.dist.topology import Topology
from pyrl_ext.megatron.te import local_name
from pyrl_ext.plan.model.sizes import ModelSizes

Shard = Literal["same", "rows", "columns", "gated", "grouped", "vocab"]
Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """One megatron parameter and the checkpoint tensors it is made of.

    Args:
        hf_names: checkpoint names, in the order they are stacked.
        megatron_name: its name, with global ids of layer and expert.
        shard:   how tensor-parallel ranks split it. "same": not at all; "rows"; "columns"; "gated":
                 by rows within each stacked tensor (gate and up); "grouped": by rows, with query,
                 key and value, or two of them, interleaved by query group; "vocab": by rows of the
                 vocabulary, padded to a multiple of the ranks.
        shapes:  of the checkpoint tensors, in the order of ``hf_names``.
        expert:  id of its expert, whose expert-tensor-parallel ranks split it; None: not an
                 expert's.
        heads:   (query heads, key/value heads) if ``shard`` is "grouped".
        float32: whether it is float32 whatever the model's dtype.
    """

    hf_names: tuple[str, ...]
    megatron_name: str
    shard: Shard
    shapes: tuple[Size, ...]
    expert: int | None = None
    heads: tuple[int, int] = (1, 1)
    float32: bool = False

    @classmethod
    def same(cls, hf: str, name: str, *size: int, float32: bool = False) -> Weight:
        return cls((hf,), name, "same", (size,), float32=float32)

    @classmethod
    def rows(cls, hf: str, name: str, *size: int) -> Weight:
        return cls((hf,), name, "rows", (size,))

    @classmethod
    def columns(cls, hf: str, name: str, *size: int, expert: int | None = None) -> Weight:
        return cls((hf,), name, "columns", (size,), expert)

    @classmethod
    def gated(cls, gate: str, up: str, name: str, *size: int, expert: int | None = None) -> Weight:
        return cls((gate, up), name, "gated", (size, size), expert)

    @classmethod
    def grouped(
        cls, q: str, k: str, v: str, name: str, heads: tuple[int, int], *head: int
    ) -> Weight:
        """``head``: the shape of one query, key or value head."""
        width, *rest = head
        shapes = tuple((n * width, *rest) for n in (heads[0], heads[1], heads[1]))
        return cls((q, k, v), name, "grouped", shapes, heads=heads)

    @classmethod
    def fused(cls, hf: str, name: str, heads: int, *head: int) -> Weight:
        """Queries, keys and values of ``heads`` heads each, which the checkpoint stacks in one
        tensor."""
        width, *rest = head
        return cls((hf,), name, "grouped", ((3 * heads * width, *rest),), heads=(heads, heads))

    @classmethod
    def vocab(cls, hf: str, name: str, *size: int) -> Weight:
        return cls((hf,), name, "vocab", (size,))

    @property
    def is_fused(self) -> bool:
        """Whether one checkpoint tensor holds queries, keys and values."""
        return self.shard == "grouped" and len(self.hf_names) == 1

    def part(self, size: int) -> Size:
        """Shape of the part on each of ``size`` tensor-parallel ranks."""
        rows, *rest = sum(shape[0] for shape in self.shapes), *self.shapes[0][1:]
        if self.shard == "same":
            return rows, *rest
        if self.shard == "columns":
            return rows, rest[0] // size
        return -(-rows // size), *rest


# rows that several families use ------------------------------------------------------------------


def language_model(sizes: ModelSizes, layers: Iterable[list[Weight]]) -> list[Weight]:
    """Embedding, ``layers``, final norm, and the head unless it is tied to the embedding."""
    hidden, size = sizes.hidden_size, (sizes.vocab_size, sizes.hidden_size)
    table = [Weight.vocab("model.embed_tokens.weight", "embedding.word_embeddings.weight", *size)]
    for layer in layers:
        table += layer
    table.append(Weight.same("model.norm.weight", "decoder.final_layernorm.weight", hidden))
    if sizes.tie_word_embeddings:
        return table
    return [*table, Weight.vocab("lm_head.weight", "output_layer.weight", *size)]


def mlp(
    layer: int, hf_name: str, mc_name: str, hidden: int, width: int, expert: int | None = None
) -> list[Weight]:
    """The gated MLP of a layer or of one expert; gate and up have ``width`` rows each."""
    hf, mc = f"model.layers.{layer}.{hf_name}.", f"decoder.layers.{layer}.{mc_name}."
    gate, up, down = (f"{hf}{name}_proj.weight" for name in ("gate", "up", "down"))
    return [
        Weight.gated(gate, up, mc + "linear_fc1.weight", width, hidden, expert=expert),
        Weight.columns(down, mc + "linear_fc2.weight", hidden, width, expert=expert),
    ]


def routed_experts(layer: int, sizes: ModelSizes) -> list[Weight]:
    """The router of layer ``layer`` and its experts."""
    hf, mc = f"model.layers.{layer}.mlp.gate.weight", f"decoder.layers.{layer}.mlp.router.weight"
    hidden, width = sizes.hidden_size, sizes.moe_intermediate_size
    table = [Weight.same(hf, mc, sizes.num_experts, hidden)]
    for e in range(sizes.num_experts):
        names = f"mlp.experts.{e}", f"mlp.experts.local_experts.{e}"
        table += mlp(layer, *names, hidden, width, expert=e)
    return table


_STACKED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])")


# checkpoint tensors <-> this rank's part ---------------------------------------------------------


class Sliceable(Protocol):
    """A tensor in memory, or one in a file, from which only the requested slice is read."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, at: Any, /) -> Tensor: ...


def shard_of(weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
    """The part of checkpoint ``tensors`` on rank ``rank`` of ``size``.

    Reads only that part, except that a query group which several ranks share, and queries, keys and
    values in one tensor, are read whole.
    """
    if weight.shard == "columns":
        return tensors[0][:, _part(tensors[0].shape[1], size, rank)]
    if weight.shard == "vocab":
        (full,) = tensors
        part = _part(full.shape[0], size, rank)
        rows = full[part]
        padding = rows.new_zeros(part.stop - part.start - len(rows), full.shape[1])
        return torch.cat([rows, padding]) if len(padding) else rows
    if weight.shard == "grouped":
        parts = tensors[0][:].chunk(3) if weight.is_fused else tensors
        return _grouped_shard(weight, parts, size, rank)
    whole = weight.shard == "same"
    parts = [t[:] if whole else t[_part(t.shape[0], size, rank)] for t in tensors]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _part(length: int, size: int, rank: int) -> slice:
    each = -(-length // size)
    return slice(rank * each, (rank + 1) * each)


def _grouped_shard(weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
    groups = weight.heads[1]
    rows = sum(t.shape[0] for t in tensors) // groups  # of a group
    mine = _part(groups * rows, size, rank)
    first, last = mine.start // rows, -(-mine.stop // rows)
    taken = [t[slice(*(g * t.shape[0] // groups for g in (first, last)))] for t in tensors]
    by_group = torch.cat([t.unflatten(0, (last - first, -1)) for t in taken], 1).flatten(0, 1)
    return by_group[mine.start - first * rows : mine.stop - first * rows]


def pieces_of(weight: Weight, shards: Sequence[Tensor]) -> list[tuple[list[Tensor], int]]:
    """The checkpoint tensors that ``shards`` (by rank) were cut from: the inverse of `shard_of`.

    Returns: the pieces of each tensor and the dimension to concatenate them along. The pieces are
        views of the shards, except those of "grouped" weights.
    """
    if weight.shard == "same":
        return [([part], 0) for part in shards[0].split([shape[0] for shape in weight.shapes])]
    if weight.shard == "gated":
        gates, ups = zip(*(shard.chunk(2, 0) for shard in shards), strict=True)
        return [(list(gates), 0), (list(ups), 0)]
    if weight.shard == "grouped":
        whole = shards[0] if len(shards) == 1 else torch.cat(list(shards))
        groups, rows = weight.heads[1], [shape[0] for shape in weight.shapes]
        fused = weight.is_fused
        rows = [rows[0] // 3] * 3 if fused else rows
        by_group = whole.unflatten(0, (groups, -1)).split([n // groups for n in rows], 1)
        parts = [part.flatten(0, 1) for part in by_group]
        return [(parts, 0)] if fused else [([part], 0) for part in parts]
    if weight.shard == "vocab":  # the last shards end with padding
        rows, size = weight.shapes[0][0], shards[0].shape[0]
        return [([shard[: max(0, rows - i * size)] for i, shard in enumerate(shards)], 0)]
    return [(list(shards), int(weight.shard == "columns"))]


def whole_of(weight: Weight, shards: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `pieces_of`, concatenated; a tensor of one piece is not copied."""
    pieces = pieces_of(weight, shards)
    return [each[0] if len(each) == 1 else torch.cat(each, dim) for each, dim in pieces]


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
    stream. Matrices are normal with standard deviation ``std``, norms one, biases zero.
    """

    def __init__(self, table: Sequence[Weight], std: float, seed: int):
        self.std, self.seed = std, seed
        self.shapes = {n: s for w in table for n, s in zip(w.hf_names, w.shapes, strict=True)}

    def __call__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith("bias"):
            return torch.zeros(shape)
        return torch.randn(shape, generator=stream_of(name, self.seed)) * self.std


def stream_of(name: str, seed: int) -> torch.Generator:
    """Random numbers for one tensor: it does not depend on which others this rank draws.

    On a CPU torch reads the lower 32 bits of a generator's seed alone.
    """
    return torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
