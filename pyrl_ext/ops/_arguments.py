"""Checks of an operator's tensors: shapes with named dimensions, dtypes, and a common device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrl_ext.ops.tensors import accum_dtype

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDE_RANGE = (torch.float32, torch.bfloat16, torch.float64)  # squares fit
INT64 = (torch.int64,)
ANY = ()


class Like(NamedTuple):
    """The dtype of the argument ``name``; ``wide``: that of its sums (`accum_dtype`)."""

    name: str
    wide: bool = False

    def dtype(self, other: Tensor) -> torch.dtype:
        """What ``other``, the argument of that name, makes it."""
        return accum_dtype(other.dtype) if self.wide else other.dtype


class Arguments:
    """The tensors of one operator, in the order in which they are checked.

    Args:
        where: the operator, for messages.
        dtype_error: raised where dtypes do not fit.
        declared: the dimensions and the dtypes of each. Dimensions of one name have one size,
            ``2 W`` is twice ``W``, ``4`` is 4, and ``...`` any number of dimensions.
    """

    def __init__(
        self,
        where: str,
        dtype_error: type[Exception] = TypeError,
        /,
        **declared: tuple[str, tuple[torch.dtype, ...] | Like],
    ):
        self.where = where
        self.dtype_error = dtype_error
        places = {name: place for place, name in enumerate(declared)}
        self.declared = [
            (text, _parsed(text), dtypes, places[dtypes.name] if isinstance(dtypes, Like) else 0)
            for text, dtypes in declared.values()
        ]
        self.names = list(declared)

    def check(self, *tensors: Any) -> None:
        """Raises: ValueError, ``dtype_error``; TypeError for another thing than a tensor. An
        optional argument that is None always fits."""
        sizes = {"": 1}
        seen: dict[str, Any] = {}  # shapes by how they are declared, for those declared alike
        device = None
        for tensor, (text, dimensions, dtypes, like) in zip(tensors, self.declared, strict=True):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                for name, each in zip(self.names, tensors):
                    need_tensor(self.where, name, each)
            shape = tensor.shape
            if text in seen:
                fits = shape == seen[text]
            else:
                fits = _fits(shape, dimensions, sizes)
                seen[text] = shape
            if device is None:
                device = tensor.device
            if not fits or not _has(tensor.dtype, dtypes, tensors[like]) or tensor.device != device:
                raise self._error(tensors)

    def _error(self, tensors: tuple[Any, ...]) -> Exception:
        """The error for the first wrong property: a shape, then a dtype, then a device."""
        given = {n: each for n, each in zip(self.names, tensors) if each is not None}
        declared = {n: each for n, each in zip(self.names, self.declared) if n in given}
        sizes = {"": 1}
        if not all(_fits(each.shape, declared[n][1], sizes) for n, each in given.items()):
            wanted = {n: f"[{text}]" for n, (text, *_) in declared.items()}
            named = (f"{n} {dims}" for n, dims in wanted.items())
            expected = ", ".join(named if len(given) > 3 else wanted.values())
            return ValueError(f"{self.where}: {shapes(**given)}, expected {expected}")
        for name, (_, _, dtypes, like) in declared.items():
            dtype = given[name].dtype
            if not _has(dtype, dtypes, tensors[like]):
                if isinstance(dtypes, Like):
                    other = tensors[like]
                    expected = f"{dtypes.dtype(other)} for {dtypes.name} of {other.dtype}"
                else:
                    expected = f"one of {list(dtypes)}" if dtypes[1:] else f"{dtypes[0]}"
                return self.dtype_error(f"{self.where}: {name} is {dtype}, expected {expected}")
        found = ", ".join(f"{n} on {each.device}" for n, each in given.items())
        return ValueError(
            f"{self.where}: {found.replace(' on ', ' is on ', 1)}, expected one device"
        )


def need_tensor(where: str, name: str, value: object) -> None:
    """Raise TypeError if the argument ``name`` of the operator ``where`` is no tensor, nor None."""
    if value is not None and not isinstance(value, Tensor):
        raise TypeError(f"{where}: {name} is {value!r:.60}, expected a tensor")


def shapes(**tensors: Tensor) -> str:
    """``x [3, 4], weight [4]``, for messages."""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())


def _has(dtype: torch.dtype, dtypes: tuple[torch.dtype, ...] | Like, like: Tensor) -> bool:
    """True if a dtype is one of ``dtypes``, or that of the argument ``like``."""
    if isinstance(dtypes, Like):
        return dtype == dtypes.dtype(like)
    return not dtypes or dtype in dtypes


class Dimensions(NamedTuple):
    """Factors and names of dimensions, and the place of ``...`` among them; None: not there."""

    named: list[tuple[int, str]]
    rest: int | None


def _parsed(text: str) -> Dimensions:
    """A number is a factor without a name."""
    named = []
    rest = None
    for dimension in text.split(", "):
        factor, _, name = dimension.partition(" ")
        if dimension == "...":
            rest = len(named)
        elif factor.isdigit():
            named.append((int(factor), name))
        else:
            named.append((1, dimension))
    return Dimensions(named, rest)


def _fits(shape: tuple[int, ...], dimensions: Dimensions, sizes: dict[str, Any]) -> bool:
    """True if a shape has the dimensions; sizes of names that are new are put in ``sizes``."""
    named, rest = dimensions
    if rest is not None:
        shape = tuple(shape)  # slices of torch.Size take longer
        end = len(shape) - len(named) + rest
        others = shape[rest:end]
        if end < rest or sizes.setdefault("...", others) != others:
            return False
        shape = shape[:rest] + shape[end:]
    if len(shape) != len(named):
        return False
    for size, (factor, name) in zip(shape, named):
        if factor > 1:
            if size % factor:
                return False
            size //= factor
        if sizes.setdefault(name, size) != size:
            return False
    return True
