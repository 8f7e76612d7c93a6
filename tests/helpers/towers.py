"""A small encoder of megatron's layers, batches with images for it, and its whole tensors by the
names of megatron's sharded state dicts, in which no layout shows."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from benchmarks.end_to_end import index_of
from pyrl_ext.megatron.ddp import unwrap, wrap_ddp
from pyrl_ext.megatron.optimizer import build_optimizer
from pyrl_ext.ops.tensors import dtype_of
from pyrl_ext.pack.encoder_work import EncoderWork, ShardImages
from pyrl_ext.pack.exchange import shard_batch
from pyrl_ext.pack.images import Images
from pyrl_ext.pack.rank_rows import Lengths, RankRole
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.schedule import Schedule
from pyrl_ext.trainer.module import TrainedModule
from tests.helpers.passes import WholeBatch

# patches a side of a row's square, numbers of a patch
MERGE = 2
PIXELS = 12
WIDTH = 32
LAYERS = 2
HEADS = 4
IMAGE_TOKEN = 3


class Patches(PackedSeqParams):
    """Packed images: each attends to itself."""

    def __init__(self, sizes: list[int]):
        super().__init__(qkv_format="thd")
        self.sizes = sizes


class BothWays(MegatronModule):
    """softmax(q k^T) v within each image."""

    def __init__(self, config: Any, *_: Any, **__: Any):
        super().__init__(config=config)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, packed_seq_params: Any, **__: Any):
        parts = zip(*(x.split(packed_seq_params.sizes) for x in (q, k, v)), strict=True)
        heads = ([x.transpose(0, 1)[None] for x in part] for part in parts)
        attended = [F.scaled_dot_product_attention(*part)[0].transpose(0, 1) for part in heads]
        return torch.cat(attended)


def tower_config(plan: Plan, pp: int, tp: int) -> Any:
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    from pyrl_ext.megatron.config import LOCAL_FIELDS

    dtype = dtype_of(plan.model.dtype)
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=2 * WIDTH,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for with the line above, experts or not
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        perform_initialization=False,
        use_cpu_initialization=True,
        **LOCAL_FIELDS,
    )


class Tower(MegatronModule):
    """A stage of the encoder: patches [P, PIXELS] -> rows [P / MERGE^2, width]."""

    def __init__(self, config: Any, width: int, topo: Topology):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_block import (
            TransformerBlock,
            TransformerBlockSubmodules,
        )

        from pyrl_ext.megatron.local_layers import RMSNorm

        super().__init__(config=config)
        self.first = topo.is_first_stage
        self.last = topo.is_last_stage
        self.pg_collection = topo.groups
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        parts: Any = layer.submodules
        parts.self_attention.submodules.core_attention = BothWays
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        spec = TransformerBlockSubmodules([layer] * (LAYERS // topo.pp_size), RMSNorm)
        kinds = {"pre_process": self.first, "post_process": self.last}
        if self.first:
            self.embed = torch.nn.Linear(PIXELS, WIDTH)
        self.decoder = TransformerBlock(config, spec, **kinds, pg_collection=topo.groups)
        if self.last:
            self.merge = torch.nn.Linear(MERGE**2 * WIDTH, 2 * WIDTH)
            self.project = torch.nn.Linear(2 * WIDTH, width)

    def handed_on(self, grids: list[tuple[int, ...]], _stage: int) -> tuple[int, int, int]:
        """The shape of the output of a stage that is not the last."""
        return sum(t * h * w for t, h, w in grids), 1, WIDTH

    def set_input_tensor(self, tensor: Any) -> None:
        """megatron's schedules call it."""
        self.decoder.set_input_tensor(tensor[0] if isinstance(tensor, list) else tensor)

    def forward(self, patches: Tensor | None, grids: list[tuple[int, ...]]) -> Tensor:
        x: Any = None
        if self.first and patches is not None:
            x = self.embed(patches.to(self.config.params_dtype))[:, None]
        sizes = Patches([t * h * w for t, h, w in grids])
        x = self.decoder(x, None, packed_seq_params=sizes)
        if not self.last:
            return x
        return self.project(F.gelu(self.merge(x.reshape(-1, MERGE**2 * WIDTH))))


