"""A call of every operator, for whoever tests all of them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyrl_ext import ops
from pyrl_ext.ops._op import Op


def every_op() -> dict[str, Op]:
    """The operators of the package, by name."""
    names = [m.name for m in pkgutil.walk_packages(ops.__path__, "pyrl_ext.ops.") if m.ispkg]
    modules = [
        importlib.import_module(name) for name in (*names, "pyrl_ext.ops.gather_rows.inverse")
    ]
    instances = [value for m in modules for value in vars(m).values() if isinstance(value, Op)]
    return {op.qualname.removeprefix("pyrl_ext::"): op for op in instances}


def real(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)
    )


def logprob_args(dtype: torch.dtype) -> tuple[Any, ...]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = real(5, 20, dtype=dtype)
    targets = torch.tensor([0, 3, 19, 7, 25])
    return logits, targets, 0.5 + real(5, dtype=wide), 0, 17


def grad_args(dtype: torch.dtype, masked: bool) -> tuple[Any, ...]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    vectors = [1 + real(5, dtype=wide) for _ in range(5)]  # max, log_sum, entropy, two gradients
    keep = (real(5, 20) < 0.7,) if masked else ()
    return *logprob_args(dtype), *vectors, *keep


def rows_args(dtype: torch.dtype) -> tuple[Any, ...]:
    logits, targets, scale, _, width = logprob_args(dtype)
    return logits, targets.clamp(max=width - 1), scale, width


def along_args(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Cases of the operators along sequences; the first rows are as wide as the result."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return real(*shape, dtype=dtype).requires_grad_()

    steps = leaf(7, 4, dtype=wide)
    shared = leaf(7, 2, 5), leaf(7, 2, 5)
    heads = [leaf(4, dtype=wide) for _ in range(2)]
    ssd = leaf(7, 4, 3), steps, heads[0], *shared, heads[1], ends
    keys = leaf(7, 4, 5), leaf(7, 4, 5)
    delta = *keys, leaf(7, 4, 3), steps, leaf(7, 4), ends
    conv = leaf(7, 3), leaf(3, 4), leaf(3), ends
    calls = {"causal_conv1d": conv, "ssd_scan": ssd, "gated_delta_rule": delta}
    plain = {
        f"{name}_grad": (real(*args[2 if args is delta else 0].shape, dtype=dtype), *args)
        for name, args in calls.items()
    }
    detached = tree_map(lambda x: x.detach(), plain)
    return {**calls, **detached, "causal_conv1d, no bias": (*conv[:2], None, ends)}


ROWS = torch.tensor([2, -1, 0, 2])
# ROWS inverted
STARTS = torch.tensor([0, 1, 1, 3])
ORDER = torch.tensor([2, 0, 3, -1])
IDS = torch.tensor([[0, 5], [3, 1], [7, 6]])
MAP = torch.zeros(3, 8, dtype=torch.bool).scatter(1, IDS, True)
CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "gather_rows": ("gather_rows", (real(3, 7, grad=True), ROWS, real(7, grad=True))),
    "gather_rows, inverse": (
        "gather_rows",
        (real(3, 7, grad=True), ROWS, real(7, grad=True), STARTS, ORDER),
    ),
    "gather_rows, zeros": ("gather_rows", (real(3, 7, grad=True), ROWS, None)),
    "gather_rows, no rows": ("gather_rows", (real(3, 7), ROWS[:0], real(7))),
    "invert_rows": ("invert_rows", (ROWS, 3)),
    "sum_rows": ("sum_rows", (real(4, 2, grad=True), ROWS, STARTS, ORDER)),
    **{
        f"swiglu, {dtype}, weight {weighted}": (
            "swiglu",
            (
                real(3, 10, dtype=dtype, grad=True),
                real(3, dtype=wide, grad=True) if weighted else None,
            ),
        )
        for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32))
        for weighted in (False, True)
    },
    **{
        f"swiglu_grad, {dtype}": (
            "swiglu_grad",
            (real(3, 5, dtype=dtype), real(3, 10, dtype=dtype), weight),
        )
        for dtype, weight in ((torch.bfloat16, real(3, dtype=torch.float32)), (torch.float32, None))
    },
    **{
        f"squared_relu, {dtype}": (
            "squared_relu",
            (real(3, 5, dtype=dtype, grad=True) - 0.5, real(3, dtype=wide, grad=True)),
        )
        for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32))
    },
    "squared_relu_grad": ("squared_relu_grad", (real(3, 5), real(3, 5) - 0.5, real(3))),
    **{
        f"rms_norm, {dtype}": (
            "rms_norm",
            (real(3, 2, 6, dtype=dtype, grad=True), real(6, dtype=dtype, grad=True), 1e-6),
        )
        for dtype in (torch.float64, torch.bfloat16)
    },
    **{
        f"rms_norm_grad, {dtype}": (
            "rms_norm_grad",
            (
                real(3, 6, dtype=dtype),
                1 + real(3, 6, dtype=dtype),
                real(6, dtype=dtype),
                real(3, dtype=torch.float32),
                residual,
            ),
        )
        for dtype, residual in (
            (torch.float32, None),
            (torch.bfloat16, real(3, 6, dtype=torch.bfloat16)),
        )
    },
    "digests": (
        "digests",
        ([real(3), real(2, 7, dtype=torch.bfloat16), torch.arange(5), real(0, 4)], True),
    ),
    "digests, not finite": ("digests", ([real(3, 2)], False)),
    "gather_fields": (
        "gather_fields",
        (
            [real(3), torch.arange(6).view(3, 2), real(3, dtype=torch.bfloat16)],
            ROWS,
            [0, -1, 1],
            False,
        ),
    ),
    "gather_routes, uint8": (
        "gather_routes",
        (torch.arange(24).view(3, 4, 2).to(torch.uint8), ROWS, torch.tensor([3, 0]), 64),
    ),
    "gather_routes, uint16": (
        "gather_routes",
        ((torch.arange(24).view(3, 4, 2) * 15).to(torch.uint16), ROWS, torch.tensor([1]), 384),
    ),
    **{
        f"expert_rows, {dtype}": ("expert_rows", (MAP, real(3, 8, dtype=dtype, grad=True), 2))
        for dtype in (torch.float64, torch.bfloat16)
    },
    "expert_rows_grad": (
        "expert_rows_grad",
        # the rows of MAP: order of tokens, places of rows
        (
            real(6, grad=True),
            torch.tensor([0, 3, 1, 2, 4, 5]),
            torch.tensor([0, 9, 11, 5, 22, 23]),
            3,
            8,
        ),
    ),
    "expand_runs": ("expand_runs", (torch.tensor([2, -1]), torch.tensor([3, 2]), 7)),
    "expand_runs, no runs": ("expand_runs", (ROWS[:0], ROWS[:0], 3)),
    **{
        f"rotary, {source}": (
            "rotary",
            (
                real(3, 2, 8, grad=True),
                real(3, 1, 6, grad=True),
                real(3, 4),
                True,
                source,
                "halves",
                False,
            ),
        )
        for source in ("halves", "neighbours")
    },
    "latent_keys": ("latent_keys", (real(3, 2, 8, grad=True), real(3, 4, grad=True), 5)),
    "latent_keys_grad": ("latent_keys_grad", (real(3, 2, 9), real(3, 2, 3), 5)),
    **{
        f"replay_probs, {norm}": (
            "replay_probs",
            (real(3, 8, dtype=torch.float32, grad=True), IDS, norm, 1.5, torch.bfloat16),
        )
        for norm in ("none", "sum", "softmax")
    },
    **{
        f"replay_probs_grad, {norm}": (
            "replay_probs_grad",
            (real(3, 8, dtype=torch.float32), real(3, 8, dtype=torch.float32), IDS, norm, 1.5),
        )
        for norm in ("none", "sum", "softmax")
    },
    **{
        f"{name}, {dtype}": (name.removesuffix(", no bias"), args)
        for dtype in (torch.float64, torch.bfloat16)
        for name, args in along_args(dtype).items()
    },
    **{
        f"token_logprob_stats, {dtype}": ("token_logprob_stats", logprob_args(dtype))
        for dtype in (torch.float64, torch.bfloat16)
    },
    **{
        f"token_logprob_rows, {dtype}": ("token_logprob_rows", rows_args(dtype))
        for dtype in (torch.float64, torch.bfloat16)
    },
    "token_logprob_combine": (
        "token_logprob_combine",
        (real(3, 4, 5), torch.tensor([0, 3, 19, 7, 25]), 0.5 + real(5), 26),
    ),
    "token_logprob_grad, to bfloat16": (
        "token_logprob_grad",
        (*grad_args(torch.float32, True), torch.bfloat16),
    ),
    **{
        f"{op}, {dtype}, masked {masked}": (op, grad_args(dtype, masked))
        for op in ("token_logprob_grad", "token_logprob_grad_")
        for dtype in (torch.float64, torch.bfloat16)
        for masked in (False, True)
    },
}


def results(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that the operator returned or, where it writes in place, wrote."""
    out = op(*args)
    return [args[0]] if out is None else [out] if isinstance(out, Tensor) else list(out)
