"""Jobs: commands with a time limit, whose results are kept file by file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import rows as table
from benchmarks.gpu.rows import ABSENT, FAILED, LOG_LINES, MISSED, OK

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """A command of a part.

    Args:
        part:    its part.
        name:    names it in the part.
        command: what Python runs (``-m module ...``); with ``program`` that program's arguments.
        limit:   most seconds it may take.
        absent:  why it cannot run here; "": it can.
        program: what runs ``command`` in place of this Python.
        env:     environment variables to add.
    """

    part: str
    name: str
    command: tuple[str, ...]
    limit: float
    absent: str = ""
    program: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The name of its files."""
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.name)
        return f"{self.part}.{safe}"


@dataclass
class Result:
    """The outcome of a job; ``log``: the last lines that it printed."""

    part: str
    name: str
    state: str
    seconds: float = 0.0
    why: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    log: list[str] = field(default_factory=list[str])

    @property
    def bad(self) -> bool:
        """True if something failed, or missed its bar."""
        return self.state not in (OK, ABSENT)


class Folder:
    """Results, rows and logs of jobs in a folder."""

    def __init__(self, path: Path):
        self.path = path
        for name in ("results", "rows", "logs"):
            (path / name).mkdir(parents=True, exist_ok=True)

    def of(self, kind: str, job: Job) -> Path:
        """The file of a job; ``kind``: results, rows or logs."""
        return self.path / kind / f"{job.file}.{'json' if kind == 'results' else 'txt'}"

    def result(self, job: Job) -> Result | None:
        """The outcome of a job; None: it has not run to its end."""
        file = self.of("results", job)
        return Result(**json.loads(file.read_text())) if file.exists() else None

    def keep(self, job: Job, result: Result) -> Result:
        self.of("results", job).write_text(json.dumps(asdict(result), indent=1) + "\n")
        return result

    def forget(self, job: Job) -> None:
        """Remove what an earlier run left."""
        for kind in ("results", "rows", "logs"):
            self.of(kind, job).unlink(missing_ok=True)


class Running:
    """A job that runs."""

    def __init__(self, job: Job, folder: Folder):
        folder.forget(job)
        self.job = job
        self.folder = folder
        self.start = time.monotonic()
        places = {table.FILE: folder.of("rows", job), table.FOLDER: folder.path}
        env = os.environ | {name: str(each.absolute()) for name, each in places.items()}
        env |= {"PYTHONUNBUFFERED": "1"} | dict(job.env)  # a log's lines in their order
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        self.log = folder.of("logs", job).open("w")
        self.process = subprocess.Popen(
            [*(job.program or (sys.executable,)), *job.command],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def poll(self) -> Result | None:
        """The result, once the job has ended or run out of time."""
        code = self.process.poll()
        late = code is None and self.seconds > self.job.limit
        if code is None and not late:
            return None
        self.end()
        found = table.read(self.folder.of("rows", self.job))
        states = {row["state"] for row in found}
        why = ""
        if late:
            state = "timed out"
            why = f"more than {self.job.limit:g} s"
        elif code or FAILED in states:
            state = FAILED
            why = f"exit status {code}" if code else ""
        else:
            state = next((s for s in (MISSED, OK, ABSENT) if s in states), OK)
        log = self.folder.of("logs", self.job).read_text(errors="replace").splitlines()
        result = Result(self.job.part, self.job.name, state, self.seconds, why, found)
        result.log = [line[:400] for line in log if line.strip()][-LOG_LINES:]
        return self.folder.keep(self.job, result)

    def end(self) -> None:
        """End its processes, those that it started among them."""
        for sign, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 10)):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()
        self.log.close()
