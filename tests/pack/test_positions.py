"""Positions of rows of text and images against transformers' Qwen3-VL."""

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from pyrl_ext.pack.images import Images
from pyrl_ext.pack.positions import axial_positions
from pyrl_ext.pack.rank_rows import Lengths
from tests.helpers.vision import QWEN_VL

pytestmark = pytest.mark.multiprocess

# of each sample: rows of text, or the grid of an image; text is between any two images
SAMPLES = [
    [3, (1, 4, 6), 2, (1, 2, 2), 5],
    [7],
    [(1, 8, 4), 1, (1, 4, 4), 1],
    [1],
    [4, (1, 2, 8)],
    [2, (3, 4, 2), 3, (2, 2, 4), 1],
]


def test_axial_positions_are_those_of_transformers():
    config = CONFIG_MAPPING["qwen3_vl_moe"].from_dict(QWEN_VL)
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(config).model
    want = []
    seqlens = []
    found = []
    for sample, parts in enumerate(SAMPLES):
        kinds = []
        grids = []
        for part in parts:
            if isinstance(part, int):
                kinds += [0] * part
                continue
            count = part[0] * part[1] * part[2] // 4
            found.append((sample, len(kinds), count, part))
            grids.append(part)
            kinds += [1] * count
        types = torch.tensor(kinds)[None]
        given = torch.tensor(grids) if grids else None
        positions, _ = theirs.get_rope_index(torch.zeros_like(types), types, given)
        want.append(positions[:, 0].numpy())
        seqlens.append(len(kinds))
    images = Images(*(np.array(column, np.int64) for column in zip(*found, strict=True)))
    lengths = Lengths(np.array(seqlens), np.concatenate([[0], np.cumsum(seqlens)]))
    rows = np.arange(sum(seqlens))
    assert (axial_positions(rows, lengths, images) == np.concatenate(want, 1)).all()
    some = np.random.default_rng(0).permutation(rows)[:20]
    assert (axial_positions(some, lengths, images) == np.concatenate(want, 1)[:, some]).all()
    none = Images(*(column[:0] for column in images))
    text = np.concatenate([np.arange(n) for n in seqlens])
    assert (axial_positions(rows, lengths, none) == text).all()
