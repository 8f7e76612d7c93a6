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


class _Shard:
    """``csrc``'s Shard of contiguous tensors, which live as long as it does."""

    def __init__(self, logits: Tensor, targets: Tensor, scale: Tensor, keep: Tensor | None):
        self.logits, self.targets = logits.contiguous(), targets.contiguous()
        self.scale, self.keep = scale.contiguous(), None if keep is None else keep.contiguous()

    def columns(self, first: int, width: int) -> Any:
        keep = 0 if self.keep is None else self.keep.data_ptr()
        return C.Shard(
            *(self.logits.data_ptr(), CODES[self.logits.dtype], *self.logits.shape, width),
            *(self.targets.data_ptr(), first, self.scale.data_ptr(), keep),
        )


def stats(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    keep_mask: Tensor | None = None,
    isa: str = "auto",
) -> Tensor:
    """``isa``: instruction set on a CPU; "emulated" walks the GPU's threads there."""
    held = _Shard(logits, targets, scale, keep_mask)
    shard, out = held.columns(first, width), scale.new_empty(4, logits.shape[0])
    if not logits.is_cuda and isa != "emulated":
        C.token_logprob_stats_cpu(shard, out.data_ptr(), isa, threads())
        return out
    scratch = scale.new_empty(C.token_logprob_scratch(logits.shape[0], width))
    addresses = (shard, out.data_ptr(), scratch.data_ptr())
    if logits.is_cuda:
        with torch.cuda.device(logits.device):
            C.token_logprob_stats_cuda(*addresses, torch.cuda.current_stream().cuda_stream)
    else:
        C.token_logprob_stats_emulated(*addresses)
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
    held = _Shard(logits, targets, scale, keep_mask)
    if out is None:
        out = torch.empty_like(held.logits)
    rows = [r.contiguous() for r in (max, log_sum, entropy, grad_logprob, grad_entropy)]
    row = C.RowGrad(*(r.data_ptr() for r in rows))
    addresses = (held.columns(first, width), row, out.data_ptr())
    if logits.is_cuda:
        with torch.cuda.device(logits.device):
            C.token_logprob_grad_cuda(*addresses, torch.cuda.current_stream().cuda_stream)
    elif isa == "emulated":
        C.token_logprob_grad_emulated(*addresses)
    else:
        C.token_logprob_grad_cpu(*addresses, isa, threads())
    return out
