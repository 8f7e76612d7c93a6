"""A vision tower: patches of images -> rows of the language model, and features for its layers.

Its layers are megatron's, so that tensor and pipeline parallelism split them as they split the
language model; transformers' module is exact on one rank, but has neither. Attention is that of
packed sequences, an image each, without a causal mask. Patch embedding and positions are as small
as they look, and whole on every tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from pyrl_ext.megatron.config import tower_config
from pyrl_ext.megatron.packed_attention import PackedAttention, PackedSequences
from pyrl_ext.ops.tensors import to_device
from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.parallel.suppress_warnings import quiet
from pyrl_ext.parallel.topology import RankCoords, Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.families.vision import VisionLanguage
from pyrl_ext.plan.model.towers import Tower, TowerKind

Grids = Sequence[tuple[int, int, int]]
ROPE_THETA = 10000.0


def build_tower(plan: Plan, topo: Topology) -> list[MegatronModule]:
    """This rank's stage of the plan's vision tower, in the plan's dtype, as the one model chunk."""
    sizes = plan.sizes
    tower = sizes.vision
    assert tower is not None and isinstance(sizes, VisionLanguage)
    rope = plan.hf["vision_config"].get("rope_parameters") or {}
    if (theta := rope.get("rope_theta", ROPE_THETA)) != ROPE_THETA:
        raise ValueError(
            f"build_tower: vision_config has rope_theta {theta}, expected {ROPE_THETA}, the one "
            "that both families were published with"
        )
    with quiet():
        kind = sizes.tower_kind
        config = tower_config(plan, topo, tower, kind.epsilon)
        stage = VisionTower(config, tower, kind, topo, sizes.hidden_size).to(topo.device)
        return [Float16Module(config, stage) if config.bf16 else stage]


class VisionTower(MegatronModule):
    """A pipeline stage of a tower.

    Attributes:
        embedding: patches and positions, on the first stage.
        decoder: holds the layers.
        output_layer: the projections to rows of the language model, on the last stage.
    """

    def __init__(self, config: Any, tower: Tower, kind: TowerKind, topo: Topology, width: int):
        super().__init__(config)
        self.tower = tower
        self.kind = kind
        self.input = None
        self.pre_process = topo.is_first_stage
        self.post_process = topo.is_last_stage
        self.pg_collection = topo.groups
        self.vp_stage = None
        self.share_embeddings_and_output_weights = False
        if self.pre_process:
            self.embedding = Embedding(config, tower, kind)
        layer: Any = get_gpt_layer_local_spec(normalization="LayerNorm")
        layer.submodules.self_attention.submodules.core_attention = ImageAttention
        here = tower.stages(topo.pp_size)[topo.pp_rank]
        self.decoder: Any = TransformerBlock(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * here, layer_norm=layer_norm),
            pre_process=self.pre_process,
            post_process=self.post_process,
            post_layer_norm=kind.final_norm,
            pg_collection=topo.groups,
        )
        if self.post_process:
            self.output_layer = Projections(config, tower, width, topo.groups.tp)

    def handed_on(self, grids: Sequence[Sequence[int]], stage: int) -> tuple[int, int, int]:
        """The shape of the output of a stage that is not the last."""
        before = sum(self.tower.stages(self.pg_collection.pp.size())[: stage + 1])
        taken = sum(layer < before for layer in self.tower.deepstack)
        patches = sum(height * width for _, height, width in grids)
        return patches, 1, (1 + taken) * self.tower.hidden_size

    def set_input_tensor(self, tensor: Any) -> None:
        """Takes the output of the stage before, which megatron gives as a list of one."""
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, pixels: Tensor | None, grids: Grids) -> Tensor:
        """
        Args:
            pixels: [P, patch] the patches of all images, as the HF processor orders, scales and
                normalizes them; read on the first stage.
            grids: (frames, height, width) of every image in patches.

        Returns:
            On the last stage [P / merge^2, (1 + deep) * width]: a row's embedding, then what the
            first, the second, ... layer of the language model adds. On others [P, 1, (1 + k) *
            hidden]: hidden states, then those behind the k layers whose features were taken.
        Raises: ValueError for images of several frames, or whose sides are not merged evenly.
        """
        images = PackedImages.of(grids, self.tower, self.kind, next(self.parameters()).device)
        if self.pre_process:
            hidden = self.embedding(pixels, grids)[:, None]
            taken = []
        else:
            assert self.input is not None
            hidden, *taken = self.input.split(self.tower.hidden_size, dim=-1)
        for layer in self.decoder.layers:
            run = partial(_run, layer, images)
            recomputed = self.training and self.config.recompute_granularity == "full"
            hidden = tensor_parallel.checkpoint(run, False, hidden) if recomputed else run(hidden)
            if layer.layer_number - 1 in self.tower.deepstack:
                taken.append(hidden)
        if not self.post_process:
            return torch.cat([hidden, *taken], dim=-1)
        if self.decoder.final_layernorm is not None:
            hidden = self.decoder.final_layernorm(hidden)
        return self.output_layer([hidden, *taken])


