"""Rewards of a user, good and hostile; workers import this module, so it imports no torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pyrl_ext.data.rewards import answer_rule, number_match
from pyrl_ext.prompt import Prompt

__all__ = ["number_match"]


def sleeps(prompt: Prompt, text: str, tokens: list[int]) -> float:
    try:
        time.sleep(3600)
    except Exception:  # what a careless function does
        return 0.0
    return 1.0


def forks() -> float:
    if (child := os.fork()) > 0:
        os.waitpid(child, 0)
    return 1.0


def _leaves_a_process() -> float:
    """It holds all files of the worker open, which ends behind it."""
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(4)


def changes_folder() -> float:
    os.chdir("/")
    return 1.0


def prints() -> float:
    os.write(1, b"\x80\x05 is no message\n")
    print("neither is this")
    return 1.0


def _exits() -> float:
    sys.exit()


def _raises() -> float:
    raise KeyError("colour")


def _raises_much() -> float:
    raise ValueError("\ud800" * 5_000_000)


def _spins() -> float:
    while True:
        pass


def _takes_4_seconds() -> float:
    time.sleep(4.0)
    return 1.0


def _waits_for_a_process() -> float:
    subprocess.run(["sleep", "3600"], check=True)
    return 1.0


ACTIONS: dict[str, Callable[[], Any]] = {
    "good": lambda: 1.0,
    "forks": forks,
    "changes folder": changes_folder,
    "prints": prints,
    "parts": lambda: {"right": 1, "format": 0.5},
    "exits": _exits,
    "raises": _raises,
    "raises much": _raises_much,
    "no number": threading.Lock,
    "dies": lambda: os._exit(0),
    "crashes": lambda: ctypes.string_at(0),
    "leaves a process": _leaves_a_process,
    "spins": _spins,
    "takes 4 s": _takes_4_seconds,
    "waits for a process": _waits_for_a_process,
    "process": os.getpid,
    "torch": lambda: "torch" in sys.modules,
}


@answer_rule("an action", lambda answer: answer in ACTIONS)
def acts(prompt: Prompt, text: str, tokens: list[int]) -> Any:
    """Do what the answer names."""
    return ACTIONS[prompt.answer]()
