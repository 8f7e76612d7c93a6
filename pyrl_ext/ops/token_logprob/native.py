from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, dtype_of, refuse_device, threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _refuse(function: str, logits: Tensor) -> str | None:
    if logits.dtype not in DTYPES:
        return f"logits is {logits.dtype}, expected one of {list(DTYPES)}"
    return refuse_device(logits, function)


def refuse_stats(logits: Tensor, *rest: Any) -> str | None:
    return _refuse("token_logprob_stats", logits)


def refuse_grad(logits: Tensor, *rest: Any) -> str | None:
    return _refuse("token_logprob_grad", logits)


class Shard:
    """Contiguous tensors whose addresses ``C.LogitsShard`` holds; keeps them alive."""

    def __init__(self, logits: Tensor, targets: Tensor, scale: Tensor, keep: Tensor | None):
        self.logits, self.targets = logits.contiguous(), targets.contiguous()
        self.scale, self.keep = scale.contiguous(), None if keep is None else keep.contiguous()

    def columns(self, first: int, width: int) -> Any:
        tokens, columns = self.logits.shape
        return C.LogitsShard(
            logits=self.logits.data_ptr(),
            dtype=dtype_of(self.logits),
            tokens=tokens,
            columns=columns,
            width=width,
            targets=self.targets.data_ptr(),
            first=first,
            scale=self.scale.data_ptr(),
            keep=0 if self.keep is None else self.keep.data_ptr(),
        )


def row_grad(rows: list[Tensor]) -> Any:
    """``C.RowGrad`` of max, log_sum, entropy, grad_logprob, grad_entropy, all contiguous."""
    names = ("max", "log_sum", "entropy", "grad_logprob", "grad_entropy")
    return C.RowGrad(**{name: row.data_ptr() for name, row in zip(names, rows)})


def stats(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    keep_mask: Tensor | None = None,
    isa: str = "auto",
) -> Tensor:
    """``isa``: instruction set on a CPU."""
    shard = Shard(logits, targets, scale, keep_mask)
    out = scale.new_empty(4, logits.shape[0])
    call = dict(shard=shard.columns(first, width), stats=out.data_ptr())
    if not logits.is_cuda:
        C.token_logprob_stats_cpu(**call, isa=isa, threads=threads())
        return out
    size = C.token_logprob_scratch(tokens=logits.shape[0], width=width)
    scratch = scale.new_empty(size)
    with torch.cuda.device(logits.device):
        stream = torch.cuda.current_stream().cuda_stream
        C.token_logprob_stats_cuda(**call, scratch=scratch.data_ptr(), stream=stream)
    return out


def grad(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    max: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    keep_mask: Tensor | None = None,
    out: Tensor | None = None,
    isa: str = "auto",
) -> Tensor:
    shard = Shard(logits, targets, scale, keep_mask)
    if out is None:
        out = torch.empty_like(shard.logits)
    rows = [r.contiguous() for r in (max, log_sum, entropy, grad_logprob, grad_entropy)]
    call = dict(shard=shard.columns(first, width), row=row_grad(rows), out=out.data_ptr())
    if logits.is_cuda:
        with torch.cuda.device(logits.device):
            stream = torch.cuda.current_stream().cuda_stream
            C.token_logprob_grad_cuda(**call, stream=stream)
    else:
        C.token_logprob_grad_cpu(**call, isa=isa, threads=threads())
    return out
