"""Engines on separate hosts: each runs `pyrl serve` in a namespace, with keys, and the trainer
reaches it through the switch.

Two hosts that train and a third that generates must give the numbers of engines beside the
trainer; so must a trainer on another host after one whose host was lost within a publish. Then one
host trains over two engines' hosts: all cables are pulled for 5 s and a rank is killed, and the
same command, over the same engines, must end with the same numbers; one engine is away for longer
than it may be, and comes back; then both go, one after the other, and the run ends with the reasons
of both. Prompts are accounted for at every step.

    sudo python -m tests.engine_hosts
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.helpers.hosts import ROOT, TORCHRUN, Host, hosts, train_on, wait, why_not
from tests.helpers.server_runs import assert_same_row, rows_of

STEPS = 6
PROMPTS = 4
CUT = 5.0
SMALL = (
    f"batching.prompts={PROMPTS}",
    "batching.samples_per_prompt=4",
    "parallel.dp=2",
    "rollout.max_new_tokens=24",
    "log.progress=false",
    "evaluate.every=0",
    "checkpoint.every=1",
)
BEGUN = 240.0  # longest time for three steps, with all starts [s]


@contextmanager
def engines(places: Sequence[Host], folder: Path) -> Iterator[list[str]]:
    """`pyrl serve` on each host; what the trainer adds to its config, once all answer."""
    (folder / "keys").mkdir()
    for name in ("generate", "control"):
        (folder / "keys" / name).write_text(secrets.token_hex(32))
    addresses = [f"http://{host.address}:8000" for host in places]
    more = [f"rollout.servers={addresses}", f"rollout.keys={folder / 'keys'}"]
    logs = [folder / f"serve-{host.name}.log" for host in places]
    started: list[subprocess.Popen[bytes]] = []
    for host, log in zip(places, logs, strict=True):
        command = [sys.executable, "-m", "pyrl_ext.train.serve", "configs/tiny.yaml", *SMALL, *more]
        started.append(host.start([*command, f"run={folder / host.name}"], log))
    wait("engines", lambda: all(" answers" in log.read_text() for log in logs), BEGUN, logs)
    yield more
    for host, process, log in zip(places, started, logs, strict=True):
        assert process.poll() is None and "started again" not in log.read_text(), log.read_text()
        host.end()
        process.wait()


class Run:
    """The run on some hosts, with two ranks together; `wait` shows the logs when time is over."""

    def __init__(self, places: Sequence[Host], folder: Path, more: Sequence[str]):
        self.folder = folder
        self.places = places
        self.logs = [folder.with_name(f"{folder.name}-{host.name}.log") for host in places]
        for log in self.logs:
            log.write_text("")
        training = ["configs/tiny.yaml", f"run={folder}", *SMALL, *more]
        self.started = train_on(places, 2 // len(places), training, self.logs)

    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.folder) if (self.folder / "metrics.jsonl").exists() else []

    def until(self, what: str, done: Any, seconds: float = BEGUN) -> float:
        def ended_or_done() -> bool:
            good = done()
            assert good or any(each.poll() is None for each in self.started), (what, self.said())
            return good

        return wait(what, ended_or_done, seconds, self.logs)

    def until_row(self, number: int) -> None:
        self.until(f"row {number}", lambda: len(self.rows()) > number)
        time.sleep(0.1)

    def ended(self) -> int:
        """The worst exit code, once all have ended."""
        wait("its end", lambda: all(p.poll() is not None for p in self.started), 120, self.logs)
        return max(abs(each.returncode or 0) for each in self.started)

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


def accounted(rows: Sequence[dict[str, Any]]) -> None:
    """Every prompt that was asked for came back once, or is on its way."""
    for row in rows:
        fates = ("returned", "aborted", "failed", "in_flight")
        count = sum(row[f"servers/prompts_{fate}"] for fate in fates)
        assert row["servers/prompts_asked"] == count, row
        assert row["servers/prompts_aborted"] == row["servers/prompts_failed"] == 0, row
    asked = [row["servers/prompts_asked"] for row in rows]
    assert all(b - a == PROMPTS for a, b in pairwise(asked)), asked


def same(rows: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    for row, other in zip(rows, expected):
        assert_same_row(row, other)


def beside(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run whose engines are next to its two ranks."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "pyrl_ext.train"]
    training = ["configs/tiny.yaml", f"run={folder}", f"steps={STEPS}", *SMALL]
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *training], cwd=ROOT, env=own, check=True, capture_output=True)
    return rows_of(folder)


def three_hosts(places: Sequence[Host], more: Sequence[str], folder: Path, expected: Any) -> None:
    """The two first hosts train, the engine on the third generates."""
    run = Run(places[:2], folder / "three", [*more, "steps=3"])
    assert run.ended() == 0, run.said()
    rows = run.rows()
    assert len(rows) == 3 and all(row["servers/used"] == 1 for row in rows)
    accounted(rows)
    same(rows, expected)
    print("two hosts that train, a third that generates, with keys: the numbers of one host")


def cut_and_killed(
    place: Host, cables: Sequence[Host], more: Sequence[str], folder: Path, expected: Any
) -> None:
    """All engines are away for less than they may be; later a rank dies, and the run resumes."""
    asked = [*more, f"steps={STEPS}", "rollout.request_timeout=60"]
    run = Run([place], folder / "cut", asked)
    run.until_row(0)
    for host in cables:
        host.pull_cable()
    before = len(run.rows())
    time.sleep(CUT)
    assert len(run.rows()) <= before + 1, "the cable was out"
    for host in cables:
        host.plug_cable()
    run.until_row(before + 1)
    os.kill(place.ranks()[1], signal.SIGKILL)
    assert run.ended() != 0
    rows = run.rows()
    assert len(rows) < STEPS
    accounted(rows)
    again = Run([place], folder / "cut", asked)
    assert again.ended() == 0, again.said()
    assert "resuming from" in again.said()
    both = again.rows()
    accounted(both[len(rows) :])
    assert [row["step"] for row in both] == list(range(STEPS))
    assert all(r["servers/used"] == len(cables) and not r["servers/resent"] for r in both), both
    same(both, expected)
    print(f"all cables out for {CUT:g} s, rank 1 killed in step {len(rows)}: the same numbers")


def cut_for_good(
    place: Host, cables: Sequence[Host], more: Sequence[str], folder: Path, expected: Any
) -> None:
    """One engine is away for longer than it may be; then for good; then the other one, too."""
    asked = ["steps=10000", "rollout.request_timeout=2", "rollout.publish_timeout=4"]
    run = Run([place], folder / "gone", [*more, *asked])
    used = lambda: [row["servers/used"] for row in run.rows()]  # noqa: E731
    run.until_row(0)
    cables[0].pull_cable()
    away = run.until("a step without the first engine", lambda: used()[-1] == 1, 60)
    cables[0].plug_cable()
    back = run.until("the first engine's return", lambda: used()[-1] == 2)
    print(f"an engine without a cable was out after {away:.0f} s, and back {back:.0f} s after it")
    cables[1].pull_cable()
    run.until("a step without the second engine", lambda: used()[-1] == 1, 60)
    count = len(run.rows())
    run.until_row(count + 1)  # goes on with the one that is left
    cables[0].pull_cable()
    seconds = run.until("an error", lambda: "\nerror: " in run.said(), 60)
    assert run.ended() != 0
    error = run.said().split("\nerror: ")[1]
    assert "0 of 2 servers are left, expected at least 1" in error, error
    for host in cables:
        assert f"http://{host.address}:8000" in error, error
    rows = run.rows()
    accounted(rows)
    same(rows, expected)
    print(f"both without a cable: the run ended after {seconds:.0f} s and {len(rows)} steps:")
    print("\n".join(error.splitlines()[:4]))


def lost_host(places: Sequence[Host], more: Sequence[str], folder: Path, expected: Any) -> None:
    """The trainer's host is lost in the middle of a publish; another one runs the command."""
    lost = places[0]
    log = folder / "half.log"
    lost.start([sys.executable, "-m", "tests.helpers.half_publish", *more], log)
    wait("half of a publish", lambda: "half" in log.read_text(), BEGUN, [log])
    lost.pull_cable()
    lost.end()
    begin = time.monotonic()
    run = Run([places[1]], folder / "lost", [*more, "steps=2"])
    run.until_row(0)
    seconds = time.monotonic() - begin
    assert run.ended() == 0, run.said()
    same(run.rows(), expected)
    print(
        f"trainer's host lost within a publish: on another host the first step in {seconds:.0f} s"
    )


def main() -> None:
    if reason := why_not():
        sys.exit(f"engine_hosts: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was made is undone
    with tempfile.TemporaryDirectory() as name, hosts(4) as places:
        folder = Path(name)
        expected = beside(folder / "beside")
        (folder / "one").mkdir()
        with engines(places[2:3], folder / "one") as more:
            three_hosts(places, more, folder, expected)
            lost_host(places, more, folder, expected)
            places[0].plug_cable()
        (folder / "both").mkdir()
        with engines(places[2:], folder / "both") as more:
            cut_and_killed(places[0], places[2:], more, folder, expected)
            cut_for_good(places[0], places[2:], more, folder, expected)


if __name__ == "__main__":
    main()
