"""Files that take a step's numbers: they survive crashes; TensorBoard."""

import json
import math

import numpy as np
import pytest
import torch

from pyrl_ext.metrics.sinks import JsonlSink, TensorBoardSink, read_rows
from tests.helpers.small_disk import fill, small_disk


def strict(line: str) -> dict:
    def refuse(token: str):
        raise ValueError(token)

    return json.loads(line, parse_constant=refuse)


def test_jsonl_sink_writes_strict_json_that_reads_back(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [
        {"step": 0, "reward": 0.1, "loss": math.nan},
        {"step": 1, "reward": 1 / 3, "loss": math.inf, "lr": -math.inf},
        {"step": 5, "reward": np.float64(2.5)},
    ]
    sink = JsonlSink(path)
    for count, row in enumerate(rows, 1):
        sink.write(row)
        assert len(read_rows(path)) == count  # readable while the run goes on
    sink.close()
    lines = [strict(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"step": 0, "reward": 0.1, "loss": None, "nonfinite": {"loss": "nan"}}
    assert lines[1]["nonfinite"] == {"loss": "inf", "lr": "-inf"}
    assert str(read_rows(path)) == str([dict(row) for row in rows]).replace(
        "np.float64(2.5)", "2.5"
    )


def test_jsonl_sink_takes_only_numbers_and_rising_steps(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"step": 3})
    with pytest.raises(ValueError, match=r"step 3 after 3, expected a later one"):
        sink.write({"step": 3})
    with pytest.raises(ValueError, match="step None"):
        sink.write({"reward": 1.0})
    for value in (torch.tensor(1.0), True, "x", None):
        with pytest.raises(TypeError, match=r"reward is .* expected a Python int or float"):
            sink.write({"step": 4, "reward": value})  # pyright: ignore[reportArgumentType]
    sink.close()
    assert read_rows(sink.path) == [{"step": 3}]


def test_rewind_drops_later_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(6):
        sink.write({"step": step, "loss": math.nan})
    sink.close()
    sink = JsonlSink(path)
    assert sink.rewind(4) == 4
    sink.write({"step": 4, "loss": 4.5})
    sink.close()
    rows = read_rows(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert math.isnan(rows[3]["loss"]) and rows[4]["loss"] == 4.5
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    sink = JsonlSink(path)
    sink.rewind(0)
    sink.write({"step": 0})
    sink.close()
    assert read_rows(path) == [{"step": 0}]


@pytest.mark.parametrize("cut", [1, 5, 14])
def test_jsonl_sink_removes_a_torn_last_line_with_a_warning(tmp_path, caplog, cut):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 0, "reward": 0.5}\n'
    path.write_text(whole + '{"step": 1, "reward": 0.75}\n'[:-cut])
    assert read_rows(path) == [{"step": 0, "reward": 0.5}]
    sink = JsonlSink(path)
    assert "removed line 2" in caplog.text and str(path) in caplog.text
    assert path.read_text() == whole
    sink.write({"step": 1})
    sink.close()
    assert [row["step"] for row in read_rows(path)] == [0, 1]


def test_read_rows_names_a_damaged_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: .*expected a JSON object of numbers"):
        JsonlSink(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: no object with a step"):
        read_rows(path)


def test_tensorboard_sink_writes_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in range(3):
        sink.write({"step": step, "reward": step / 2, "mismatch/k3": 1e-3})
    sink.close()
    sink = TensorBoardSink(tmp_path, first_step=2)
    sink.write({"step": 2, "reward": 7.0})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["mismatch/k3", "reward"]
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(0, 0.0), (1, 0.5), (2, 7.0)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": "four"}', "step is 'four', not a number"),
        ('{"step": null}', "step is None, not a number"),
        ('{"step": 1, "reward": [1]}', r"reward is \[1\], not a number"),
        ('{"step": 1, "reward": true}', "reward is True, not a number"),
        ('{"step": 1, "nonfinite": [1]}', r"nonfinite is \[1\]"),
        ('{"step": 1, "nonfinite": {"loss": "big"}}', "could not convert"),
        ('{"step": 1' + "0" * 400 + "}", "too large"),
        ('{"step": 1e999}', "step is inf, no whole number from 0"),
        ('{"step": 1, "nonfinite": {"step": "nan"}}', "step is nan, no whole number from 0"),
        ('{"step": 1180591620717411303424}', "step is 1180591620717411303424, no whole number"),
        ('{"step": 1.5}', "step is 1.5, no whole number"),
        ('{"step": 2}', "step 2 after 2"),
        ('{"step": 1}', "step 1 after 2"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_read_rows_names_a_line_that_is_no_row_of_numbers(tmp_path, line, reason):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"metrics.jsonl:2: .*{reason}.*, expected a JSON object"):
        read_rows(path)


def test_jsonl_sink_names_the_file_on_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        sink = JsonlSink(disk / "metrics.jsonl")
        sink.write({"step": 0})
        fill(disk)
        with pytest.raises(OSError, match=r"metrics.jsonl: step \d+ cannot be written \(No space"):
            for step in range(1, 1000):
                sink.write({"step": step, "reward": 0.123456789})
        (disk / "filler").unlink()
        assert JsonlSink(sink.path).path == sink.path  # what was written is still a run
        assert read_rows(sink.path)[0] == {"step": 0}
