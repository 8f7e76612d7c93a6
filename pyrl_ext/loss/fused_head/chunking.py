"""The plan of a call of `linear_logprob`: its arguments, checked, and the chunks of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.loss.arguments import check_targets, check_valid_vocab, logit_scale
from pyrl_ext.loss.sampling_mask import KeepMasks, KeptSets
from pyrl_ext.ops.tensors import accum_dtype, on_gpu, to_device

GPU_TOKENS = 256  # of two tiles of a product: a chunk that holds no whole tile wastes a part of it
COMPARED = 5  # further numbers for each logit with a teacher: its logits, terms of the divergence
CHUNK_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30}  # of a chunk, if the caller gives no number
CPU_TOKENS = 512  # most tokens of a chunk on a CPU; more do not make a product faster


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens: the same rows of every sequence shard, shard after shard.

    Args:
        rows: of this rank's hidden states.
        part: of vectors in chunk order.
        pick: [c] int64, the shards' rows that are computed; None: all.
    """

    rows: slice
    part: slice
    pick: Tensor | None


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A call without hidden states and weights.

    Args:
        targets: [N] int64, of the tokens that are computed, in chunk order.
        scale: [N], their ``1 / temperature``.
        chunks: together all tokens that are computed.
        order: [N] int64, these tokens in chunk order; None: all, as given.
        group: the ranks that hold the vocabulary; None: this one alone.
        shards: parts that the hidden states are gathered from: the ranks, or 1.
        valid_vocab: columns of all ranks that are no padding.
        main_grad: the gradient of the weight is added to ``weight.main_grad``.
        cache_bytes: of logits kept for the backward.
        masks: of the tokens in chunk order; None: all of the vocabulary is kept.
    """

    targets: Tensor
    scale: Tensor
    chunks: list[Chunk]
    order: Tensor | None
    group: dist.ProcessGroup | None
    shards: int
    valid_vocab: int
    main_grad: bool
    cache_bytes: int
    masks: KeepMasks | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def scattered(self, values: Tensor, tokens: int) -> Tensor:
        """[N] in chunk order -> [tokens]; NaN for tokens that were not computed."""
        if self.order is None:
            return values
        return values.new_full((tokens,), torch.nan).index_copy(0, self.order, values)


def plan_call(
    where: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
    rows: Tensor | None = None,
    chunk_bytes: int | None,
    cache_bytes: int = 0,
    sequence_parallel: bool = False,
    main_grad: bool = False,
    kept: KeptSets | None = None,
    compared: bool = False,
) -> CallPlan:
    """Check the arguments of `linear_logprob`, and cut the tokens into chunks.

    Args:
        compared: a teacher's logits, and log-probs of both models, are in memory as well.

    Raises:
        ValueError: shapes, dtypes, ``valid_vocab``, ``rows``, ``weight.main_grad``, ``kept``,
            targets or temperatures do not fit.
    """
    ranks = 1 if group is None else group.size()
    shards = ranks if sequence_parallel else 1
    _check_tensors(where, hidden, weight, targets, shards)
    valid_vocab = check_valid_vocab(where, valid_vocab, weight.shape[0], ranks)
    if main_grad:
        _check_main_grad(where, weight)
    # gradients are written over the logits, or elsewhere if the products take another dtype
    sums = accum_dtype(weight.dtype)
    bytes_per_logit = sums.itemsize + (0 if weight.dtype == sums else weight.itemsize)
    bytes_per_logit += kept is not None  # of the mask
    bytes_per_logit += COMPARED * sums.itemsize * compared
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES["cuda" if on_gpu(hidden.device) else "cpu"]
    max_tokens = chunk_tokens(chunk_bytes // (bytes_per_logit * weight.shape[0]), hidden.device)
    computed = _computed(where, rows, len(targets)).view(shards, hidden.shape[0])
    chunks, on_host = _chunks(computed, max_tokens, hidden.device)
    masks = None
    if kept is not None:
        if len(kept.counts) != len(targets):
            raise ValueError(f"{where}: {len(kept.counts)} kept sets, expected {len(targets)}")
        first = 0 if group is None else group.rank() * weight.shape[0]
        masks = kept.select(on_host).masks(first, weight.shape[0], hidden.device)
    order = None if rows is None and shards == 1 else to_device(on_host, hidden.device)
    return CallPlan(
        targets=check_targets(where, targets, valid_vocab, order),
        scale=logit_scale(where, temperature, targets, sums, order),
        chunks=chunks,
        order=order,
        group=group,
        shards=shards,
        valid_vocab=valid_vocab,
        main_grad=main_grad,
        cache_bytes=cache_bytes,
        masks=masks,
    )


def chunk_tokens(fit: int, device: torch.device) -> int:
    """Tokens of a chunk where ``fit`` have room: whole tiles of a product on a GPU."""
    if device.type == "cpu":
        return max(1, min(fit, CPU_TOKENS))
    return max(1, fit // GPU_TOKENS * GPU_TOKENS or fit)


def _check_tensors(
    where: str, hidden: Tensor, weight: Tensor, targets: Tensor, shards: int
) -> None:
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or targets.shape != (hidden.shape[0] * shards,):
        tokens = f"T / {shards}" if shards > 1 else "T"
        raise ValueError(
            f"{where}: hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets "
            f"{list(targets.shape)}, expected [{tokens}, H], [V_local, H], [T]"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"{where}: hidden is {hidden.dtype}, weight {weight.dtype}, expected one floating type"
        )


def _check_main_grad(where: str, weight: Tensor) -> None:
    sums = accum_dtype(weight.dtype)
    buffer = getattr(weight, "main_grad", None)
    if buffer is None or buffer.dtype != sums or buffer.shape != weight.shape:
        has = None if buffer is None else f"{buffer.dtype} {list(buffer.shape)}"
        raise ValueError(
            f"{where}: weight.main_grad is {has}, expected {sums} {list(weight.shape)}. "
            "Without megatron's gradient buffers pass main_grad=False"
        )


def _computed(where: str, rows: Tensor | None, tokens: int) -> Tensor:
    """[T] bool on the host, which tokens are computed."""
    if rows is None:
        return torch.ones(tokens, dtype=torch.bool)
    if rows.device.type != "cpu" or rows.dtype != torch.int64 or rows.ndim != 1:
        raise ValueError(
            f"{where}: rows is {rows.dtype} {list(rows.shape)} on {rows.device}, expected "
            "torch.int64 [N] on the cpu; reading them from another device would wait for it"
        )
    outside = (rows < 0) | (rows >= tokens)
    if outside.any():
        i = int(outside.nonzero()[0])
        raise ValueError(f"{where}: rows[{i}] is {int(rows[i])}, expected one in [0, {tokens})")
    computed = torch.zeros(tokens, dtype=torch.bool)
    computed[rows] = True
    return computed


def _chunks(computed: Tensor, max_tokens: int, device: torch.device) -> tuple[list[Chunk], Tensor]:
    """Chunks of ``max_tokens`` (plus less than one row of the shards) of the tokens ``computed``
    [shards, T / shards], and these tokens [N] in chunk order, on the host."""
    shards, shard_size = computed.shape
    count = computed.sum(0)
    bins = (count.cumsum(0) - count) // max_tokens
    counts = bins.unique_consecutive(return_counts=True)[1]  # pyright: ignore
    lengths = cast(list[int], cast(Tensor, counts).tolist())  # pyright: ignore
    chunks: list[Chunk] = []
    order = [torch.empty(0, dtype=torch.int64)]
    row = token = 0
    for length in lengths:
        pick = computed[:, row : row + length].flatten().nonzero()[:, 0]
        order.append(pick // length * shard_size + pick % length + row)
        rows = slice(row, row + length)
        part = slice(token, token + len(pick))
        is_whole = len(pick) == length * shards
        chunks.append(Chunk(rows, part, None if is_whole else to_device(pick, device)))
        row = rows.stop
        token = part.stop
    return chunks, torch.cat(order)
