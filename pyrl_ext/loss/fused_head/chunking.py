"""What a call of `linear_logprob` is: its arguments, checked, and the chunks of its tokens."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CPU_TOKENS = 512  # of a chunk; more of them do not make a product faster


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens: the same rows of every sequence shard, shard after shard.

    Args:
        rows: of this rank's hidden states.
        at:   the part of vectors in chunk order.
        pick: [c] int64, those of the shards' rows that have a part; None: all.
    """

    rows: slice
    at: slice
    pick: Tensor | None


@dataclass(frozen=True, slots=True)
class Job:
    """A call without its tensors; ``order`` [N] are the tokens in chunk order, None: as given."""

    where: str
    chunks: list[Chunk]
    order: Tensor | None
    group: dist.ProcessGroup | None
    shards: int
    valid_vocab: int
    main_grad: bool
    cache_bytes: int = 0

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def in_order(self, vector: Tensor) -> Tensor:
        return vector if self.order is None else vector.index_select(0, self.order)

    def scattered(self, values: Tensor, tokens: int) -> Tensor:
        """Back from chunk order; NaN for tokens without a part."""
        if self.order is None:
            return values
        return values.new_full((tokens,), torch.nan).index_copy(0, self.order, values)

    def scale(self, temperature: float | Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """1 / temperature [N] in chunk order."""
        if not isinstance(temperature, Tensor):
            if not 0 < temperature < float("inf"):
                raise ValueError(
                    f"{self.where}: temperature is {temperature}, expected a positive number"
                )
            tokens = len(targets) if self.order is None else len(self.order)
            return torch.full((tokens,), 1 / temperature, dtype=dtype, device=targets.device)
        if temperature.shape not in ((), targets.shape):
            raise ValueError(
                f"{self.where}: temperature {list(temperature.shape)}, expected one number or "
                f"{list(targets.shape)}"
            )
        values = self.in_order(temperature.detach().to(dtype).expand(targets.shape))
        wrong = ~(values > 0)
        self.check("temperature", values, wrong, "the positive numbers")
        return values.reciprocal().masked_fill(wrong, torch.nan)

    def targets(self, targets: Tensor) -> Tensor:
        """[N] in chunk order."""
        targets = self.in_order(targets)
        outside = (targets < 0) | (targets >= self.valid_vocab)
        self.check("targets", targets, outside, f"[0, {self.valid_vocab})")
        return targets

    def check(self, name: str, values: Tensor, outside: Tensor, rule: str) -> None:
        if outside.device.type == "cpu" and outside.any():
            i = int(outside.nonzero()[0])
            at = i if self.order is None else int(self.order[i])
            raise ValueError(
                f"{self.where}: {name}[{at}] is {values[i].item()}, expected one in {rule}"
            )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of statistics, log-probs and sums of gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def describe(
    where: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    *,
    valid_vocab: int | None,
    rows: Tensor | None,
    chunk_bytes: int,
    sequence_parallel: bool,
    main_grad: bool,
    cache_bytes: int = 0,
) -> Job:
    size = 1 if group is None else group.size()
    shards = size if sequence_parallel else 1
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or targets.shape != (hidden.shape[0] * shards,):
        tokens = f"T / {size}" if shards > 1 else "T"
        raise ValueError(
            f"{where}: hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets "
            f"{list(targets.shape)}, expected [{tokens}, H], [V_local, H], [T]"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"{where}: hidden is {hidden.dtype}, weight {weight.dtype}, expected one floating type"
        )
    vocab = weight.shape[0] * size
    valid_vocab = vocab if valid_vocab is None else valid_vocab
    if not 0 < valid_vocab <= vocab:
        raise ValueError(
            f"{where}: valid_vocab is {valid_vocab}, expected one in [1, {vocab}], the columns of "
            f"{size} ranks"
        )
    sums = wide(weight.dtype)
    to = getattr(weight, "main_grad", None)
    if main_grad and (to is None or to.dtype != sums or to.shape != weight.shape):
        found = None if to is None else f"{to.dtype} {list(to.shape)}"
        raise ValueError(
            f"{where}: weight.main_grad is {found}, expected {sums} {list(weight.shape)}. "
            "Without megatron's gradient buffers pass main_grad=False"
        )
    # gradients are written over the logits, and rounded where the products take them so
    per_logit = sums.itemsize + (0 if weight.dtype == sums else weight.itemsize)
    most = max(1, chunk_bytes // (per_logit * weight.shape[0]))
    if not hidden.is_cuda:
        most = min(most, CPU_TOKENS)
    wanted = _wanted(where, rows, len(targets)).view(shards, hidden.shape[0])
    chunks, order = _chunks(wanted, most, hidden.device)
    straight = rows is None and shards == 1
    return Job(
        *(where, chunks, None if straight else order, group, shards),
        *(valid_vocab, main_grad, cache_bytes),
    )


def _wanted(where: str, rows: Tensor | None, tokens: int) -> Tensor:
    """[T] bool on the host, which tokens have a part."""
    if rows is None:
        return torch.ones(tokens, dtype=torch.bool)
    if rows.device.type != "cpu" or rows.dtype != torch.int64 or rows.ndim != 1:
        raise ValueError(
            f"{where}: rows is {rows.dtype} {list(rows.shape)} on {rows.device}, expected "
            "torch.int64 [N] on the cpu; on another device they would have to be waited for"
        )
    outside = (rows < 0) | (rows >= tokens)
    if outside.any():
        i = int(outside.nonzero()[0])
        raise ValueError(f"{where}: rows[{i}] is {int(rows[i])}, expected one in [0, {tokens})")
    wanted = torch.zeros(tokens, dtype=torch.bool)
    wanted[rows] = True
    return wanted


def _chunks(wanted: Tensor, most: int, device: torch.device) -> tuple[list[Chunk], Tensor]:
    """Chunks of ``most`` (and fewer than a row of the shards more) of the tokens ``wanted``
    [shards, T / shards], and those tokens in chunk order."""
    shards, part = wanted.shape
    count = wanted.sum(0)
    _, lengths = ((count.cumsum(0) - count) // most).unique_consecutive(return_counts=True)
    chunks, order, begin, at = [], [torch.empty(0, dtype=torch.int64)], 0, 0
    for length in lengths.tolist():
        pick = wanted[:, begin : begin + length].flatten().nonzero()[:, 0]
        order.append(pick // length * part + pick % length + begin)
        all_of_them = len(pick) == length * shards
        rows, vectors = slice(begin, begin + length), slice(at, at + len(pick))
        chunks.append(Chunk(rows, vectors, None if all_of_them else _sent(pick, device)))
        begin, at = rows.stop, vectors.stop
    return chunks, _sent(torch.cat(order), device)


def _sent(indices: Tensor, device: torch.device) -> Tensor:
    """On ``device``, without waiting for it."""
    return indices.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else indices
