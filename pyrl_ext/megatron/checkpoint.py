"""Checkpoints by megatron's dist_checkpointing: for any layout, whole or not at all."""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from pyrl_ext.dist.topology import Topology
from pyrl_ext.megatron.optimizer import load_state, sharded_state
from pyrl_ext.megatron.quiet import quiet

COUNTERS, PLAN = "counters.json", "plan.json"


def save(
    folder: Path,
    models: Sequence[Module],
    optimizer: Any,
    counters: dict,
    plan: Any,
    topo: Topology,
    *also: Callable[[Path], None],
) -> None:
    """`write_whole` of models, optimizer, counters and the plan.

    Args:
        also: write what else belongs into the folder that they are called with, on every rank.
    """
    from megatron.core import dist_checkpointing

    def write(writing: Path) -> None:
        _collect_in_process()
        with quiet():
            dist_checkpointing.save(_state(models, optimizer, topo), str(writing))
        if topo.is_main:
            facts = {"layout": layout(topo), "plan": plan.fingerprint}
            (writing / PLAN).write_text(plan.to_json())
            (writing / COUNTERS).write_text(json.dumps(counters | facts))

    write_whole(folder, topo, write, *also)


def write_whole(folder: Path, topo: Topology, *stages: Callable[[Path], None]) -> None:
    """Let ``stages`` write into ``<folder>.writing``, and rename it when all ranks are done.

    Communicates: as the stages do, and after each whether a rank failed.
    Raises: OSError naming the folder when a rank cannot write (no space, no permission); what was
        begun is deleted, what was there before is untouched.
    """

    def begin(writing: Path) -> None:
        if topo.is_main:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)

    def finish(writing: Path) -> None:
        if topo.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            writing.rename(folder)

    for stage in (begin, *stages, finish):
        _on_all_ranks(stage, folder.with_name(folder.name + ".writing"), topo)


def _on_all_ranks(stage: Callable[[Path], None], writing: Path, topo: Topology) -> None:
    """Run ``stage``; where it failed on any rank, clean up and raise on every rank."""
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    problem = None
    try:
        stage(writing)
    except (Exception, CheckpointException) as error:
        problem = error
    problems: list[Any] = [None] * topo.world_size
    dist.all_gather_object(problems, None if problem is None else _last_line(problem))
    failed = [f"rank {rank}: {what}" for rank, what in enumerate(problems) if what is not None]
    if not failed:
        return
    if topo.is_main:
        shutil.rmtree(writing, ignore_errors=True)
    raise OSError(
        f"checkpoint: {writing.with_suffix('')} could not be written ({'; '.join(failed)}); what "
        "was begun is deleted, older checkpoints are as they were. Make room, then start the same "
        "command again"
    ) from problem


def load(folder: Path, models: Sequence[Module], optimizer: Any, plan: Any, topo: Topology) -> dict:
    """Fill models and optimizer from ``folder``, whatever layout wrote it; returns its counters.

    Raises: ConfigError with the fields in which the plan that wrote it and ``plan`` differ, and may
        not. ValueError when an earlier version of this package wrote it, in a form of its layout.
    """
    from megatron.core import dist_checkpointing

    counters = json.loads((folder / COUNTERS).read_text())
    if "layout" not in counters:
        raise ValueError(
            f"checkpoint: {folder} names no layout in {COUNTERS}, expected one of this version, "
            "whose checkpoints load under any layout. Start afresh in another run folder"
        )
    if counters.get("plan") != plan.fingerprint:
        plan.check_resumes(type(plan).read(folder / PLAN))
    with quiet():
        state: Any = dist_checkpointing.load(
            _state(models, optimizer, topo, loading=True), str(folder)
        )
    for i, model in enumerate(models):
        model.load_state_dict(state["models"][i])
    if optimizer is not None:
        load_state(optimizer, state["optimizer"])
    return counters


def layout(topo: Topology) -> str:
    """The sizes of ``topo`` in words, as in ``dp 2 ep 2 on cpu``."""
    sizes = {name: getattr(topo, f"{name}_size") for name in ("dp", "tp", "pp", "vpp", "cp", "ep")}
    words = [f"{name} {size}" for name, size in sizes.items() if size not in (None, 1)]
    if topo.etp_size != topo.tp_size:
        words.append(f"etp {topo.etp_size}")
    return f"{' '.join(words) or 'one rank'} on {topo.device.type}"


def written_under(folder: Path) -> str:
    """The `layout` of the run that wrote ``folder``."""
    return json.loads((folder / COUNTERS).read_text())["layout"]


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint (``step-<n>``) under ``folder``."""
    whole = [p for p in folder.glob("step-*") if (p / COUNTERS).exists() and p.suffix == ""]
    return max(whole, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints."""
    whole = sorted(folder.glob("step-*"), key=lambda p: int(p.name.split("-")[1].split(".")[0]))
    for old in whole[: max(0, len(whole) - keep)]:
        shutil.rmtree(old)


def _collect_in_process() -> None:
    """megatron-core 0.19.2 collects the results of a save through a manager process, also when it
    writes in this process: started by spawn, it imports the whole program again (3 to 10 s at the
    first save) and outlives a crash. For a save that is not asynchronous a plain queue does."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]


def _last_line(error: BaseException) -> str:
    """What went wrong, without the tracebacks that torch puts into a CheckpointException."""
    lines = [line.strip() for line in f"{error}".splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _state(
    models: Sequence[Module], optimizer: Any, topo: Topology, loading: bool = False
) -> dict[str, Any]:
    """Sharded tensors by names that no layout shows in: layers by their global number."""
    metadata = {"dp_cp_group": topo.groups.dp_cp}
    state: dict[str, Any] = {
        "models": {
            i: model.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
            for i, model in enumerate(models)
        }
    }
    if optimizer is not None:
        state["optimizer"] = sharded_state(optimizer, state["models"], loading)
    return state
