from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, refuse_device, threads

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum class Float


def _refuse(function: str, logits: Tensor) -> str | None:
    if logits.dtype not in CODES:
        return f"logits is {logits.dtype}, expected one of {list(CODES)}"
    return refuse_device(logits, function)


def refuse_stats(logits: Tensor, *rest: Any) -> str | None:
    return _refuse("token_logprob_stats", logits)


def refuse_grad(logits: Tensor, *rest: Any) -> str | None:
    return _refuse("token_logprob_grad", logits)


def _shard(logits: Tensor, targets: Tensor, scale: Tensor, first: int, width: int) -> Any:
    tokens, columns = logits.shape
    return C.Shard(
        *(logits.data_ptr(), CODES[logits.dtype], tokens, columns, width),
        *(targets.data_ptr(), first, scale.data_ptr(), 0),
    )


def stats(
    logits: Tensor, targets: Tensor, scale: Tensor, first: int, width: int, isa: str = "auto"
) -> Tensor:
    logits, targets, scale = logits.contiguous(), targets.contiguous(), scale.contiguous()
    out = scale.new_empty(4, logits.shape[0])
    shard = _shard(logits, targets, scale, first, width)
    C.token_logprob_stats_cpu(shard, out.data_ptr(), isa, threads())
    return out


def grad(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    *rows: Tensor,
    isa: str = "auto",
) -> Tensor:
    logits, targets, scale = logits.contiguous(), targets.contiguous(), scale.contiguous()
    rows = tuple(row.contiguous() for row in rows)
    out = torch.empty_like(logits)
    shard = _shard(logits, targets, scale, first, width)
    addresses = (row.data_ptr() for row in rows)
    C.token_logprob_grad_cpu(shard, *addresses, out.data_ptr(), isa, threads())
    return out
