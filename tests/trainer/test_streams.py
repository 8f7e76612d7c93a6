"""The stream on which the trainer works; its passes are in test_step.py."""

from __future__ import annotations

import pytest
import torch

from pyrl_ext.trainer.policy import need_stream, stream_of

pytestmark = pytest.mark.multiprocess


def test_stream_of_a_cpu_is_always_the_same():
    assert stream_of(torch.device("cpu")) == 0


def test_need_stream_names_both_streams_and_the_call():
    need_stream("Policy.scores", 0x20, 0x20)
    message = r"Policy\.scores: CUDA stream 0x30 is current, expected 0x20, on which the model"
    with pytest.raises(RuntimeError, match=message):
        need_stream("Policy.scores", 0x20, 0x30)
