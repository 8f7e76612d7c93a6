"""Log-probs and entropies as others compute them: formulas in torch, megatron-core, packages."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

Pair = tuple[Tensor, Tensor | None]  # log-probs and, where there are any, entropies

PACKAGES = {
    "liger_kernel": "liger_kernel.transformers.functional:liger_cross_entropy",
    "quack": "quack.cross_entropy:cross_entropy",
    "flash_attn": "flash_attn.ops.triton.cross_entropy:cross_entropy_loss",
    "transformer_engine": "transformer_engine.pytorch.cross_entropy:parallel_cross_entropy",
}
FUSED = {
    "liger_kernel": "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy",
    "cut_cross_entropy": "cut_cross_entropy:linear_cross_entropy",
}


def eager(logits: Tensor, targets: Tensor) -> Pair:
    return eager_as_is(logits.float(), targets)


def eager_as_is(logits: Tensor, targets: Tensor) -> Pair:
    """In the type of the logits."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def several_passes(logits: Tensor, targets: Tensor) -> Pair:
    """No table of log-probs: its sum, the target, and the mean logit under the softmax."""
    x = logits.float()
    log_sum = x.logsumexp(-1)
    logprob = x.gather(1, targets[:, None])[:, 0] - log_sum
    return logprob, log_sum - (x.softmax(-1) * x).sum(-1)


@cache
def compiled(backend: str) -> Callable[[Tensor, Tensor], Pair]:
    """Once for every size; of a size that nobody times no code need be generated.

    Inductor's cache does not tell code for one vector width from code for another, and runs either.
    So the width is named, which is part of the cache's key.
    """
    width = {"AVX512": 512, "AVX2": 256}.get(torch.backends.cpu.get_cpu_capability())
    named = backend == "inductor" and width
    options: dict[str, Any] | None = {"cpp.simdlen": width} if named else None
    return torch.compile(eager, dynamic=False, backend=backend, options=options)


def megatron(logits: Tensor, targets: Tensor) -> Pair:
    if logits.dtype == torch.float32:
        logits = logits.clone()  # it writes over float32 logits
    return -vocab_parallel_cross_entropy(logits, targets, tp_group=_alone()), None


@cache
def _alone() -> dist.ProcessGroup:
    """A group of one rank that torch.distributed does not know, so that nobody else sees it."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, 0, 1)  # type: ignore[call-arg]


def packages(table: dict[str, str]) -> dict[str, Callable[..., Tensor]]:
    """Those installed; a line names the others."""
    missing = [name for name in table if find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
    return {n: resolve_name(at) for n, at in table.items() if n not in missing}


def of_package(name: str, function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Pair]:
    """Log-probs by a package; those that can write gradients over the logits may."""

    def run(logits: Tensor, targets: Tensor) -> Pair:
        if name == "transformer_engine":
            return -function(logits[None], targets[None], 0.0, False, None).view(-1), None
        if name == "flash_attn":
            return -function(logits, targets, inplace_backward=True)[0], None
        if name == "quack":
            return -function(logits, targets, reduction="none", inplace_backward=True), None
        return -function(logits, targets, reduction="none"), None

    return run
