"""Run the commands of README and docs as `.ci/run` does, or print them with ``--print``.

Commands are the lines of ```bash blocks. Left out are those whose comment says what they need
("# needs a GPU") or which other command runs them ("# part of make bench"). A command that several
pages show runs once, where it comes first. The commands of a page run one after the other, three
pages run at a time, those of `LONG` before the others. A page that names a run folder
(``runs/NAME``) of an earlier page waits for that page. The first command that fails ends all.

Commands after ``--first`` run one after the other before all pages. With
``--until S`` (seconds since 1970) pages begin no command after S, so that a slow machine ends in
time; what is left out is listed at the end. With ``--end S`` a command that still runs then is
ended by SIGABRT, on which pytest's processes print the stacks of their threads, and the run has
failed.

``--extras without`` leaves out the targets of the Makefile that first install vLLM,
TransformerEngine or wandb; ``--extras with`` runs those alone.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
MARKS = ("# needs ", "# part of make ")
FIRST = "--first"  # the page of commands that run before the others
STACKS_S = 10  # in which processes that are ended print their stacks
LANES = 3  # of two cores: commands that wait leave one idle
WRITES = {"make demo": "runs/tiny-0"}  # by default
# what the Makefile calls the installation of vLLM, TransformerEngine, wandb, verl, SkyRL and mkdocs
EXTRAS = (
    "$(VENV)/.vllm",
    "$(VENV)/te",
    "$(VENV)/wandb",
    "$(VENV)/verl",
    "$(VENV)/skyrl",
    "$(VENV)/.docs",
)
# commands that name one of these need vLLM, wandb or other trainers
NEED_EXTRAS = ("engine=vllm", "--engine vllm", ".venv/wandb", ".venv/verl")
# minutes on one core: begun last, they would end when nothing is left for the other
LONG = ("docs/rollouts.md", "docs/remote_engines.md", "docs/parallel.md", "docs/runs.md")


def pages() -> list[Path]:
    """README, CONTRIBUTING and docs, in the order in which their commands are run."""
    first = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    return [*first, *sorted((REPOSITORY / "docs").rglob("*.md"))]


def shown(text: str) -> list[str]:
    """Lines of the ```bash blocks with their comments, continuation lines joined."""
    lines: list[str] = []
    for block in text.split("```bash\n")[1:]:
        body = block.split("```")[0].replace("\\\n", "")
        lines += [" ".join(line.split()) for line in body.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith("#")]


def is_left_out(line: str) -> bool:
    """True if the comment of a command says that CI need not run it."""
    return any(mark in line for mark in MARKS)


