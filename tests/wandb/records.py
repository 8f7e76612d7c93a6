"""Writes a run to Weights & Biases (``python -m tests.wandb.records FOLDER``); reads it back."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from pyrl_ext.metrics.wandb_sink import WandbSink

# of LevelDB's log, the format of the file
BLOCK = 32768
HEADER = 7


def log_and_resume(folder: Path) -> None:
    """Three steps; then, as a resumed run, the last one again and one more."""
    for steps in (range(3), range(2, 4)):
        sink = WandbSink(folder, "sums", {"model": {"family": "glm4"}})
        for step in steps:
            apart = {1: 0.5, 2: 0.2}.get(step, 1e-3)
            sink.write({"step": step, "reward": step / 2 or math.nan, "mismatch/k3": apart})
        sink.close()
        wandb.teardown()  # waits for the process that writes
        time.sleep(1)  # the second is the name of a session's folder


def refused(folder: Path) -> str:
    """The message of a sink without an account, where nobody can be asked for one."""
    os.environ |= {"WANDB_MODE": "online", "NETRC": str(folder / "netrc")}
    os.environ.pop("WANDB_API_KEY", None)
    try:
        WandbSink(folder, "sums", {})
    except RuntimeError as error:
        return str(error)
    return ""


def sessions(folder: Path) -> list[dict[str, Any]]:
    """The records of each process that wrote in offline mode, in their order."""
    return [_session(file) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _session(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"history": [], "alerts": [], "finished": False}
    for kind, each in _records(file):
        if kind == "run":
            config = {u.key: json.loads(u.value_json) for u in each.config.update}
            names = each.run_id, each.project, each.display_name
            found |= {"names": names, "config": config}
        elif kind == "history":
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in each.item}
            found["history"].append(row)
        elif kind == "alert":
            found["alerts"].append((each.title, each.text, each.level))
        found["finished"] |= kind == "exit"
    return found


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """(kind, message) of each record of a file."""
    data = file.read_bytes()
    at = HEADER
    part = b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # no header is split
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        part += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(part)
            part = b""
            name = record.WhichOneof("record_type")
            yield name, getattr(record, name)


if __name__ == "__main__":
    log_and_resume(Path(sys.argv[1]))
    print(refused(Path(sys.argv[1])))
