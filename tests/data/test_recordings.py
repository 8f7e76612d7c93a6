"""Recorded samples as records that fine-tuning reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyrl_ext.data.files import Broken, DataError
from pyrl_ext.data.recordings import RecordedSamples, save_samples
from pyrl_ext.data.sft import SftEncoder, SftSource
from pyrl_ext.samples import Image
from tests.helpers.engines import random_sample


def test_recorded_samples_are_records_in_the_order_of_the_files(tmp_path: Path):
    samples = [random_sample(group, place, 4 + group) for group in range(3) for place in range(2)]
    save_samples(tmp_path / "step-000010.safetensors", samples[4:])
    save_samples(tmp_path / "step-000009-rank-0.safetensors", samples[:3])
    save_samples(tmp_path / "step-000009-rank-1.safetensors", samples[3:4])
    save_samples(tmp_path / "eval/held-out/step-000000.safetensors", samples)  # not of a step
    records = RecordedSamples(tmp_path)
    assert len(records) == len(samples)
    encode = SftEncoder(None, 1 + max(int(each.tokens.max()) for each in samples), 64)
    for number, sample in enumerate(samples):
        found = encode(records.read(number))
        assert torch.equal(found.tokens.int(), sample.tokens.int())
        assert torch.equal(found.loss_mask, sample.loss_mask)
    assert records.where(4) == f"{tmp_path}/step-000010.safetensors: sample 0"
    source = SftSource(records, encode, held_out=2)
    held_out = [each.tokens.tolist() for each in source.held_out()]
    assert held_out == [each.tokens.tolist() for each in samples[4:]]


def test_recorded_samples_with_images_are_refused(tmp_path: Path):
    sample = random_sample(0, 0, 8)
    image = Image(0, 1, (1, 2, 2), torch.zeros(4, 3, dtype=torch.uint8))
    save_samples(tmp_path / "step-000000.safetensors", [replace(sample, images=(image,))])
    with pytest.raises(Broken, match="a recording with images, expected one of texts"):
        RecordedSamples(tmp_path).read(0)


def test_recorded_samples_need_whole_files(tmp_path: Path):
    with pytest.raises(DataError, match=r"no .*safetensors in it, expected the folder of rollout"):
        RecordedSamples(tmp_path)
    file = tmp_path / "step-000000.safetensors"
    save_samples(file, [random_sample(0, 0, 8)])
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match="expected a whole file of save_samples"):
        RecordedSamples(tmp_path)
