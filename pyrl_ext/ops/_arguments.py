"""What the tensors of an operator must be: shapes of named dimensions, dtypes, and one device."""

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


Dtypes = tuple[torch.dtype, ...] | Like


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
        **declared: tuple[str, Dtypes],
    ):
        self.where = where
        self.dtype_error = dtype_error
        self.declared = declared
        self.places = {name: place for place, name in enumerate(declared)}
        self.parsed = [(_parsed(text), dtypes) for text, dtypes in declared.values()]

    def check(self, *tensors: Tensor | None) -> None:
        """Raises: ValueError, ``dtype_error``. An optional argument that is None always fits."""
        sizes = {"": 1}
        device = None
        for tensor, (dimensions, dtypes) in zip(tensors, self.parsed, strict=True):
            if tensor is None:
                continue
            allowed = self._allowed(dtypes, tensors)
            device = device or tensor.device
            if (
                not _fits(tensor.shape, dimensions, sizes)
                or (allowed and tensor.dtype not in allowed)
                or tensor.device != device
            ):
                raise self._error(tensors)

    def _allowed(
        self, dtypes: Dtypes, tensors: tuple[Tensor | None, ...]
    ) -> tuple[torch.dtype, ...]:
        if not isinstance(dtypes, Like):
            return dtypes
        like = tensors[self.places[dtypes.name]]
        assert like is not None  # no optional argument
        return (accum_dtype(like.dtype) if dtypes.wide else like.dtype,)

    def _error(self, tensors: tuple[Tensor | None, ...]) -> Exception:
        """Of the shapes, if they do not fit, then of dtypes, then of devices."""
        given = {n: each for n, each in zip(self.declared, tensors) if each is not None}
        sizes = {"": 1}
        dimensions = {n: dims for n, (dims, _) in zip(self.declared, self.parsed)}
        if not all(_fits(each.shape, dimensions[n], sizes) for n, each in given.items()):
            wanted = {n: f"[{self.declared[n][0]}]" for n in given}
            named = (f"{n} {dims}" for n, dims in wanted.items())
            expected = ", ".join(named if len(given) > 3 else wanted.values())
            return ValueError(f"{self.where}: {shapes(**given)}, expected {expected}")
        for name, tensor in given.items():
            like = self.declared[name][1]
            allowed = self._allowed(like, tensors)
            if allowed and tensor.dtype not in allowed:
                expected = f"one of {list(allowed)}" if allowed[1:] else f"{allowed[0]}"
                if isinstance(like, Like):
                    expected += f" for {like.name} of {given[like.name].dtype}"
                return self.dtype_error(
                    f"{self.where}: {name} is {tensor.dtype}, expected {expected}"
                )
        found = ", ".join(f"{n} on {each.device}" for n, each in given.items())
        return ValueError(
            f"{self.where}: {found.replace(' on ', ' is on ', 1)}, expected one device"
        )


def shapes(**tensors: Tensor) -> str:
    """``x [3, 4], weight [4]``, for messages."""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())


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
        end = len(shape) - len(named) + rest
        others = tuple(shape[rest:end])
        if end < rest or sizes.setdefault("...", others) != others:
            return False
        shape = (*shape[:rest], *shape[end:])
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
