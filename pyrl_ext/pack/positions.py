"""Positions of rows in time, height and width, where images are among them."""

from __future__ import annotations

import numpy as np

from pyrl_ext.pack.images import Images
from pyrl_ext.pack.rank_rows import Lengths


def axial_positions(rows: np.ndarray, lengths: Lengths, images: Images) -> np.ndarray:
    """[3, M] int64 position of each row in time, height and width.

    A row of text has three equal positions. Those of an image count its frames, and its rows and
    columns of merged patches, all from the position that follows the text before; the text behind
    follows the largest of its rows and columns, however many frames there are.

    Args:
        rows:   [M] rows of the stream.
        images: of the samples, ascending.

    Source: Qwen3-VL's ``get_rope_index``, for images.
    """
    samples = lengths.sample_of(rows)
    offset = rows - lengths.starts[samples]
    if not len(images.samples):
        return np.stack([offset] * 3)
    starts = lengths.starts[images.samples] + images.rows
    merge = np.sqrt(images.patches // images.counts).astype(np.int64)
    height = images.grids[:, 1] // merge
    width = images.grids[:, 2] // merge
    largest = np.maximum(height, width)
    # of the images up to each: rows that they have more than positions
    more = np.concatenate([[0], np.cumsum(images.counts - largest)])
    first = np.searchsorted(images.samples, samples)
    begun = np.searchsorted(starts, rows, side="right")
    image = begun - 1
    inside = (begun > first) & (rows < (starts + images.counts)[image])
    positions = np.stack([offset - more[begun - inside] + more[first]] * 3)
    at = rows[inside] - starts[image[inside]]
    high = height[image[inside]]
    wide = width[image[inside]]
    places = np.stack([at // (high * wide), at // wide % high, at % wide])
    positions[:, inside] += places - at
    return positions