def build_tower(name: str, plan: Plan, topo: Topology, width: int) -> Tower:
    """A stage with weights drawn by their names, in the plan's dtype."""
    from pyrl_ext.megatron import cpu

    cpu.install()
    tower = Tower(tower_config(plan, topo.pp_size, topo.tp_size), width, topo)
    fill(name, tower, topo)
    return tower.to(dtype_of(plan.model.dtype))


def tower_module(name: str, plan: Plan, topo: Topology, width: int, trained: bool) -> TrainedModule:
    """The module of an encoder's rank."""
    chunks: list[Any] = [build_tower(name, plan, topo, width).requires_grad_(trained)]
    shares = plan.modules[name].ranks == "shared"
    if shares and not trained:
        return TrainedModule(name, plan, topo, chunks)
    wrapped = wrap_ddp(plan, chunks, topo.groups, overlap=not shares)
    optimizer = build_optimizer(plan, wrapped, topo.groups)  # gathers over the world: all build one
    module = TrainedModule(name, plan, topo, wrapped if trained else chunks)
    if trained:
        module.optimizer = optimizer
        module.config.grad_scale_func = optimizer.scale_loss
    return module


# whole tensors by name ---------------------------------------------------------------------------


def _pieces(name: str, tower: Any, topo: Topology, value: Callable) -> Iterator[ShardedTensor]:
    metadata = {"dp_cp_group": topo.groups.dp_cp}
    for entry in nested_values(tower.sharded_state_dict(prefix=f"{name}.", metadata=metadata)):
        if isinstance(entry, ShardedTensorFactory):
            built = entry.build_fn(entry.key, value(entry.data), entry.replica_id, None)
            yield from (piece for piece in nested_values(built) if isinstance(piece, ShardedTensor))
        elif isinstance(entry, ShardedTensor) and entry.data is not None:
            entry.data = value(entry.data)
            yield entry


def _window(whole: Tensor, offset: Any, shape: Any) -> Tensor:
    sizes = (*[1] * (whole.ndim - len(shape)), *shape)
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]


@torch.no_grad()
def fill(name: str, tower: Tower, topo: Topology) -> None:
    for piece in _pieces(name, tower, topo, lambda x: x):
        assert piece.data is not None
        g = torch.Generator().manual_seed(zlib.crc32(piece.key.encode()))
        whole = torch.randn(piece.global_shape, generator=g)
        whole = 1 + 0.1 * whole if "norm" in piece.key else 0.15 * whole
        mine = _window(whole, piece.global_offset, piece.data.shape)
        piece.data.copy_(mine.view_as(piece.data))


def pieces(name: str, tower: Any, topo: Topology, value: Callable) -> list[tuple]:
    """(key, whole shape, offset, values) of what this rank has of every parameter."""
    found = _pieces(name, unwrap(tower), topo, value)
    return [
        (p.key, p.global_shape, p.global_offset, p.data.detach().float().clone())
        for p in found
        if p.data is not None and p.data.is_floating_point()
    ]


def assembled(parts: list[tuple]) -> dict[str, Tensor]:
    """Whole tensors of the pieces of all ranks; copies of a piece are equal but for rounding."""
    found: dict[str, Tensor] = {}
    for key, shape, offset, values in parts:
        whole = found.setdefault(key, torch.full(shape, float("nan")))
        window = _window(whole, offset, values.shape)
        values = values.view(window.shape)
        there = ~window.isnan()
        torch.testing.assert_close(window[there], values[there], atol=1e-5, rtol=1e-4, msg=key)
        window.copy_(values)
    assert not any(whole.isnan().any() for whole in found.values())
    return found


# batches with images -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImageBatch(WholeBatch):
    """A batch whose samples have images of several kinds.

    Args:
        images:  by kind, of all samples.
        pixels:  by kind, [P, width] of all images.
    """

    images: Mapping[str, Images] = field(default_factory=dict)
    pixels: Mapping[str, Tensor] = field(default_factory=dict)


