"""tests.same_rewards: how many first steps of two runs are equal, and when that is too few."""

import json
from pathlib import Path

import pytest

from tests.same_rewards import LIMIT, NAMES, main

ROWS = [{name: step + 0.25 for name in NAMES} | {"step": step} for step in range(4)]


def written(folder: Path, rows: list[dict[str, float]]) -> str:
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines)
    return str(folder)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("off", [2 * LIMIT, -2 * LIMIT, None])
def test_main_counts_steps_before_any_number_parts(tmp_path, capsys, name, off):
    """Or is missing in one of the runs."""
    other = [dict(row) for row in ROWS]
    other[2] = {k: v for k, v in other[2].items() if k != name}
    if off is not None:
        other[2][name] = ROWS[2][name] + off
    runs = written(tmp_path / "one", ROWS), written(tmp_path / "two", other)
    for pair in (runs, runs[::-1]):
        assert main([*pair, "--steps", "2"]) == 0
        assert f"2 of 4 rows equal within {LIMIT:g} (worst 0.0e+00)" in capsys.readouterr().out
        assert main([*pair, "--steps", "3"]) == 1


def test_main_reports_rounding_and_ends_with_the_shorter_run(tmp_path, capsys):
    near = [row | {"loss": row["loss"] + LIMIT / 2} for row in ROWS[:3]]
    runs = written(tmp_path / "one", ROWS), written(tmp_path / "two", near)
    assert main([*runs]) == 0
    said = capsys.readouterr().out
    assert "3 of 4 rows" in said and "(worst 5.0e-06)" in said
    assert "last held-out rewards 3.25, 2.25" in said
    assert main([*runs, "--steps", "4"]) == 1
