"""Steps that engines generate ahead, step by step."""

from pyrl_ext.schedule.look_ahead import SPARE, LookAhead

AHEAD = 3
# steps, from the one that is trained, whose groups are all there
WAITS = 0
JUST = 1
SPARES = 2


def begins(steps: list[int]) -> list[int]:
    """Number of steps begin in each step."""
    look = LookAhead()
    begun = 0
    found = list[int]()
    for step, there in enumerate(steps):
        end = look.end(step, begun, AHEAD, lambda other, last=step + there: other < last)
        found.append(end - begun)
        begun = end
    return found


def test_end_is_one_step_less_after_spare_steps_in_a_row():
    full = [AHEAD + 1]
    assert begins([WAITS] + [SPARES] * SPARE) == [*full, *[1] * (SPARE - 1), 0]
    for between, begun in ((JUST, 1), (WAITS, 1)):
        rows = [WAITS, *[SPARES] * (SPARE - 1), between, *[SPARES] * SPARE]
        assert begins(rows) == [*full, *[1] * (SPARE - 1), begun, *[1] * (SPARE - 1), 0]


def test_end_is_all_that_may_begin_where_the_trainer_waits():
    less = [WAITS, *[SPARES] * SPARE, *[SPARES] * SPARE]
    once = [*[1] * (SPARE - 1), 0]
    assert begins([*less, JUST, WAITS]) == [AHEAD + 1, *once, *once, 1, 3]
