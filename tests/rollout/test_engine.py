"""Refusals that all engines share."""

import pytest
import torch

from pyrl_ext.rollout.engine import agreed_digests, need_processor
from pyrl_ext.samples import Image, Prompt

pytestmark = pytest.mark.multiprocess


def test_need_processor_refuses_images_that_nothing_scales():
    image = Image(0, 1, (1, 2, 2), torch.zeros(4, 12, dtype=torch.uint8))
    text = Prompt(3, (1, 2), "", "")
    seen = Prompt(4, (1, 2), "", "", images=(image,))
    need_processor("HFEngine.answer", [text], None)
    need_processor("HFEngine.answer", [text, seen], object())
    with pytest.raises(ValueError, match=r"HFEngine.answer\(prompt 4\): 1 images, expected none"):
        need_processor("HFEngine.answer", [text, seen], None)


def test_agreed_digests_match_nothing_where_parts_differ():
    parts = [{"a": 5, "b": 7, "c": 1}, {"a": 5, "b": 8}, {"b": 7, "d": 2}]
    assert agreed_digests(parts) == {"a": 5, "b": 0, "c": 1, "d": 2}
    assert agreed_digests([]) == {}
