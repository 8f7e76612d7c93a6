"""verl 0.9.1's own code for the works of `benchmarks.integrations`, called as its trainer does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from tensordict import TensorDict
from torch import Tensor
from verl.models.mcore.util import preprocess_packed_seqs, preprocess_thd_engine
from verl.utils.megatron import router_replay_utils
from verl.utils.megatron.router_replay_patch import RouterReplay
from verl.utils.megatron.tensor_parallel import (
    vocab_parallel_entropy,
    vocab_parallel_log_probs_from_logits,
)
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    rearrange_micro_batches,
)

from benchmarks.dynamic_cp import Groups
from benchmarks.peers_logprob import Pair

router_replay_utils.device_name = "cpu"  # verl knows GPUs and NPUs only


def logprobs(group: dist.ProcessGroup) -> dict[str, Callable[[Tensor, Tensor], Pair]]:
    """Over the shards of megatron's tensor-parallel group, which ``group`` is."""

    def both(logits: Tensor, targets: Tensor) -> Pair:
        copy = logits.clone()  # megatron writes over what it is given
        entropy = vocab_parallel_entropy(logits)
        return vocab_parallel_log_probs_from_logits(copy, targets), entropy

    return {"verl": both}


def _nested(ragged: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(ragged, torch.tensor([0, *lengths]).cumsum(0))


def packing(
    padded: Sequence[Tensor], mask: Tensor, ragged: Sequence[Tensor], lengths: Sequence[int]
) -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Columns [B, S] or, nested, of sequences without padding."""
    nested = [_nested(column, lengths) for column in ragged]
    return {
        "verl": lambda: [preprocess_packed_seqs(column, mask)[0][0] for column in padded],
        "verl, nested": lambda: [preprocess_thd_engine(column)[0][0] for column in nested],
    }


def replay(
    padded: Tensor,
    mask: Tensor,
    ragged: Tensor,
    lengths: Sequence[int],
    config: TransformerConfig,
    held: int,
) -> dict[str, Callable[[], Sequence[Tensor | None]]]:
    """Routes for ``held`` routers."""
    RouterReplay.router_instances.clear()
    routers = [RouterReplay() for _ in range(held)]

    def set_routes(routes: Tensor) -> Sequence[Tensor | None]:
        router_replay_utils.set_router_replay_data(routes, mask, config)
        found = [router.target_topk_idx for router in routers]
        RouterReplay.clear_global_indices()  # or the lists for backwards grow
        return found

    nested = _nested(ragged, lengths)
    return {"verl": lambda: set_routes(padded), "verl, nested": lambda: set_routes(nested)}


def balance(
    lengths: Sequence[int], ranks: int, limit: int
) -> dict[str, Callable[[], Sequence[Groups]]]:
    """The driver distributes the samples, then each rank makes its microbatches. All ranks make as
    many as the rank that needs most. The driver's work and that of one rank are timed."""
    tokens = torch.tensor(lengths)
    costs = calculate_workload(tokens).tolist()

    def of_rank(samples: Sequence[int], least: int) -> list[list[int]]:
        column = tokens[[*samples]][:, None]  # only its sums over dim 1 are read
        batch: Any = TensorDict({"input_ids": column, "attention_mask": column}, [len(column)])
        _, found = rearrange_micro_batches(batch, limit, min_num_micro_batch=least)
        return [[samples[i] for i in each] for each in found]

    dealt = get_seqlen_balanced_partitions(costs, ranks, equal_size=True)
    number = 1
    plans = [of_rank(samples, number) for samples in dealt]
    while number < max(map(len, plans)):
        number = max(map(len, plans))
        plans = [of_rank(samples, number) for samples in dealt]
    plan = [[(1, ids) for ids in bins] for bins in zip(*plans, strict=True)]

    def timed() -> Sequence[Groups]:
        of_rank(get_seqlen_balanced_partitions(costs, ranks, equal_size=True)[0], number)
        return plan

    return {"verl": timed}
