from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._triton import refuses
from pyrl_ext.ops.rotary.native import heads_of

refuse = refuses("the first argument")


def latent_keys(both: Tensor, shared: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    both = heads_of(both)
    shared = heads_of(shared)
    key = both.new_empty(*both.shape[:2], plain + shared.shape[1])
    value = both.new_empty(*both.shape[:2], both.shape[2] - plain)
    _launch(key, value, both, shared, back=False)
    return key, value


def latent_keys_grad(key: Tensor, value: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    key = heads_of(key)
    value = heads_of(value)
    both = key.new_empty(*key.shape[:2], plain + value.shape[2])
    shared = key.new_empty(len(key), key.shape[2] - plain)
    _launch(key, value, both, shared, back=True)
    return both, shared


def _launch(key: Tensor, value: Tensor, both: Tensor, shared: Tensor, back: bool) -> None:
    import triton.language as tl  # triton takes a while to import

    from .triton_kernel import latent_keys_kernel, tiles

    if not len(key):
        return
    common = shared.shape[1]
    sizes = key.shape[1], key.shape[2] - common, common, value.shape[2]
    kernel: Any = latent_keys_kernel
    kernel[(len(key),)](
        key,
        *key.stride()[:2],
        value,
        *value.stride()[:2],
        both,
        *both.stride()[:2],
        shared,
        shared.stride(0),
        *sizes,
        BACK=back,
        ACC=tl.float64 if key.dtype == torch.float64 else tl.float32,
        **tiles(*sizes),
    )
