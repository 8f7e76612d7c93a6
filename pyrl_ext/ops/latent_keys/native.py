from typing import Any

from torch import Tensor

from pyrl_ext.ops._native import C, dtype_of, launch, refuses
from pyrl_ext.ops.rotary.native import heads_of

from . import new_grads, new_outputs

refuse = refuses("latent_keys")


def latent_keys(both: Tensor, shared: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    both = heads_of(both)
    shared = heads_of(shared)
    key, value = new_outputs(both, shared, plain)
    args = arguments(key, value, both, shared, back=False)
    launch("latent_keys", both.device, args=args)
    return key, value


def latent_keys_grad(key: Tensor, value: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    key = heads_of(key)
    value = heads_of(value)
    both, shared = new_grads(key, value, plain)
    args = arguments(key, value, both, shared, back=True)
    launch("latent_keys", key.device, args=args)
    return both, shared


def arguments(key: Tensor, value: Tensor, both: Tensor, shared: Tensor, back: bool) -> Any:
    """``C.LatentKeysArgs``; what is written, the first two or with ``back`` the others, is
    contiguous."""
    return C.LatentKeysArgs(
        dtype=dtype_of(key),
        rows=key.shape[0],
        heads=key.shape[1],
        plain=key.shape[2] - shared.shape[1],
        common=shared.shape[1],
        rest=value.shape[2],
        key=key.data_ptr(),
        key_row=key.stride(0),
        key_head=key.stride(1),
        value=value.data_ptr(),
        value_row=value.stride(0),
        value_head=value.stride(1),
        both=both.data_ptr(),
        both_row=both.stride(0),
        both_head=both.stride(1),
        shared=shared.data_ptr(),
        shared_row=shared.stride(0),
        back=back,
    )
