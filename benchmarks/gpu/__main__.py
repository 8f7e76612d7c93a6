"""Run everything that asks for a GPU, part by part: ``python -m benchmarks.gpu [--only PART,...]``.

Each job is a process with a time limit; what fails is a row of the report, with the last lines of
its log, and the next job starts. Results are kept job by job in ``--into``; the report there
(``report.md``, ``report.json``) holds those of all parts that ran so far. Where the machine is lent
for minutes, give ``--minutes``, and go on with ``--resume``.

``--dry-run`` needs no GPU: tests are collected, benchmark cases built on meta tensors, kernels
compiled, plans made.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.jobs import Folder, Job, Result, Running
from benchmarks.gpu.parts import PARTS, Part, module
from benchmarks.gpu.rows import ABSENT

POLL = 0.2  # seconds
DRY_LANES = 2  # jobs at a time


class Stopped(Exception):
    """The command was asked to end."""


def main(
    arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS, name: str = "gpu"
) -> int:
    """Run the jobs of ``parts``; results go to ``runs/<name>``, unless ``--into`` names a folder.

    Returns: exit code 0: all ran, and nothing failed or missed a bar; 1: something did, or waits.
    """
    given = _arguments(arguments, parts)
    folder = Folder(given.into or Path("runs") / (f"{name}-dry" if given.dry_run else name))
    signal.signal(signal.SIGTERM, _stop)
    run = Run(folder, given.dry_run, given.minutes, parts)
    run.match = given.match
    todo = [job for part in given.only for job in run.chosen(part)]
    if given.list:
        print("\n".join(f"{job.part} {job.name}  (at most {job.limit:g} s)" for job in todo))
        return 0
    if not given.resume:
        for job in todo:
            folder.forget(job)
    try:
        run.parts(given.only)
    except (KeyboardInterrupt, Stopped):
        print("stopped; --resume goes on from here", flush=True)
    results = run.write()
    print((folder.path / "report.md").absolute())
    known = {(each.part, each.name): each for each in results}
    found = [known.get((job.part, job.name)) for job in todo]
    return int(any(each is None or each.bad for each in found))


def _stop(*_: object) -> None:
    raise Stopped


def _arguments(arguments: Sequence[str] | None, parts: Mapping[str, Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", default=",".join(parts), help=f"of {', '.join(parts)}")
    parser.add_argument("--match", default="", help="jobs whose name holds this text")
    parser.add_argument("--dry-run", action="store_true", help="what needs no GPU")
    parser.add_argument("--resume", action="store_true", help="keep results that are there")
    parser.add_argument("--minutes", type=float, help="start no job that may take longer")
    parser.add_argument("--into", type=Path, help="folder; runs/NAME, or runs/NAME-dry")
    parser.add_argument("--list", action="store_true", help="print the jobs alone")
    given = parser.parse_args(arguments)
    given.only = given.only.split(",")
    if unknown := [name for name in given.only if name not in parts]:
        parser.error(f"--only: {', '.join(unknown)}, expected some of {', '.join(parts)}")
    return given


class Run:
    """The jobs of all parts, and what is known of them."""

    def __init__(self, folder: Folder, dry: bool, minutes: float | None, parts: Mapping[str, Part]):
        self.folder = folder
        self.dry = dry
        self.known = parts
        self.end = time.monotonic() + 60 * minutes if minutes else float("inf")
        self.facts_job = Job("machine", "facts", module("facts"), 60)
        self.match = ""  # text in the names of the jobs to run
        self._running: list[Running] = []

    def jobs(self, part: str) -> list[Job]:
        """The jobs of a part."""
        return list(self.known[part].dry() if self.dry else self.known[part].jobs())

    def chosen(self, part: str) -> list[Job]:
        """The jobs of a part that this command is about."""
        return [job for job in self.jobs(part) if self.match in job.name]

    def parts(self, names: Sequence[str]) -> None:
        """Run the jobs that have no result yet: part by part, or all if nothing is timed."""
        if self.folder.result(self.facts_job) is None:
            self._together([self.facts_job], 1)
        todo = {
            name: [j for j in self.chosen(name) if self.folder.result(j) is None] for name in names
        }
        if self.dry:
            self._together([job for jobs in todo.values() for job in jobs], DRY_LANES)
            return
        for name, jobs in todo.items():
            self._together(jobs, self.known[name].lanes)

    def _together(self, todo: list[Job], lanes: int) -> None:
        """Run jobs, ``lanes`` at a time, as long as there is time for each."""
        try:
            while todo or self._running:
                while todo and len(self._running) < lanes:
                    self._start(todo.pop(0))
                for running in list(self._running):
                    if (result := running.poll()) is not None:
                        self._running.remove(running)
                        self._say(result)
                        self.write()
                time.sleep(POLL)
        finally:
            for running in self._running:
                running.end()
            self._running.clear()

    def _start(self, job: Job) -> None:
        if job.absent:
            self._say(self.folder.keep(job, Result(job.part, job.name, ABSENT, why=job.absent)))
        elif time.monotonic() + job.limit > self.end:
            print(f"waits    {job.part}, {job.name}: may take {job.limit:g} s", flush=True)
        else:
            self._running.append(Running(job, self.folder))

    @staticmethod
    def _say(result: Result) -> None:
        why = f": {result.why}" if result.why else ""
        place = f"{result.part}, {result.name}"
        print(f"{result.state:9s} {result.seconds:4.0f} s  {place}{why}", flush=True)
        for row in result.rows:
            if row["state"] in ("failed", "missed"):
                print(f"           {row['state']}: {row['name']}: {row['why']}", flush=True)

    def waiting(self, parts: Sequence[str]) -> list[str]:
        """Jobs without a result."""
        jobs = (job for part in parts for job in self.jobs(part))
        return [f"{job.part} {job.name}" for job in jobs if self.folder.result(job) is None]

    def write(self) -> list[Result]:
        """Write the report of all results that are there."""
        jobs = [job for part in self.known for job in self.jobs(part)]
        results = [found for job in jobs if (found := self.folder.result(job)) is not None]
        machine = self.folder.result(self.facts_job)
        facts = machine.rows[0]["numbers"] if machine and machine.rows else {}
        what = {name: part.what for name, part in self.known.items()}
        report.write(self.folder.path, facts, what, results, self.waiting([*self.known]))
        return results


if __name__ == "__main__":
    sys.exit(main())
