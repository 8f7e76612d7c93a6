"""SkyRL 0.3.0's own code for the works of `benchmarks.integrations`, called as its trainer does."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay
from skyrl.backends.skyrl_train.distributed.megatron.megatron_utils import preprocess_packed_seqs
from skyrl.backends.skyrl_train.distributed.megatron.model_utils import (
    DistributedLogprob,
    vocab_parallel_entropy,
)
from skyrl.backends.skyrl_train.utils import replay_utils
from skyrl.train.dataset.bin_packing import make_seq_packer
from torch import Tensor

from benchmarks.dynamic_cp import Groups
from benchmarks.peers_logprob import Pair


def logprobs(group: dist.ProcessGroup) -> dict[str, Callable[[Tensor, Tensor], Pair]]:
    """Over the shards of ``group``, which is megatron's tensor-parallel group."""

    def both(logits: Tensor, targets: Tensor) -> Pair:
        batch = logits[None]
        first = group.rank() * logits.shape[1]
        shard = first, first + logits.shape[1], group
        logprob = DistributedLogprob.apply(batch, targets[None], *shard)
        return logprob[0], vocab_parallel_entropy(batch)[0]

    return {"SkyRL": both}


def packing(
    padded: Sequence[Tensor], mask: Tensor, ragged: Sequence[Tensor], lengths: Sequence[int]
) -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Columns [B, S]."""
    return {"SkyRL": lambda: [preprocess_packed_seqs(column, mask)[0][0] for column in padded]}


def replay(
    padded: Tensor,
    mask: Tensor,
    ragged: Tensor,
    lengths: Sequence[int],
    config: TransformerConfig,
    held: int,
) -> dict[str, Callable[[], Sequence[Tensor | None]]]:
    """Routes for ``held`` routers."""
    routes = padded.int()  # as its worker passes them
    RouterReplay.global_router_replay_instances.clear()
    routers = [RouterReplay() for _ in range(held)]

    def set_routes() -> Sequence[Tensor | None]:
        replay_utils.setup_per_microbatch_replay_forward(routes, mask, config, True)
        found = [router.target_topk_idx for router in routers]
        replay_utils.clear_router_replay()  # or the lists for backwards grow
        return found

    return {"SkyRL": set_routes}


def balance(
    lengths: Sequence[int], ranks: int, limit: int
) -> dict[str, Callable[[], Sequence[Groups]]]:
    """Every rank makes the microbatches of its equal part of the batch, and waits in empty ones
    for the rank with the most; timed is one rank."""
    part = len(lengths) // ranks

    def of_rank(rank: int) -> list[list[int]]:
        first = rank * part
        bins = make_seq_packer("balanced", limit).pack([*lengths[first : first + part]])
        return [[first + i for i in ids] for ids in bins]

    every = zip_longest(*map(of_rank, range(ranks)), fillvalue=[])
    plan = [[(1, ids) for ids in bins] for bins in every]

    def timed() -> Sequence[Groups]:
        of_rank(0)
        return plan

    return {"SkyRL": timed}
