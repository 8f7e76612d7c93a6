"""The learning rate of each step."""

import pytest

from pyrl_ext.megatron.optimizer import warmed_up


@pytest.mark.parametrize(
    ("warmup_steps", "expected"),
    [
        (0, [0.8, 0.8, 0.8, 0.8, 0.8, 0.8]),
        (1, [0.8, 0.8, 0.8, 0.8, 0.8, 0.8]),
        (2, [0.4, 0.8, 0.8, 0.8, 0.8, 0.8]),
        (4, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
    ],
)
def test_warmed_up_rises_from_a_part_of_lr_to_all_of_it(warmup_steps, expected):
    lrs = [warmed_up(0.8, warmup_steps, step) for step in range(6)]
    assert lrs == pytest.approx(expected, rel=1e-12)
