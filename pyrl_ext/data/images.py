"""Images of records: opened within bounds, cut into patches by the model's own processor.

A file is looked at before training: its kind, its size and so the rows it takes, and whether its
end is there. It is decoded when a step needs it. Patches stay in the processor's 8 bits: the
encoder scales them.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image as PIL
from torch import Tensor

from pyrl_ext.data.files import Broken, DataError, cut
from pyrl_ext.ops.tensors import to_device
from pyrl_ext.samples import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MAX_BYTES = 64 * 2**20  # of a file
MAX_PIXELS = 2**26  # 64 megapixels: 192 MiB once decoded, however small the file
ENDS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9", "GIF": b";"}  # of a whole file
SIZES = {"WEBP": (4, 8), "BMP": (2, 0)}  # of a whole file: place in the header, bytes not counted


@dataclass(frozen=True, slots=True)
class UndecodedImage:
    """An image of a prompt that is not decoded yet.

    Args:
        reader: decodes it.
        source: file, or the bytes of one.
        row:    its first placeholder token.
        rows:   number of them: the rows that it takes in the language model.
        record: the place of its record, for messages.
    """

    reader: ImageReader
    source: Path | bytes
    row: int
    rows: int
    record: str = ""

    def load(self) -> Image:
        """Decode it and cut it into patches.

        Raises: DataError when it cannot be, or has become another since it was looked at.
        """
        try:
            grid, patches = self.reader.patches(self.source)
            if (rows := self.reader.rows(len(patches))) != self.rows:
                raise Broken(f"{rows} rows now", f"{self.rows}, as when the run began")
        except Broken as broken:
            name = self.source if isinstance(self.source, Path) else "of bytes"
            where = f"{self.record}: " if self.record else ""
            raise DataError(f"{where}image {name}: {broken}") from None
        return Image(self.row, self.rows, grid, patches)


@dataclass(frozen=True)
class Scale:
    """value = patch * factor + offset, for each of a patch's numbers.

    Args:
        factor, offset: [width] float32.
    """

    factor: Tensor
    offset: Tensor

    def __call__(self, patches: Tensor) -> Tensor:
        """[P, width] float32 of patches in 8 bits."""
        offset, factor = (to_device(x, patches.device) for x in (self.offset, self.factor))
        return torch.addcmul(offset, patches.float(), factor)


class ImageReader:
    """The image processor of a model, and the bounds within which images are read.

    Args:
        processor_folder: holds the processor's ``preprocessor_config.json``.
        image_folder: relative paths of images start there.
        token: id of the placeholder, which the chat template writes once for each image.

    Raises:
        DataError: the folder has no processor that runs here.
    """

    def __init__(self, processor_folder: str | Path, image_folder: str | Path, token: int):
        self.image_folder = Path(image_folder)
        self.token = token
        self._processor = _load(processor_folder)
        self.patches = lru_cache(8)(self._patches)  # prompts are often asked again

    @property
    def scale(self) -> Scale:
        """The factor and offset that the processor applies to a patch after cutting it."""
        processor = self._processor
        repeats = processor.patch_size**2 * getattr(processor, "temporal_patch_size", 1)
        mean = torch.tensor(processor.image_mean, dtype=torch.float64).repeat_interleave(repeats)
        std = torch.tensor(processor.image_std, dtype=torch.float64).repeat_interleave(repeats)
        return Scale((processor.rescale_factor / std).float(), (-mean / std).float())

    def placed(self, image_part: Any, row: int) -> UndecodedImage:
        """An image whose first token is ``row``, as `images_of` finds it. Raises: Broken."""
        source = self._source(image_part)
        with _opened(source) as image:
            width, height = image.size
            if not _has_its_end(source, image.format or ""):
                _decoded(image)  # it may be whole all the same
        try:
            patches = self._processor.get_number_of_image_patches(height, width)
        except ValueError as error:  # sides too unlike
            raise Broken(f"{width} x {height} pixels: {error}", "a size that it takes") from None
        return UndecodedImage(self, source, row, self.rows(patches))

    def rows(self, patches: int) -> int:
        """Rows of the language model that so many patches become."""
        return patches // self._processor.merge_size**2

    def _source(self, image: Any) -> Path | bytes:
        rule = "a path, bytes, or data:image/...;base64,...; nothing is fetched"
        if isinstance(image, dict):  # as datasets write it into Parquet
            image = image.get("bytes") or image.get("path")
        if isinstance(image, bytes):
            return image
        if not isinstance(image, str) or not image or "://" in image:
            raise Broken(cut(image), rule)
        if not image.startswith("data:"):
            return self.image_folder / image
        try:
            return base64.b64decode(image.partition(";base64,")[2], validate=True)
        except binascii.Error as error:
            raise Broken(f"{image[:40]}...: {error}", rule) from None

    def _patches(self, source: Path | bytes) -> tuple[tuple[int, int, int], Tensor]:
        """(patches in time, height and width; [P, width] uint8)."""
        with _opened(source) as file:
            image = _decoded(file)
        found = self._processor(image, do_rescale=False, do_normalize=False, return_tensors="pt")
        (grid,) = found["image_grid_thw"].tolist()
        patches = found["pixel_values"].flatten(1)
        return tuple(grid), patches.to(torch.uint8)


def place(
    reader: ImageReader | None, tokens: list[int], images: Sequence[Any]
) -> tuple[list[int], list[UndecodedImage]]:
    """The tokens with a placeholder for each row of each image, and the images.

    Args:
        reader: None: the model takes no images.
        tokens: with one placeholder for each image, in order.
        images: as `images_of` finds them in messages.

    Raises: Broken.
    """
    if reader is None:
        if images:
            raise Broken(f"{len(images)} images in messages", "text; the model has no image token")
        return tokens, []
    if (count := tokens.count(reader.token)) != len(images):
        raise Broken(
            f"{count} image placeholders (token {reader.token}) for {len(images)} images",
            "one for each; no text may hold the placeholder",
        )
    expanded: list[int] = []
    placed: list[UndecodedImage] = []
    for token in tokens:
        if token != reader.token:
            expanded.append(token)
            continue
        number = len(placed)
        try:
            placed.append(reader.placed(images[number], len(expanded)))
        except Broken as broken:
            raise Broken(f"image {number}: {broken.args[0]}", broken.args[1]) from None
        expanded += [token] * placed[-1].rows
    return expanded, placed


def images_of(messages: Sequence[Any]) -> list[Any]:
    """The images of a conversation, in order: parts {"type": "image", "image": ...}."""
    return [
        part.get("image")
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]


@cache  # prompts, held-out prompts and engine have readers of one processor
def _load(folder: str | Path) -> Any:
    from transformers import AutoImageProcessor

    where = f"image processor {folder}"
    try:
        loaded: Any = AutoImageProcessor.from_pretrained(
            str(folder), local_files_only=True, backend="pil"
        )
    except Exception as error:
        rule = "a preprocessor_config.json whose processor runs here"
        raise DataError(f"{where}: {type(error).__name__}: {error}, expected {rule}") from error
    if not (loaded.do_rescale and loaded.do_normalize):
        raise DataError(f"{where}: does not scale to [0, 1] and normalize, expected both")
    return loaded


def _decoded(file: PIL.Image) -> PIL.Image:
    try:
        return file.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise Broken(f"{error}", "an image that can be decoded") from None


def _has_its_end(source: Path | bytes, kind: str) -> bool:
    """True if the last bytes, or the size in the header, are those of a whole file."""
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        head = file.read(16)
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - 32))
        tail = file.read().rstrip(b"\0")
    if kind in SIZES:
        at, more = SIZES[kind]
        return int.from_bytes(head[at : at + 4], "little") + more <= size
    return tail.endswith(ENDS[kind])


def _opened(source: Path | bytes) -> PIL.Image:
    """An image whose header was read, and no more."""
    if isinstance(source, Path) and not source.is_file():
        raise Broken(f"{source}: no such file", "an image file")
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    if size > MAX_BYTES:
        raise Broken(f"{size:,} bytes", f"at most {MAX_BYTES:,}")
    file = source if isinstance(source, Path) else io.BytesIO(source)
    most = f"at most {MAX_PIXELS:,} pixels"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.DecompressionBombWarning)  # our bound is below
            image = PIL.open(file, formats=FORMATS)
    except PIL.DecompressionBombError as error:
        raise Broken(f"{error}", most) from None
    except OSError as error:
        raise Broken(f"{error}", f"an image ({', '.join(FORMATS)})") from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Broken(f"{width} x {height} pixels", most)
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise Broken(f"{frames} frames", "an image of one")
    return image
