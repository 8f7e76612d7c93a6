"""Wall time by phase."""

import pytest

from pyrl_ext.parallel.timers import Clock


def test_clock_adds_up_phases_and_starts_again():
    clock = Clock()
    for _ in range(3):
        with clock("time/rollout"):
            pass
    once = clock.seconds["time/rollout"]
    with clock("time/rollout"), clock("time/eval"):
        pass
    with pytest.raises(KeyError), clock("time/update"):
        raise KeyError
    seconds = clock.take()
    assert seconds.keys() == {"time/rollout", "time/eval", "time/update"}
    assert seconds["time/rollout"] > once > 0
    assert clock.take() == {}


def test_clock_waits_for_the_device_only_if_asked():
    waits = []
    clock = Clock(sync=lambda: waits.append(len(waits)))
    with clock("time/update"):
        assert len(waits) == 1
    assert len(waits) == 2


def test_clock_names_the_phase_and_an_error_leaves_it_named():
    phases = []
    clock = Clock(on_phase=phases.append)
    with clock("time/step"), clock("time/rollout"):
        pass
    assert phases == ["time/step", "time/rollout", "time/step", None]
    with pytest.raises(KeyError), clock("time/step"), clock("time/update"):
        raise KeyError
    assert phases[4:] == ["time/step", "time/update"]
