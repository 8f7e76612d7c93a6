"""Ragged samples to the rows of a rank: single gathers, routes, index maps, a whole microbatch."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.end_to_end import batch_of, positions_of, shard_at
from benchmarks.lengths import lognormal, uniform
from benchmarks.measure import Case
from benchmarks.per_sequence import TRAINERS
from pyrl_ext import ops
from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.parallel.upload import Upload
from pyrl_ext.replay.routed_experts import RoutedExperts

CP = 2
TOKENS = 131_072  # of all sequences: 64k rows a rank


def lengths_of(shrink: int) -> tuple[int, ...]:
    return lognormal(64, 16384 // shrink, TOKENS // shrink)


def gather_rows(device: str, shrink: int = 1) -> Iterator[Case]:
    """Tokens of one context-parallel rank of two, forward; and hidden states backward."""
    layout = TokenLayout(lengths_of(shrink), CP)
    rows = layout.rows(0).to(device)
    for name, width, dtype in [
        ("token ids, 8 B", 1, torch.int64),
        ("routes, 188 B", 188, torch.uint8),
        ("hidden 2048 bf16, 4 KiB", 2048, torch.bfloat16),
    ]:
        src = torch.empty(sum(layout.seqlens), width, dtype=dtype).random_(100).to(device)
        fill = torch.zeros(width, dtype=dtype, device=device)
        written = len(rows) * width * src.element_size()
        yield Case(
            f"{name} x {len(rows)}",
            partial(ops.gather_rows, src, rows, fill),
            {"index_select": partial(index_select, src, rows)},
            moved=2 * written + 8 * len(rows),
            written=written,
            at_least={"2 threads": 1.6} if width == 188 else {},
        )
    yield _backward(sum(layout.seqlens), rows, device)


def _backward(num_src: int, rows: Tensor, device: str) -> Case:
    """The gradient of hidden states through the inverse map, which a microbatch has already."""
    width = 2048
    src = torch.zeros(num_src, width, dtype=torch.bfloat16, device=device)
    grad = torch.randn(len(rows), width, device=device).bfloat16()
    fill = src.new_zeros(width)
    inverse = ops.invert_rows(rows, num_src)
    missing = (rows < 0)[:, None]
    clamped = rows.clamp(min=0)

    def index_add() -> Tensor:
        return src.new_zeros(src.shape).index_add_(0, clamped, grad.masked_fill(missing, 0))

    def gradient(gather: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        leaf = src.detach().requires_grad_()
        out = gather(leaf)
        return lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)[0]

    return Case(
        f"backward of hidden x {len(rows)}",
        gradient(lambda x: ops.gather_rows(x, rows, fill, inverse)),
        {"index_add": index_add, "index_select": gradient(lambda x: index_select(x, rows))},
        moved=grad.nbytes + src.nbytes + 8 * (len(rows) + num_src),
        written=src.nbytes,
    )


def index_select(src: Tensor, rows: Tensor) -> Tensor:
    """`ops.gather_rows` in torch, with zeros in padding rows."""
    picked = src.index_select(0, rows.clamp(min=0))
    missing = (rows < 0).view(-1, *[1] * (src.ndim - 1))
    fill = picked.masked_fill if src.requires_grad else picked.masked_fill_
    return fill(missing, 0)


def gather_fields(device: str, shrink: int = 1) -> Iterator[Case]:
    """The token-aligned fields of a microbatch in one call, against an index a field."""
    layout = TokenLayout(lengths_of(shrink), CP)
    rows = layout.rows(0).to(device)
    dtypes = [torch.int64] * 3 + [torch.bool] + [torch.float32] * 4
    fields = [
        torch.empty(sum(layout.seqlens), dtype=d).random_(2 if d == torch.bool else 100).to(device)
        for d in dtypes
    ]
    fills = [0.0] * len(fields)
    written = len(rows) * sum(d.itemsize for d in dtypes)
    yield Case(
        f"ids, targets, positions, mask, 4 fp32 x {len(rows)}",
        lambda: ops.gather_fields(fields, rows, fills).views,
        {"index each": lambda: [index_select(field, rows) for field in fields]},
        moved=2 * written + 8 * len(rows),
        written=written,
    )


class Shape(NamedTuple):
    sequences: int
    longest: int  # tokens; the padded batch is as wide
    tokens: int  # of all sequences: 8 times the rows of a rank
    layers: int
    top_k: int
    experts: int


SHAPES = [
    Shape(64, 32768, 1_100_000, 46, 4, 64),  # GLM-4.7-Flash
    Shape(512, 16384, 1_216_000, 46, 4, 64),
    Shape(64, 32768, 536_000, 89, 8, 160),  # GLM-4.7
]
PARTS = (2, 0, 4, 0)  # cp_size, cp_rank, tp_size, tp_rank


def gather_routes(device: str, shrink: int = 1) -> Iterator[Case]:
    """Routes of one rank of TP4 CP2, all layers, from what the engine reported."""
    for shape in SHAPES:
        yield _routes(shape, shape.longest // shrink, shape.tokens // shrink, device)


def _routes(shape: Shape, longest: int, tokens: int, device: str) -> Case:
    lengths = lognormal(shape.sequences, longest, tokens)
    layout = TokenLayout(lengths, cp_size=PARTS[0], tp_size=PARTS[2])
    rows = layout.shard(layout.rows(PARTS[1]), PARTS[3]).to(device)
    each = shape.layers * shape.top_k
    ragged = torch.empty(sum(layout.seqlens), shape.layers, shape.top_k, dtype=torch.uint8)
    ragged = ragged.random_(shape.experts).to(device)
    batch, mask = pad(ragged, lengths, longest)
    slots = torch.arange(shape.layers)
    real = rows >= 0

    def in_torch() -> Tensor:
        """index_select, then permute. Padding rows get token 0's experts: the operator's own
        padding would cost it more."""
        return ragged.index_select(0, rows.clamp(min=0)).permute(1, 0, 2).contiguous()

    trainers = {n: partial(run, batch, mask, torch.uint8, PARTS) for n, run in TRAINERS.items()}
    written = len(rows) * each
    return Case(
        f"{shape.sequences} seqs, {shape.layers}x{shape.top_k} x {len(rows)}",
        partial(ops.gather_routes, ragged, rows, slots, shape.experts),
        {"torch": in_torch, **trainers},
        moved=len(rows) * (each + 8) + written,
        written=written,
        at_most={"x written": 3.5},
        at_least={"torch": 5, **dict.fromkeys(TRAINERS, 15), "2 threads": 1.6},
        agree=lambda ours, theirs: torch.equal(ours[:, real], theirs[:, real]),
    )


def pad(ragged: Tensor, lengths: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
    """[B, width, ...] batch with padding on both sides, as prompt and response have it, and its
    [B, width] mask."""
    batch = ragged.new_zeros(len(lengths), width, *ragged.shape[1:])
    mask = torch.zeros(len(lengths), width, dtype=torch.bool, device=ragged.device)
    for index, sequence in enumerate(ragged.split(lengths)):
        first = (width - len(sequence)) // 2
        batch[index, first : first + len(sequence)] = sequence
        mask[index, first : first + len(sequence)] = True
    return batch, mask


def layout(device: str, shrink: int = 1) -> Iterator[Case]:
    """The index map of one context-parallel rank of two, which is made on the host, whatever the
    device; and the pad removal it serves, on the device."""
    maps = [(64, 4096), (512, 16384), (4096, 512)] if device == "cpu" else []
    for sequences, longest in maps:
        lengths = uniform(sequences, max(longest // shrink, 16))
        written = 8 * TokenLayout(lengths, CP).num_local
        yield Case(
            f"index map, {sequences} seqs up to {longest // shrink}",
            lambda n=lengths: TokenLayout(n, CP).rows(0),
            {"loop": partial(map_loop, lengths)},
            moved=written,  # nothing is read
            written=written,
            at_most={"ms": 3},
        )
    yield from _pad_removal(device, 16384 // shrink)


def _pad_removal(device: str, longest: int) -> Iterator[Case]:
    """Token ids of 512 padded sequences to the rows of a rank."""
    lengths = uniform(512, longest)
    batch, mask = pad(torch.arange(1, sum(lengths) + 1), lengths, longest)  # 0 is padding
    flat = batch.view(-1).to(device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    starts = tuple(i * longest + int(row.int().argmax()) for i, row in enumerate(mask))
    made_before = TokenLayout(lengths, CP, starts=starts).rows(0).to(device)
    padded = batch.to(device)
    on_device = mask.to(device)

    def with_map() -> Tensor:
        rows = TokenLayout(lengths, CP, starts=starts).rows(0)
        return ops.gather_rows(flat, rows.to(device, non_blocking=True), zero)

    size = 8 * len(made_before)
    runs = {
        "map made before": (partial(ops.gather_rows, flat, made_before, zero), 3),
        "with its map from lengths": (with_map, 4),
    }
    for name, (run, moved) in runs.items():
        yield Case(
            f"pad removal, ids 512 x {longest}, {name}",
            run,
            {"loop": partial(pad_removal_loop, padded, on_device)},
            moved=moved * size,
            written=size,
            at_most={"ms": 3},
        )


def map_loop(lengths: Sequence[int]) -> Tensor:
    """Rows of rank 0, built a sequence at a time."""
    parts = []
    start = 0
    for n in lengths:
        chunk = -(-n // (2 * CP))
        at = torch.arange(2 * CP * chunk)
        at = torch.cat([at[:chunk], at[-chunk:]])
        parts.append(torch.where(at < n, start + at, -1))
        start += n
    return torch.cat(parts)


def pad_removal_loop(batch: Tensor, mask: Tensor) -> Tensor:
    """Rank 0's ids, a boolean index a sequence."""
    parts = []
    for ids, real in zip(batch, mask, strict=True):
        taken = ids[real]
        chunk = -(-len(taken) // (2 * CP))
        padded = taken.new_zeros(2 * CP * chunk)
        padded[: len(taken)] = taken
        parts += [padded[:chunk], padded[-chunk:]]
    return torch.cat(parts)


LAYERS = 46
TOP_K = 4
EXPERTS = 64
FIELDS = ("tokens", "targets", "positions", "rollout_logprobs", "advantages")


def feed(device: str, shrink: int = 1) -> Iterator[Case]:
    """The whole way from samples on the host to a microbatch on the device of a rank: 64k rows and
    routes of 46 layers, rank 0 of CP2. On cuda whatever waits for it raises."""
    place = RankCoords(cp_size=CP)
    lengths = lengths_of(shrink)
    total = sum(lengths)
    layers = range(LAYERS)
    g = torch.Generator().manual_seed(0)
    batch = batch_of(
        lengths,
        tokens=torch.randint(154_880, (total,), generator=g),
        targets=torch.randint(154_880, (total,), generator=g),
        loss_mask=torch.rand(total, generator=g) > 0.5,
        rollout_logprobs=torch.rand(total, generator=g),
        advantages=torch.rand(total, generator=g),
        routes=torch.randint(EXPERTS, (total, LAYERS, TOP_K), generator=g, dtype=torch.uint8),
        layer_ids=tuple(layers),
    )
    stored = vars(batch) | {"positions": positions_of(batch)}
    shard = shard_at(batch, range(len(lengths)), place)

    def set_up() -> list[Tensor]:
        upload = Upload(torch.device("cpu" if device == "meta" else device))
        micro = Microbatch.of(shard, 0, place, upload=upload)
        routes = RoutedExperts.of(shard, micro.at_router, layers, EXPERTS, TOP_K, upload)
        upload.arrive()
        experts = [each.ids for each in routes.of_layers(layers) if each is not None]
        holders = [micro if hasattr(micro, name) else micro.inputs for name in FIELDS]
        fields = [getattr(each, name) for each, name in zip(holders, FIELDS, strict=True)]
        return [*fields, *experts]

    def in_torch() -> list[Tensor]:
        rows = Microbatch.of(shard, 0, place).rows
        real = rows >= 0
        at = rows.clamp(min=0)
        fields = [torch.where(real, stored[name][at], 0) for name in FIELDS]
        spread = torch.arange(len(rows) * TOP_K).remainder(EXPERTS).view(-1, 1, TOP_K)
        routes = torch.where(real[:, None, None], batch.routes[at], spread)
        moved = [x.to(device) for x in (*fields, routes.transpose(0, 1).to(torch.uint8))]
        return [*moved[:-1], *moved[-1].contiguous()]

    rows = len(Microbatch.of(shard, 0, place).rows)
    written = rows * (5 * 6 + 2 + LAYERS * TOP_K)
    yield Case(
        f"a microbatch of {rows} rows, {LAYERS} x {TOP_K} routes",
        partial(_never_waiting, set_up) if device == "cuda" else set_up,
        {"torch": in_torch},
        moved=3 * written,  # routes are sliced on the host, then dealt to layers
        written=written,
    )


def _never_waiting(run: Callable[[], Any]) -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
