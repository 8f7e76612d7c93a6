"""The native backends as they run on a GPU, with the grids of the CUDA kernels walked on the host,
thread by thread.

An extension built with PYRL_TESTS has them: `make build` makes one, wheels do without.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pyrl_ext.ops._native import C
from pyrl_ext.ops.expert_rows import native as expert
from pyrl_ext.ops.gather_fields import native as fields
from pyrl_ext.ops.gather_routes import native as routes_of
from pyrl_ext.ops.gather_rows import native as rows_of
from pyrl_ext.ops.latent_keys import native as keys
from pyrl_ext.ops.replay_probs import native as probs
from pyrl_ext.ops.rotary import native as turned
from pyrl_ext.ops.sum_rows import native as sums
from pyrl_ext.ops.swiglu import native as gated
from pyrl_ext.ops.token_logprob import native as logprob

BRANCHES = (expert, rows_of, logprob)  # of which some lines are for GPUs
LAUNCHES = (*BRANCHES, keys, probs, turned, sums, gated)


def launch(function: str, _device: torch.device, _isa: str | None = None, **call: Any) -> Any:
    """As `_native.launch` for a GPU."""
    if function == "replay_probs":
        call["first"] = 0  # row that is computed
    return getattr(C, f"{function}_emulated")(**call)


def emulated(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, of a native backend, as on a GPU."""

    @wraps(run)
    def walk(*args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            for module in LAUNCHES:
                stack.enter_context(patch.object(module, "launch", launch))
            for module in BRANCHES:
                stack.enter_context(patch.object(module, "on_gpu", lambda _: True))
            return run(*args, **options)

    return walk


gather_rows = emulated(rows_of.gather_rows)
gather_fields = partial(emulated(fields.gather_fields), pin=False)
sum_rows = emulated(sums.sum_rows)
swiglu = emulated(gated.swiglu)
swiglu_grad = emulated(gated.swiglu_grad)
replay_probs = emulated(probs.replay_probs)
replay_probs_grad = emulated(probs.replay_probs_grad)
token_logprob_stats = emulated(logprob.stats)
token_logprob_rows = emulated(logprob.rows)
token_logprob_combine = emulated(logprob.combine)
token_logprob_grad = emulated(logprob.grad)
rotary = emulated(turned.rotary)
latent_keys = emulated(keys.latent_keys)
latent_keys_grad = emulated(keys.latent_keys_grad)
expert_rows = emulated(expert.expert_rows)
expert_rows_grad = emulated(expert.expert_rows_grad)


def gather_routes(
    routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out: Tensor | None = None
) -> Tensor:
    if out is None:
        out = routes.new_empty(len(layers), len(rows), routes.shape[2])
    C.gather_routes_emulated(args=routes_of.arguments(routes, rows, layers, num_experts, out))
    return out