def with_images(
    batch: WholeBatch, kinds: tuple[str, ...], seed: int, width: int = PIXELS
) -> ImageBatch:
    """``batch`` with images in two of three samples that are long enough; some have several."""
    rng = np.random.default_rng(seed)
    tables: dict[str, list] = {kind: [] for kind in kinds}
    tokens = batch.tokens.clone()
    mask = batch.loss_mask.clone()
    for sample, length in enumerate(batch.seqlens):
        row = int(rng.integers(1, 3))
        for number in range(int(rng.integers(0, 3)) if sample % 3 else 0):
            h = int(rng.integers(1, 4))
            w = int(rng.integers(1, 3))
            if row + h * w + 1 >= length:
                break
            kind = kinds[(sample + number) % len(kinds)]
            tables[kind].append((sample, row, h * w, (1, h * MERGE, w * MERGE)))
            start = int(batch.starts[sample]) + row
            tokens[start : start + h * w] = IMAGE_TOKEN
            mask[max(0, start - 1) : start + h * w - 1] = False
            row += h * w + int(rng.integers(0, 3))
    images = {}
    pixels = {}
    for kind, table in tables.items():
        columns = zip(*table, strict=True) if table else ([], [], [], np.empty((0, 3)))
        images[kind] = Images(*(np.asarray(c, np.int64) for c in columns))
        g = torch.Generator().manual_seed(seed + zlib.crc32(kind.encode()) % 1000)
        pixels[kind] = torch.randn(int(images[kind].patches.sum()), width, generator=g)
    kept: dict[str, Any] = {each.name: getattr(batch, each.name) for each in fields(batch)}
    changed: dict[str, Any] = kept | {"tokens": tokens, "loss_mask": mask}
    return ImageBatch(**changed, images=images, pixels=pixels)


def image_shard(plan: Plan, topo: Topology, batch: ImageBatch, schedule: Schedule) -> BatchShard:
    """This rank's shard of a batch that every rank holds."""
    index = index_of(batch, topo.rank, plan.num_mtp_layers)
    schedule = padded(plan, schedule)
    shard, _ = shard_batch(batch, index, [schedule], plan, topo)
    lengths = Lengths(index.seqlens, index.starts)
    images = {
        kind: _shard_images(plan, topo, batch, kind, EncoderWork(table, schedule, lengths, dp))
        for kind, table in batch.images.items()
        for dp in [plan.grids[kind].parallel.dp if kind in plan.grids else 1]
    }
    shard = replace(shard, images=images)
    if not shard.role.last_stage or batch.old_logprobs is None:
        return shard
    return shard.with_columns(old_logprobs=batch.old_logprobs[torch.from_numpy(shard.rows.tokens)])


def padded(plan: Plan, schedule: Schedule) -> Schedule:
    """``schedule`` with as many microbatches as the pipeline asks for."""
    return schedule.padded(plan.parallel.pp if plan.parallel.vpp else 1)


def _shard_images(
    plan: Plan, topo: Topology, batch: ImageBatch, kind: str, work: EncoderWork
) -> ShardImages:
    place = topo.of(kind)
    replica = place.dp_rank if place else 0
    ids = [work.ids(m, replica) for m in range(len(work.schedule))]
    sizes = work.images.patches
    starts = np.cumsum(sizes) - sizes
    rows = [np.arange(int(starts[i]), int(starts[i] + sizes[i])) for part in ids for i in part]
    firsts = np.cumsum([0, *(int(sizes[part].sum()) for part in ids)])
    patches = batch.pixels[kind][np.concatenate([np.empty(0, np.int64), *rows])]
    encodes = (place and place.is_first_stage) or kind not in plan.grids
    return ShardImages(work, patches if encodes else None, firsts, MERGE)


class InProcess:
    """An edge whose encoder is in this process: plain autograd, what the other edges are compared
    with.

    Args:
        width: first numbers of a row that are read; None: all.
        depth: the MTP layer that reads the rows; 0: the model.
    """

    def __init__(self, tower: Any, width: int | None = None, depth: int = 0):
        self.tower = tower
        self.width = width
        self.depth = depth
        self.images: Any = None  # of the pass

    def take(self, work: EncoderWork, microbatch: int) -> list[tuple[Tensor, Tensor]]:
        patches, grids, rows = self.images.microbatch(microbatch, 0)
        if not rows:
            return []
        route = work.route(microbatch, 0, RankRole(), self.depth)
        output = self.tower(patches, grids)[:, : self.width]
        return [(route.dest, output.index_select(0, route.source))]

    def finish(self) -> None:
        """Nothing is on its way."""
