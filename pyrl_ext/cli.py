"""``pyrl COMMAND ...``: one name for the commands that are also ``python -m pyrl_ext.<module>``.

A command's module is imported when it is called, so that `pyrl plan` needs no torch.
"""

from __future__ import annotations

import difflib
import importlib
import os
import select
import sys
from collections.abc import Sequence

from pyrl_ext import __version__
from pyrl_ext.lazy import missing

_STDOUT = 1

# command -> (module with a `main`, what it does)
COMMANDS = {
    "init": ("pyrl_ext.tools.init", "write the config of a run from a model's name"),
    "plan": ("pyrl_ext.plan.__main__", "check a config and show its plan"),
    "train": ("pyrl_ext.tools.train", "run a config, or a model with the config made for it"),
    "serve": (
        "pyrl_ext.train.serve",
        "start the inference servers of this host and keep them running",
    ),
    "report": (
        "pyrl_ext.tools.report.__main__",
        "print the table of a run and draw its curves; write its page",
    ),
    "eval": ("pyrl_ext.tools.eval", "score responses of trained weights to held-out prompts"),
    "configs": ("pyrl_ext.tools.configs", "list the configs of this package, or copy one"),
    "export": ("pyrl_ext.tools.export", "write a run's weights as a Hugging Face folder"),
    "doctor": (
        "pyrl_ext.tools.doctor",
        "show what this machine has, and whether a plan can run on it",
    ),
    "bench": ("pyrl_ext.tools.bench", "time the kernels against other implementations"),
}


def usage() -> str:
    """The commands, a line each."""
    lines = (f"  {name:9} {text}" for name, (_, text) in COMMANDS.items())
    text = "usage: pyrl COMMAND ...\n       pyrl --version\n\n" + "\n".join(lines)
    return f"{text}\n\nRun `pyrl COMMAND --help` for details."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 2: there is no such command; 130: Ctrl-C; 141: the
    reader of its output has gone, as in `pyrl --help | head -1`."""
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads(_STDOUT):
            raise
        # what is still buffered goes there, or Python would report at exit that it is lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
        return 141


def _nobody_reads(pipe: int) -> bool:
    """True if the reader of a pipe has closed it."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _run(given: list[str]) -> int:
    if given and given[0] == "--version":
        print(f"pyrl_ext {__version__}")
        return 0
    if not given or given[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if given else sys.stderr)
        return 0 if given else 2
    name, *rest = given
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f". Did you mean {near[0]}?" if near else ""
        print(f"pyrl: {name!r}, expected one of {', '.join(COMMANDS)}{hint}", file=sys.stderr)
        return 2
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a config names functions there
    try:
        try:
            command = importlib.import_module(COMMANDS[name][0])
        except ModuleNotFoundError as error:
            problem = missing(f"pyrl {name}", error)
            if problem is error:
                raise
            print(problem, file=sys.stderr)
            return 2
        return command.main(rest) or 0
    except KeyboardInterrupt:  # before or after what handles it, such as a run's steps
        print(f"\npyrl {name}: stopped by Ctrl-C", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
