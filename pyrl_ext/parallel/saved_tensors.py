"""Read elements of a checkpoint's tensors, in torch's distributed format, without the rest."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view  # pyright: ignore[reportPrivateUsage]

MOST = 1 << 26  # [bytes] of a tensor read at a time


class Block(NamedTuple):
    """A part of a parameter, and its place in a saved tensor.

    Args:
        key:    names the saved tensor.
        offset: of the part's first element in it, by dimension; there may be further dimensions, of
            size 1, before the parameter's.
        view:   of a tensor on the meta device in the parameter's shape, contiguous. The part may be
            a half of each row, as gates and ups of stacked experts are.
    """

    key: str
    offset: Sequence[int]
    view: Tensor


class Header(NamedTuple):
    """The place of the elements of a saved part of a tensor."""

    place: int  # [bytes] of the first element, from the beginning of the part's archive
    strides: tuple[int, ...]
    dtype: torch.dtype


class SavedTensors:
    """The tensors of a checkpoint.

    torch's own reader takes all that one rank saved of a tensor into memory, to copy a part of it.

    Args:
        folder: of the checkpoint, with torch's ``.metadata``.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._tensors: Any = FileSystemReader(folder).read_metadata()
        self._heads: dict[Any, Header] = {}

    def read_shard(
        self, shard: Tensor, first: int, shape: torch.Size, blocks: Sequence[Block]
    ) -> None:
        """Read a contiguous run of a parameter's elements.

        Elements that no saved tensor has become 0, as rows of padding do.

        Args:
            shard:  [n] to read into, contiguous, on any device.
            first:  its first element's place in the flat parameter.
            shape:  of the parameter.
            blocks: parts of the parameter that together cover it.

        Raises: ValueError naming a tensor that is not in the checkpoint, or a file that is too
            short.
        """
        width = shape[1:].numel()
        begin = first // width
        end = -(-(first + len(shard)) // width)
        step = max(1, MOST // (width * shard.itemsize))
        for low in range(begin, end, step):
            high = min(low + step, end)
            start = max(low * width, first)
            stop = min(high * width, first + len(shard))
            part = shard[start - first : stop - first]
            whole = len(part) == (high - low) * width
            rows = part.view(-1, *shape[1:]) if whole else part.new_empty(high - low, *shape[1:])
            rows.zero_()
            for block in blocks:
                self._read_rows(rows, low, len(shape), block)
            if not whole:
                part.copy_(rows.view(-1)[start - low * width :][: len(part)])

    def _read_rows(self, rows: Tensor, low: int, dims: int, block: Block) -> None:
        """Read what a block has of the parameter's rows from ``low`` on."""
        view = block.view
        width = rows[0].numel()
        axis = len(block.offset) - dims  # where the saved tensor has the parameter's rows
        top, inner = divmod(int(view.storage_offset()), width)
        begin = max(top, low)
        end = min(top + len(view), low + len(rows))
        if begin >= end:
            return
        into = rows.as_strided(
            (*(1,) * axis, end - begin, *view.shape[1:]),
            (*(0,) * axis, width, *view.stride()[1:]),
            rows.storage_offset() + (begin - low) * width + inner,
        )
        offset = list(block.offset)
        offset[axis] += begin - top
        if (saved := self._tensors.state_dict_metadata.get(block.key)) is None:
            raise ValueError(f"{self.folder}: no tensor {block.key}, expected it in the checkpoint")
        box = ChunkStorageMetadata(torch.Size(offset), into.shape)
        for item in create_read_items_for_chunk_list(block.key, saved, [box]):
            self._copy(into, item)

    def _copy(self, into: Tensor, item: Any) -> None:
        """Read the span of the file that holds ``item``, and copy what is wanted of it."""
        info = self._tensors.storage_data[item.storage_index]
        path = self.folder / info.relative_path
        with path.open("rb", buffering=0) as file:
            if item.storage_index not in self._heads:
                archive: Any = _create_file_view(file, info.offset, info.length)
                saved = torch.load(archive, map_location="meta", weights_only=True)
                self._heads[item.storage_index] = _head(saved)
            head = self._heads[item.storage_index]
            first = sum(map(mul, item.storage_offsets, head.strides))
            last = sum((n - 1) * s for n, s in zip(item.lengths, head.strides, strict=True))
            span = torch.empty(last + 1, dtype=head.dtype)
            file.seek(info.offset + head.place + first * span.itemsize)
            if (read := file.readinto(span.view(torch.uint8).numpy())) != span.nbytes:  # type: ignore
                raise ValueError(f"{path}: ends {span.nbytes - read} bytes early at {item}")
        found = span.as_strided(item.lengths, head.strides)
        _narrow(into, item.dest_offsets, item.lengths).copy_(found)


def _head(tensor: Tensor) -> Header:
    storage: Any = tensor.untyped_storage()
    place = storage._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
    return Header(place, tensor.stride(), tensor.dtype)


def _narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
