from typing import Any

from torch import Tensor

from pyrl_ext.ops._native import C, dtype_of, launch, refuses

from . import new_outputs

refuse = refuses("rotary")


def rotary(
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    last: bool,
    source: str,
    result: str,
    back: bool,
    isa: str = "auto",
) -> tuple[Tensor, Tensor]:
    inputs = heads_of(query), heads_of(key)
    turns = turns.contiguous()
    outputs = new_outputs(*inputs)
    args = arguments(inputs, turns, last, source, result, back, outputs)
    launch("rotary", query.device, isa, args=args)
    return outputs


def heads_of(x: Tensor) -> Tensor:
    """[T, heads, D] whose elements of a head are neighbours; rows and heads lie where they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def arguments(
    inputs: tuple[Tensor, ...],
    turns: Tensor,
    last: bool,
    source: str,
    result: str,
    back: bool,
    outputs: tuple[Tensor, ...],
) -> Any:
    """``C.RotaryArgs`` of `heads_of` inputs and contiguous outputs."""
    query, key = (
        C.RotaryPart(
            src=x.data_ptr(),
            row=x.stride(0),
            head=x.stride(1),
            heads=x.shape[1],
            width=x.shape[2],
            out=out.data_ptr(),
        )
        for x, out in zip(inputs, outputs, strict=True)
    )
    return C.RotaryArgs(
        query=query,
        key=key,
        dtype=dtype_of(inputs[0]),
        turns=turns.data_ptr(),
        rows=turns.shape[0],
        turned=turns.shape[1],
        last=last,
        src_neighbours=source == "neighbours",
        out_neighbours=result == "neighbours",
        back=back,
    )
