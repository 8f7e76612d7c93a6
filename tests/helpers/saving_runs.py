"""Runs of the tiny model that save every step."""

from pathlib import Path

from pyrl_ext import train
from tests.helpers.tiny import CONFIG, QUICK

OFTEN = ("evaluate.every=0", "checkpoint.every=1", "checkpoint.keep=3")


def run(folder: Path, *arguments: str) -> int:
    """Exit code of the training command in this process; it saves every step."""
    named = {each.split("=")[0] for each in arguments}
    options = [each for each in (*QUICK, *OFTEN) if each.split("=")[0] not in named]
    return train.main([str(CONFIG), f"run={folder}", *options, *arguments])