def commands(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Page -> commands to run: unmarked ones without their comments, each where it comes first."""
    seen = set[str]()
    found = dict[str, list[str]]()
    for page, text in texts.items():
        lines = [line.split(" #")[0].strip() for line in shown(text) if not is_left_out(line)]
        found[page] = [line for line in dict.fromkeys(lines) if line not in seen]
        seen.update(lines)
    return {page: lines for page, lines in found.items() if lines}


def rule(target: str, makefile: str) -> str:
    """The lines of the Makefile that begin with ``target``, and the recipe; "" for no target."""
    return "".join(re.findall(rf"^{re.escape(target)}:.*\n(?:\t.*\n)*", makefile, re.MULTILINE))


def needs_extras(command: str, makefile: str) -> bool:
    """True if a command names one of `NEED_EXTRAS`, or makes a target that depends on `EXTRAS`."""
    if any(word in command for word in NEED_EXTRAS):
        return True
    name, *targets = command.split()
    if name != "make":
        return False
    lines = "".join(rule(target, makefile) for target in targets).splitlines()
    heads = [line.split("##")[0] for line in lines if not line.startswith("\t")]
    return not {*" ".join(heads).split()}.isdisjoint(EXTRAS)


def needing(found: Mapping[str, list[str]], extras: bool, makefile: str) -> dict[str, list[str]]:
    """Page -> those of its commands that need `EXTRAS`, or those that do not."""
    kept = {
        page: [command for command in own if needs_extras(command, makefile) == extras]
        for page, own in found.items()
    }
    return {page: own for page, own in kept.items() if own}


def in_order(found: Mapping[str, list[str]], first: Sequence[str]) -> dict[str, list[str]]:
    """Page -> its commands in the order of the lanes: ``first`` as a page, `LONG` ones, the
    others."""
    left = {page: [c for c in own if c not in first] for page, own in found.items()}
    long = {page: left[page] for page in LONG if page in left}
    return {FIRST: [*first]} | long | left


def waits(pages: Mapping[str, list[str]]) -> dict[str, set[str]]:
    """Page -> earlier pages whose commands end before its first begins."""
    runs = {
        page: set(
            re.findall(r"runs/[\w-]+(?![\w.-])", " ".join(WRITES.get(line, line) for line in lines))
        )
        for page, lines in pages.items()
    }
    names = list(pages)
    return {page: {o for o in names[:n] if runs[page] & runs[o]} for n, page in enumerate(names)}


@dataclass
class Run:
    """Lanes that take pages; what they share is behind ``lock``.

    Args:
        waiting: page -> its commands.
        after: page -> those that end before it begins.
        until: when pages other than `FIRST` begin no command any more [seconds since 1970].
        end: when a command that still runs is ended [seconds since 1970].
    """

    waiting: dict[str, list[str]]
    after: dict[str, set[str]]
    until: float = float("inf")
    end: float = float("inf")
    lock: threading.Condition = field(default_factory=threading.Condition)
    ended: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    seconds: list[tuple[float, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def lane(self) -> None:
        while (page := self.take()) is not None:
            for command in self.waiting.pop(page):
                if self.failed:
                    continue
                if time.time() > self.until and page != FIRST:
                    self.left_out.append(command)
                else:
                    self.execute(command)
            with self.lock:
                self.ended.add(page)
                self.lock.notify_all()

    def take(self) -> str | None:
        """The next page that need not wait; None where no page is left."""
        with self.lock:
            while self.after and not self.failed:
                ready = next((p for p, before in self.after.items() if before <= self.ended), None)
                if ready is not None:
                    del self.after[ready]
                    return ready
                self.lock.wait()
        return None

    def execute(self, command: str) -> None:
        """Run a command; print its output whole when it has ended, so that lanes do not mix."""
        start = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with self.lock:
                self.running.add(process)
            code = self.wait(process)
            with self.lock:
                self.running.discard(process)
                took = time.monotonic() - start
                self.seconds.append((took, command))
                output.seek(0)
                print(f"\n== {command}   # {took:.0f} s", flush=True)
                sys.stdout.buffer.write(output.read())
                sys.stdout.flush()
                if code and not self.failed:
                    self.failed.append(f"{command}: exit status {code}")
                    for other in self.running:
                        os.killpg(other.pid, signal.SIGTERM)

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status; that of SIGABRT for a command that runs at `end`."""
        if self.end == float("inf"):
            return process.wait()
        try:
            return process.wait(max(0.0, self.end - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(STACKS_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the commands of README and docs.")
    parser.add_argument("--print", action="store_true", help="only print the commands")
    parser.add_argument("--first", nargs="*", default=[], help="commands to begin with")
    parser.add_argument("--extras", choices=["with", "without"], help="only a part")
    parser.add_argument("--until", type=float, help="when no page begins a command any more")
    parser.add_argument("--end", type=float, help="when a command that still runs is ended")
    options = parser.parse_args()
    texts = {page.relative_to(REPOSITORY).as_posix(): page.read_text("utf-8") for page in pages()}
    found = commands(texts)
    if options.extras:
        makefile = (REPOSITORY / "Makefile").read_text("utf-8")
        found = needing(found, options.extras == "with", makefile)
    if options.print:
        print("\n".join(chain.from_iterable(found.values())))
        return 0
    chosen = in_order(found, options.first)
    after = {page: before | {FIRST} for page, before in waits(found).items()} | {FIRST: set[str]()}
    run = Run(chosen, {page: after[page] for page in chosen})
    if options.until is not None:
        run.until = options.until
    if options.end is not None:
        run.end = options.end
    lanes = [threading.Thread(target=run.lane) for _ in range(LANES)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    print("\nseconds of each command, the longest last")
    for took, command in sorted(run.seconds):
        print(f"{took:7.0f}  {command[:110]}")
    for command in run.left_out:
        print(f"NOT RUN, the time was over: {command}")
    for failure in run.failed:
        print(f"FAILED  {failure}")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