def _run(layer: Any, images: PackedImages, hidden: Tensor) -> Tensor:
    return layer(hidden, attention_mask=None, packed_seq_params=images)[0]


def layer_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.LayerNorm:
    """torch's, as megatron's block asks for it."""
    return torch.nn.LayerNorm(hidden_size, eps=eps, dtype=config.params_dtype)


class Embedding(MegatronModule):
    """Patches times a matrix, plus a table of positions stretched to each image's grid."""

    def __init__(self, config: Any, tower: Tower, kind: TowerKind):
        super().__init__(config)
        self.merge = tower.merge
        self.kind = kind
        empty = partial(torch.empty, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(empty(tower.hidden_size, *kind.patch(tower)))
        self.bias = torch.nn.Parameter(empty(tower.hidden_size))
        self.positions = torch.nn.Parameter(empty(*kind.positions(tower), tower.hidden_size))

    def forward(self, pixels: Tensor, grids: Grids) -> Tensor:
        """[P, patch] -> [P, hidden], block by block of the patches that are merged."""
        order = to_device(_blocks(grids, self.merge), self.weight.device)
        pixels = pixels.flatten(1).to(self.weight.dtype)
        rows = F.linear(pixels, self.weight.flatten(1), self.bias)
        positions = torch.cat([self._stretched(h, w) for _, h, w in grids]).to(rows.dtype)
        if self.kind.rasters:
            return (rows + positions)[order]
        return rows + positions[order]

    def _stretched(self, height: int, width: int) -> Tensor:
        """[height * width, hidden] row by row."""
        table = self.positions.flatten(0, -2)
        side = math.isqrt(len(table))
        square = table.float().T.unflatten(1, (side, side))[None]
        how = {"mode": self.kind.interpolation, "align_corners": self.kind.align_corners}
        return F.interpolate(square, (height, width), **how)[0].flatten(1).T


class Projections(MegatronModule):
    """The projection of the hidden states behind the last layer, and of those that are taken."""

    def __init__(self, config: Any, tower: Tower, width: int, group: Any):
        super().__init__(config)
        projection = partial(Projection, config, tower, width, group)
        self.last = projection(tower.hidden_size)
        wide = tower.hidden_size * tower.merge**2
        self.taken = torch.nn.ModuleList(projection(wide) for _ in tower.deepstack)

    def forward(self, states: list[Tensor]) -> Tensor:
        parts = zip((self.last, *self.taken), states, strict=True)
        return torch.cat([projection(hidden) for projection, hidden in parts], dim=1)


class Projection(MLP):
    """Two linear layers on the merge * merge patches of a row: [P, 1, hidden] -> [rows, width].

    Args:
        normed: numbers that are normalized together: those of a patch, or of a row.
    """

    def __init__(self, config: Any, tower: Tower, width: int, group: Any, normed: int):
        wide = tower.hidden_size * tower.merge**2
        super().__init__(
            replace(config, hidden_size=width, ffn_hidden_size=wide, activation_func=F.gelu),
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            input_size=wide,
            ffn_hidden_size=wide,
            tp_group=group,
        )
        self.norm = layer_norm(config, normed, config.layernorm_epsilon)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        rows = self.norm(hidden.reshape(-1, *self.norm.normalized_shape))
        both: tuple[Tensor, Any] = super().forward(rows.reshape(-1, 1, self.input_size))
        output, bias = both
        return (output + bias)[:, 0]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        """megatron's, with the norm as the copy of the tower's tensor-parallel ranks that it is:
        megatron's MLP passes no group on (mlp.py:376), so that each rank would write it."""
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        norm = f"{prefix}norm."
        group = cast(Any, self.tp_group)
        found |= sharded_state_dict_default(
            self.norm, norm, sharded_offsets, metadata, tp_group=group
        )
        return found


# attention within images -------------------------------------------------------------------------


@dataclass(kw_only=True)
class PackedImages(PackedSequences):
    """Images as packed sequences. P = patches.

    Args:
        cos, sin: [P, 1, D / 2] of the angles that a patch's row and column turn its heads by.
        pairs: see `TowerKind`.
    """

    cos: Tensor
    sin: Tensor
    pairs: str

    @classmethod
    def of(  # type: ignore[override]
        cls, grids: Grids, tower: Tower, kind: TowerKind, device: torch.device
    ) -> PackedImages:
        for grid in grids:
            if grid[0] != 1 or grid[1] % tower.merge or grid[2] % tower.merge:
                raise ValueError(
                    f"VisionTower: an image of {grid} patches (frames, height, width), expected 1 "
                    f"frame and sides of a multiple of {tower.merge}"
                )
        layout = TokenLayout(tuple(h * w for _, h, w in grids))
        flat = torch.cat([torch.arange(h * w) for _, h, w in grids])[_blocks(grids, tower.merge)]
        widths = torch.tensor([w for _, _, w in grids]).repeat_interleave(
            torch.tensor(layout.seqlens)
        )
        at = to_device(torch.stack([flat // widths, flat % widths], -1), device)  # [P, 2]
        half = tower.hidden_size // tower.num_attention_heads // 2
        frequencies = ROPE_THETA ** -(torch.arange(0, half, 2, dtype=torch.float32) / half)
        angles = at[:, :, None].float() * to_device(frequencies, device)  # [P, 2, D / 4]
        if kind.pairs == "neighbours":
            angles = angles.flip(1).transpose(1, 2)
        angles = angles.flatten(1)[:, None]
        return cls(
            qkv_format="thd",
            max_seqlen_q=layout.max_padded_seqlen,
            max_seqlen_kv=layout.max_padded_seqlen,
            layout=layout,
            place=RankCoords(),
            positions=at,
            causal=False,
            cos=angles.cos(),
            sin=angles.sin(),
            pairs=kind.pairs,
        )

    def turned(self, heads: Tensor) -> Tensor:
        """[P, heads, D] turned by the angles, computed in fp32."""
        dim, shape = (-1, (-1, 2)) if self.pairs == "neighbours" else (-2, (2, -1))
        a, b = heads.float().unflatten(-1, shape).unbind(dim)
        both = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        return torch.stack(both, dim).flatten(-2).to(heads.dtype)


def _blocks(grids: Grids, merge: int) -> Tensor:
    """[P] int64 on the host, the patch of images stored row by row at each place of the order block
    by block."""
    parts = []
    first = 0
    for _, h, w in grids:
        flat = torch.arange(first, first + h * w)
        parts.append(flat.view(h // merge, merge, w // merge, merge).transpose(1, 2).flatten())
        first += h * w
    return torch.cat(parts)


class ImageAttention(PackedAttention):
    """softmax(q k^T * scale) v over each image, with queries and keys turned by their patches'
    places."""

    def forward(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        images: PackedImages = kwargs["packed_seq_params"]
        return super().forward(images.turned(query), images.turned(key), *args, **kwargs)
