"""Checks of arguments that every log-prob function over a sharded vocabulary takes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_valid_vocab(where: str, valid_vocab: int | None, columns: int, ranks: int) -> int:
    """The number of valid columns over all ranks; None: all of them.

    Args:
        where: names the function in messages.
        columns: of each rank.

    Raises:
        ValueError: outside ``[1, columns * ranks]``.
    """
    vocab = columns * ranks
    if valid_vocab is None:
        return vocab
    if not 0 < valid_vocab <= vocab:
        raise ValueError(
            f"{where}: valid_vocab is {valid_vocab}, expected one in [1, {vocab}], the columns of "
            f"{ranks} ranks"
        )
    return valid_vocab


def check_targets(
    where: str, targets: Tensor, valid_vocab: int, order: Tensor | None = None
) -> Tensor:
    """[N] int64, ``targets`` [T] in ``order``.

    Args:
        order: [N] int64, the tokens that are computed, in their order; None: all, as given.

    Raises:
        ValueError: one is outside ``[0, valid_vocab)``; see `check_entries`.
    """
    targets = targets if order is None else targets.index_select(0, order)
    if _may_look(targets):
        outside = (targets < 0) | (targets >= valid_vocab)
        check_entries(where, "targets", targets, outside, f"[0, {valid_vocab})", order)
    return targets


def logit_scale(
    where: str,
    temperature: float | Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    order: Tensor | None = None,
) -> Tensor:
    """[N] ``dtype``, ``1 / temperature`` of the tokens in ``order``; NaN where not positive.

    Args:
        temperature: one number, or [T].
        targets: [T].
        order: as in `check_targets`.

    Raises:
        ValueError: the shape does not fit, or an entry is not positive; see `check_entries`.
    """
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < math.inf:
            raise ValueError(f"{where}: temperature is {temperature}, expected a positive number")
        tokens = len(targets) if order is None else len(order)
        return torch.full((tokens,), 1 / temperature, dtype=dtype, device=targets.device)
    if temperature.shape not in ((), targets.shape):
        raise ValueError(
            f"{where}: temperature {list(temperature.shape)}, expected one number or "
            f"{list(targets.shape)}"
        )
    values = temperature.detach().to(dtype).expand(targets.shape)
    values = values if order is None else values.index_select(0, order)
    wrong = ~(values > 0)
    check_entries(where, "temperature", values, wrong, "the positive numbers", order)
    return values.reciprocal().masked_fill(wrong, torch.nan)


def check_entries(
    where: str,
    name: str,
    values: Tensor,
    outside: Tensor,
    rule: str,
    order: Tensor | None = None,
) -> None:
    """Refuse the first entry of ``values`` that is marked in ``outside``, both [N].

    Only on a CPU and outside of compiled graphs: elsewhere it would wait for the device.

    Raises:
        ValueError: naming the entry by its token.
    """
    if not _may_look(values) or not outside.any():
        return
    entry = int(outside.nonzero()[0])
    token = entry if order is None else int(order[entry])
    raise ValueError(f"{where}: {name}[{token}] is {values[entry].item()}, expected one in {rule}")


def _may_look(values: Tensor) -> bool:
    """True if entries of ``values`` are checked."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()
