"""feed: the whole way from samples on the host to a microbatch on the device of a rank."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.end_to_end import shard_at
from benchmarks.lengths import lognormal
from benchmarks.measure import Case
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.parallel.topology import Place
from pyrl_ext.parallel.upload import Upload
from pyrl_ext.replay.routed_experts import RoutedExperts

LAYERS = 46
TOP_K = 4
EXPERTS = 64
TOKENS = 131_072
FIELDS = ("tokens", "targets", "positions", "rollout_logprobs", "advantages")


def feed(device: str, shrink: int = 1) -> Iterator[Case]:
    """64k rows and routes of 46 layers, rank 0 of CP2. On cuda whatever waits for it raises."""
    place = Place(cp_size=2)
    batch = _batch(lognormal(64, 16384 // shrink, TOKENS // shrink))
    layers = range(LAYERS)
    shard = shard_at(batch, range(len(batch.seqlens)), place)
    narrow = batch.routes
    assert narrow is not None

    def set_up() -> list[Tensor]:
        upload = Upload(torch.device("cpu" if device == "meta" else device))
        micro = Microbatch.of(shard, 0, place, upload=upload)
        routes = RoutedExperts.of(shard, micro.at_router, layers, EXPERTS, TOP_K, upload)
        upload.arrive()
        experts = [each.ids for each in routes.of_layers(layers) if each is not None]
        return [*(_field(micro, name) for name in FIELDS), *experts]

    def in_torch() -> list[Tensor]:
        rows = Microbatch.of(shard, 0, place).rows
        real = rows >= 0
        at = rows.clamp(min=0)
        fields = [torch.where(real, getattr(batch, name)[at], 0) for name in FIELDS]
        spread = torch.arange(len(rows) * TOP_K).remainder(EXPERTS).view(-1, 1, TOP_K)
        routes = torch.where(real[:, None, None], narrow[at], spread)
        moved = [x.to(device) for x in (*fields, routes.transpose(0, 1).to(torch.uint8))]
        return [*moved[:-1], *moved[-1].contiguous()]

    rows = len(Microbatch.of(shard, 0, place).rows)
    written = rows * (5 * 6 + 2 + LAYERS * TOP_K)
    yield Case(
        f"a microbatch of {rows} rows, {LAYERS} x {TOP_K} routes",
        _never_waiting(set_up) if device == "cuda" else set_up,
        {"torch": in_torch},
        moved=3 * written,  # routes are sliced on the host, then dealt to layers
        written=written,
    )


def _never_waiting(run: Any) -> Any:
    def strict() -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strict


def _field(micro: Microbatch, name: str) -> Tensor:
    return getattr(micro if hasattr(micro, name) else micro.inputs, name)


def _batch(lengths: tuple[int, ...]) -> Batch:
    total = sum(lengths)
    g = torch.Generator().manual_seed(0)
    return Batch(
        seqlens=lengths,
        tokens=torch.randint(154_880, (total,), generator=g),
        targets=torch.randint(154_880, (total,), generator=g),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        loss_mask=torch.rand(total, generator=g) > 0.5,
        rollout_logprobs=torch.rand(total, generator=g),
        advantages=torch.rand(total, generator=g),
        routes=torch.randint(EXPERTS, (total, LAYERS, TOP_K), generator=g).to(torch.uint8),
        layer_ids=tuple(range(LAYERS)),
        route_mask=torch.ones(total, dtype=torch.bool),
    )
