"""Shaping by length against published numbers."""

import numpy as np
import pytest

from pyrl_ext.loss.shaping import overlong


def test_overlong_equals_published_numbers():
    lengths = np.array([1, 16384, 18432, 20480])
    assert overlong(lengths, 20480, 4096, 1.0).tolist() == [0, 0, -0.5, -1]
    assert overlong(lengths, 20480, 0, 1.0).tolist() == [0, 0, 0, 0]
    assert overlong(np.array([9]), 10, 4, 2.0)[0] == pytest.approx(-1.5)
