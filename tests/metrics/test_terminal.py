"""A run on the terminal: the same lines in a log and above the live bar of a terminal."""

import io
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from pyrl_ext import train
from pyrl_ext.metrics.sinks import Row, read_rows
from pyrl_ext.metrics.terminal import HEADER_EVERY, TerminalSink
from tests.helpers.tiny import CONFIG, QUICK

pytestmark = pytest.mark.multiprocess

STEP = {"reward": 0.5, "loss": -0.01234, "policy/entropy": 4.5, "policy/ref_kl": 0.012}
STEP |= {"mismatch/abs_mean": 1.6e-7, "grad_norm": 0.0479, "rollout/response_len": 1234.5}
STEP |= {"rollout/truncated": 0.125, "tokens_per_s": 12345.6, "time/step": 12.345}


def shown(rows: Sequence[Row], total: int, terminal: bool = False) -> str:
    """What a run of ``rows`` prints."""
    out = io.StringIO()
    sink = TerminalSink(total, console=Console(file=out, force_terminal=terminal, width=150))
    for row in rows:
        sink.write(row)
    sink.close()
    return out.getvalue()


def lines_of(text: str) -> list[str]:
    """The printed lines, without colors, the bar and the time left."""
    lines: list[str] = []
    for line in re.split(r"[\r\n]+", text):
        plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line)
        if re.match(r" *(step  |\d+/\d+  )", plain):
            lines.append(re.sub(r"\d:\d\d:\d\d", "h:mm:ss", plain).rstrip())
    return lines


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    """What a run of two steps prints into a log, and its metrics; its responses of one token are
    all truncated."""
    folder = tmp_path_factory.mktemp("run")
    quick = [each for each in QUICK if not each.startswith(("log.", "rollout.max_new_tokens"))]
    more = ["steps=2", "evaluate.every=2", "rollout.max_new_tokens=1", "objective.kl_coef=0.1"]
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", out)
        assert train.main([str(CONFIG), f"run={folder}", *quick, *more]) == 0
    return out.getvalue(), read_rows(folder / "metrics.jsonl")


def test_terminal_sink_prints_the_metrics_of_a_real_run(recorded):
    text, rows = recorded
    header, first, second, last = lines_of(text)
    labels = "step reward eval loss entropy KL mismatch grad length trunc tokens/s seconds left"
    assert header.split() == labels.split()
    assert max(map(len, text.splitlines())) <= 140 and "\x1b" not in text
    row = rows[0]
    wanted = [
        "0/2",
        f"{row['reward']:.3f}",
        f"{row['eval_reward']:.3f}",
        f"{row['loss']:.4f}",
        f"{row['policy/entropy']:.3f}",
        f"{row['policy/ref_kl']:.4f}",
        f"{row['mismatch/abs_mean']:.1e}",
        f"{row['grad_norm']:#.3g}".rstrip("."),
        f"{row['rollout/response_len']:,.1f}",
        f"{100 * row['rollout/truncated']:.0f}",
        "%",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['time/step']:.2f}",
        "h:mm:ss",
    ]
    assert first.split()[: len(wanted)] == wanted
    assert second.split()[0] == "1/2" and f"{rows[1]['reward']:.3f}" in second
    assert last.split() == ["2/2", f"{rows[2]['eval_reward']:.3f}"]


def test_terminal_sink_prints_the_same_lines_in_a_terminal(recorded):
    """And the alarm in the lines of the steps where it is, there in red."""
    text, rows = recorded
    assert rows[0]["rollout/truncated"] > 0.8
    assert lines_of(text)[1].endswith(f"! {100 * rows[0]['rollout/truncated']:.3g} % truncated")
    in_terminal = shown(rows, 2, terminal=True)
    assert lines_of(in_terminal) == lines_of(text)
    assert re.search(r"\x1b\[31m  ! [\d.]+ % truncated", in_terminal)


def test_terminal_sink_names_an_alarm_in_its_step_alone():
    rows = [STEP | {"step": n} for n in range(4)]
    rows[2] |= {"rollout/truncated": 1.0, "mismatch/abs_mean": 0.2, "mismatch/k3": 0.3}
    header, *lines = lines_of(shown(rows, 4))
    assert [line.partition("  !")[1] for line in lines] == ["", "", "  !", ""]
    assert lines[2].endswith("h:mm:ss  ! trainer and engine disagree  ! 100 % truncated")
    ends = [line.index("h:mm:ss") for line in lines]
    assert {header.index("left") + 4} == {end + 7 for end in ends}


def test_terminal_sink_names_three_problems_and_counts_the_rest():
    row = STEP | {"step": 0, "rollout/truncated": 1.0, "rollout/flat_groups": 1.0}
    row |= {"policy/clip_fraction": 0.9, "mismatch/f2": 0.5, "grad_norm": float("nan")}
    line = lines_of(shown([row], 1))[1]
    assert line.count("  ! ") == 3 and "  ! grad_norm is nan  " in line
    assert line.endswith("  and 2 more")


def test_terminal_sink_repeats_the_header_and_adds_columns_that_appear_later():
    rows = [{"step": n, "loss": 2.0, "time/step": 1.0} for n in range(50)]
    rows[30] = {"step": 30, "loss": 2.0, "eval_loss": 1.5}
    lines = lines_of(shown(rows, 50))
    headers = [n for n, line in enumerate(lines) if "step" in line]
    # the line of step 30 has a new column; the header comes again after HEADER_EVERY lines
    assert HEADER_EVERY == 20 and headers == [0, 21, 32]
    assert lines[0].split() == ["step", "loss", "seconds", "left"]
    assert lines[32].split() == ["step", "eval", "loss", "seconds", "left"]
    assert lines[33].split() == ["30/50", "1.500", "2.0000", "h:mm:ss"]
    assert lines[34].split() == ["31/50", "2.0000", "1.00", "h:mm:ss"]


def test_terminal_sink_shows_phase_and_rollouts_in_the_bar():
    out = io.StringIO()
    sink = TerminalSink(10, 4, Console(file=out, force_terminal=True, width=150))
    for phase, note in (("time/eval", "rollout: 3 samples"), ("time/rollout", "rollout: 4 [/x]")):
        sink.enter(phase)
        sink.note(note)
        assert sink._bar is not None
        sink._bar.refresh()
    sink.enter("time/update")
    sink._bar.refresh()
    sink.write(STEP | {"step": 4})
    sink._bar.refresh()
    sink.enter("time/step")
    sink._bar.refresh()
    sink.close()
    text = out.getvalue()
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)
    states = re.findall(r"step +(\d+/10) \S+ (.*?) +\S+:\S+", plain)
    assert states[0][0] == "4/10" and ("4/10", "eval, rollout: 3 samples") in states
    assert ("4/10", "rollout: 4 [/x]") in states and ("4/10", "update") in states
    assert ("5/10", "update") in states and states[-1] == ("5/10", "")
    assert text.rstrip().endswith("\x1b[2K") and "\x1b[?25h" in text  # the bar is gone


def test_terminal_sink_shows_no_progress_in_a_log():
    out = io.StringIO()
    sink = TerminalSink(10, console=Console(file=out))
    sink.enter("time/rollout")
    sink.note("rollout: 3 samples")
    sink.close()
    assert out.getvalue() == ""
