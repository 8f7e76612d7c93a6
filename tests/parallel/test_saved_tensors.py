"""Elements of a checkpoint's tensors, against the tensors themselves."""

import re
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from pyrl_ext.parallel import saved_tensors
from pyrl_ext.parallel.saved_tensors import Block, SavedTensors

SHAPES = [(7,), (5, 3), (4, 6, 5), (1, 8, 2)]


def saved(folder: Path, tensors: dict[str, Tensor]) -> SavedTensors:
    """The tensors in a checkpoint, each in one piece."""
    save(tensors, checkpoint_id=folder, no_dist=True)
    return SavedTensors(folder)


def bytes_read() -> int:
    """By this process, since it started."""
    return int(Path("/proc/self/io").read_text().split()[1])


def runs(numel: int, random: Random) -> list[tuple[int, int]]:
    """(first, end) of runs of elements: the whole, single ones, and others."""
    ends = [tuple(sorted(random.sample(range(numel + 1), 2))) for _ in range(30)]
    return [(0, numel), (numel - 1, numel), *ends]  # type: ignore[list-item]


@pytest.mark.parametrize("most", [1, 64, 1 << 26])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_read_shard_reads_any_run_of_a_part_of_a_tensor(tmp_path, shape, most):
    """The parameter lies two rows, and one column, into a saved tensor with an axis more."""
    whole = torch.randn(3, *(n + 2 for n in shape))
    place = (1, 2, *(1,) * (len(shape) - 1))
    expected = whole[tuple(slice(p, p + n) for p, n in zip(place, (1, *shape), strict=True))]
    source = saved(tmp_path, {"x": whole})
    view = torch.empty(shape, device="meta")
    with patch.object(saved_tensors, "MOST", most):
        for first, end in runs(expected.numel(), Random(1)):
            shard = torch.full((end - first,), torch.nan)
            source.read_shard(shard, first, view.shape, [Block("x", place, view)])
            assert torch.equal(shard, expected.reshape(-1)[first:end])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("most", [1, 1 << 26])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_read_shard_puts_parts_of_a_parameter_together(tmp_path, dim, most):
    """Gates and ups of one matrix, and of stacked experts; what no tensor has is 0."""
    gates = torch.randn(4, 3, 5)
    ups = torch.randn(4, 3, 5)
    source = saved(tmp_path, {"gates": gates, "ups": ups[:, :, :4].contiguous()})
    ups[:, :, 4] = 0
    expected = torch.cat([gates, ups], dim)
    parts = torch.empty(expected.shape, device="meta").chunk(2, dim)
    blocks = [Block(key, (0, 0, 0), x) for key, x in zip(("gates", "ups"), parts, strict=True)]
    with patch.object(saved_tensors, "MOST", most):
        for first, end in runs(expected.numel(), Random(2)):
            shard = torch.full((end - first,), torch.nan)
            source.read_shard(shard, first, expected.shape, blocks)
            assert torch.equal(shard, expected.view(-1)[first:end])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_read_shard_reads_the_elements_alone(tmp_path):
    """A thousandth of a tensor costs a thousandth of its bytes, and the head of its archive."""
    whole = torch.randn(4000, 256)
    source = saved(tmp_path, {"x": whole, "y": whole})
    view = torch.empty_like(whole, device="meta")
    shard = torch.empty(1024)
    source.read_shard(shard, 0, view.shape, [Block("y", (0, 0), view)])  # torch imports modules
    before = bytes_read()
    source.read_shard(shard, 2048, view.shape, [Block("x", (0, 0), view)])
    assert torch.equal(shard, whole.view(-1)[2048:3072])
    assert bytes_read() - before < shard.nbytes + 20_000 < whole.nbytes / 100


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_read_shard_says_what_is_missing(tmp_path):
    source = saved(tmp_path, {"x": torch.randn(100, 50)})
    view = torch.empty(100, 50, device="meta")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: no tensor y, expected it in")):
        source.read_shard(torch.empty(4), 0, view.shape, [Block("y", (0, 0), view)])
    (file,) = tmp_path.glob("*.distcp")
    size = file.stat().st_size
    source.read_shard(shard := torch.empty(50), 0, view.shape, [Block("x", (0, 0), view)])
    with file.open("rb+") as opened:  # the head is known by now
        opened.truncate(size // 2)
    with pytest.raises(ValueError, match=r"distcp: ends \d+ bytes early"):
        source.read_shard(shard, 4900, view.shape, [Block("x", (0, 0), view)])
