"""Checkpoints in megatron's dist_checkpointing format: any layout, complete or absent, verified.

A checkpoint is a folder ``step-<n>`` with megatron's files, the plan, the counters (written after
them) and ``digests.json``, the digest of each file. Loading verifies the files against the digests.
"""

from __future__ import annotations

import json
import queue
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn import Module

from pyrl_ext.megatron.optimizer import load_state, sharded_state
from pyrl_ext.megatron.te import with_local_keys, without_states
from pyrl_ext.parallel.atomic_write import find_damage, write_digests
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.parallel.saved_code import find_code
from pyrl_ext.parallel.suppress_warnings import quiet
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.units import size

COUNTERS = "counters.json"
PLAN = "plan.json"
_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_WRITING = ".writing"
_REPLACED = ".replaced"


class SavedModule(NamedTuple):
    """One module of this rank, as a checkpoint holds it.

    Args:
        optimizer: megatron's; None for a model that is not trained, or to leave the saved optimizer
            state unread.
        topo: of this rank in the module.
        adapters: they alone are saved, if there are any, with `sharded` and `load`.
        base: a digest of the weights that adapters belong to; None: there are none.
        copy: names a frozen copy of the module that is saved next to it; empty: the module itself.
    """

    models: Sequence[Module]
    optimizer: Any
    topo: Topology
    adapters: Any = None
    base: str | None = None
    copy: str = ""

    @property
    def prefix(self) -> str:
        """Prefix of the module's names in a checkpoint of several; empty for the language model."""
        parts = [self.copy, "" if self.topo.module == "llm" else self.topo.module]
        return "".join(f"{part}." for part in parts if part)

    def key(self, number: int) -> Any:
        """The key of a model chunk, or of a part of the optimizer, among those of all modules."""
        return f"{self.prefix}{number}" if self.prefix else number


def save(
    folder: Path,
    parts: Sequence[SavedModule],
    counters: Mapping[str, Any],
    plan: Plan,
    topo: Topology,
    *also: Callable[[Path], None],
) -> None:
    """`write_whole` of this rank's modules, counters, the plan and the digest of every file.

    Args:
        also: functions that write further files into the folder; every rank calls them.
    """
    from megatron.core import dist_checkpointing

    def write(writing: Path) -> None:
        _collect_in_process()
        with quiet():
            dist_checkpointing.save(_state(parts), str(writing))
        if topo.is_main:
            copies = sorted({part.copy for part in parts if part.copy})
            facts = {"layout": layout(topo), "plan": plan.fingerprint, "base": _base(parts)}
            facts["copies"] = copies
            (writing / PLAN).write_text(plan.to_json())
            (writing / COUNTERS).write_text(json.dumps({**counters, **facts}))

    def digest(writing: Path) -> None:
        write_digests(writing, topo)

    write_whole(folder, topo, write, *also, digest)


def write_whole(folder: Path, topo: Topology, *stages: Callable[[Path], None]) -> None:
    """Run ``stages`` on ``<folder>.writing``, then rename it to ``folder``.

    Communicates: as the stages do, and after each stage the ranks that failed.
    Raises: OSError naming the folder if a rank cannot write (no space, no permission); the
        unfinished folder is deleted, and a checkpoint of the same name stays as it was.
    """
    replaced = folder.with_name(folder.name + _REPLACED)

    def begin(writing: Path) -> None:
        if topo.is_main:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)

    def finish(writing: Path) -> None:
        if topo.is_main:
            shutil.rmtree(replaced, ignore_errors=True)
            if folder.exists():
                folder.rename(replaced)
            writing.rename(folder)
            shutil.rmtree(replaced, ignore_errors=True)

    for stage in (begin, *stages, finish):
        _on_all_ranks(stage, folder.with_name(folder.name + _WRITING), topo)


def _on_all_ranks(stage: Callable[[Path], None], writing: Path, topo: Topology) -> None:
    """Run ``stage``; if it fails on any rank, clean up and raise on every rank."""
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    problem = None
    reason = None
    try:
        stage(writing)
    except (Exception, CheckpointException) as error:
        problem = error
        reason = f"{_last_line(error)}; {_free(writing)}"
    failed = _problems(reason, topo)
    if not failed:
        return
    if topo.is_main:
        shutil.rmtree(writing, ignore_errors=True)
    folder = writing.with_suffix("")
    raise OSError(
        f"{folder} could not be written ({'; '.join(failed)}); the unfinished folder is deleted, "
        "what was there before is untouched. Make room for it"
    ) from problem


def _free(path: Path) -> str:
    """The space left where `path` is written; megatron's errors seldom say that there is none."""
    there = path
    while not there.exists():
        there = there.parent
    try:
        return f"{size(shutil.disk_usage(there).free)} free on its disk"
    except OSError as error:
        return f"its disk: {error}"


def _problems(problem: str | None, topo: Topology) -> list[str]:
    """``rank r: problem`` for every rank that has one. Communicates: one gather over the world."""
    problems = gather_objects(problem, topo.world)
    return [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]


def load(folder: Path, parts: Sequence[SavedModule], plan: Plan, topo: Topology) -> dict[str, Any]:
    """Verify ``folder``, then load this rank's modules from it; any layout may have written it.

    Copies that it does not hold stay as they are.

    Returns: the counters that `save` was given.
    Communicates: one gather over the world, then as megatron's load does.
    Raises: ConfigError listing the fields that differ between ``plan`` and the plan that wrote the
        checkpoint, and must not. ValueError on every rank, naming a damaged file.
    """
    counters = _verified(folder, parts, topo)
    if counters["plan"] != plan.fingerprint:
        plan.check_resumes(Plan.read(folder / PLAN))
    copies = ("", *copies_in(counters))
    _read(folder, [part for part in parts if part.copy in copies])
    return counters


def load_weights(
    folder: Path, parts: Sequence[SavedModule], topo: Topology, optimizer: bool
) -> None:
    """As `load`, for a run that starts from the checkpoint of another plan with the same model.

    Args:
        optimizer: with the optimizer state and its number of steps; otherwise the weights alone,
            with the precision in which the optimizer steps them.

    Raises: ValueError on every rank, naming a damaged file, or adapters of another base.
    """
    _verified(folder, parts, topo)
    _read(folder, parts, optimizer)


def _verified(folder: Path, parts: Sequence[SavedModule], topo: Topology) -> dict[str, Any]:
    """The counters of ``folder``, once its files are verified and its base is that of ``parts``."""
    _verify(folder, topo)
    counters = read_counters(folder)
    _check_base(folder, counters.get("base"), _base(parts))
    return counters


def _read(folder: Path, parts: Sequence[SavedModule], moments: bool = True) -> None:
    """Load this rank's modules; without ``moments`` the optimizer's are those of step 0."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    try:
        with quiet():
            models: dict[Any, Any] = {}
            for part in parts:
                models |= _models(part)
            state: Any = dist_checkpointing.load({"models": models}, str(folder))
            for part in parts:
                if part.optimizer is not None:
                    step = state["optimizer"]["step"] if moments else 0
                    load_state(part.optimizer, _models(part), folder, step, moments)
    except (Exception, CheckpointException) as error:
        reason = f"{type(error).__name__}: {_last_line(error)}"
        raise ValueError(
            f"checkpoint: {folder} cannot be read ({reason}), expected megatron's files as they "
            f"were written. {_instead(folder)}"
        ) from error
    for part in parts:
        if part.adapters:
            part.adapters.load(state["models"][part.key(0)])
            continue
        for i, model in enumerate(part.models):
            loaded = state["models"][part.key(i)].items()
            tensors = {name.removeprefix(part.prefix): x for name, x in loaded}
            model.load_state_dict(tensors | without_states(model))


def _base(parts: Sequence[SavedModule]) -> str | None:
    return next((part.base for part in parts if part.base), None)


def _check_base(folder: Path, saved: str | None, live: str | None) -> None:
    """Refuse adapters of another base, and a checkpoint of the other kind of run."""
    if saved == live:
        return
    kinds = [f"adapters of the base {x[:12]}" if x else "all weights" for x in (saved, live)]
    raise ValueError(
        f"checkpoint: {folder} holds {kinds[0]}, expected {kinds[1]}, as this run has. Start it "
        "with the model.weights (or seed) and the model.dtype of the run that wrote it, or in "
        "another run folder"
    )


def _verify(folder: Path, topo: Topology) -> None:
    """Check this rank's share of the files against the digests, and that reading runs no code."""
    try:
        problem = find_damage(folder, topo) or find_code(folder)
    except FileNotFoundError as error:
        problem = f"{error.filename}: missing, expected the digests of the other files"
    except (ValueError, OSError) as error:
        problem = str(error)
    if damaged := _problems(problem, topo):
        raise ValueError(
            f"checkpoint: {folder} is damaged ({'; '.join(damaged)}). {_instead(folder)}"
        )


def read_counters(folder: Path) -> dict[str, Any]:
    """The contents of ``counters.json``: the counters, and the run's ``layout`` and ``plan``."""
    return json.loads((folder / COUNTERS).read_bytes())


def copies_in(counters: Mapping[str, Any]) -> list[str]:
    """Names of the copies that a checkpoint with these counters holds."""
    return counters.get("copies", [])  # an earlier version wrote none


def _instead(folder: Path) -> str:
    """A sentence that says what to do if ``folder`` cannot be used."""
    older = [p for p in whole(folder.parent) if p != folder and _number(p) < _number(folder)]
    if older:
        return (
            f"The checkpoint before it, {older[-1]}, can be used: move {folder} away and start the "
            "same command again"
        )
    return "There is no checkpoint before it; a run starts over with resume=never"


def layout(topo: Topology) -> str:
    """The sizes of ``topo`` in words, such as ``dp 2 ep 2 on cpu``."""
    sizes = {name: getattr(topo, f"{name}_size") for name in ("dp", "tp", "pp", "vpp", "cp", "ep")}
    words = [f"{name} {size}" for name, size in sizes.items() if size not in (None, 1)]
    if topo.etp_size != topo.tp_size:
        words.append(f"etp {topo.etp_size}")
    return f"{' '.join(words) or 'one rank'} on {topo.device.type}"


def _number(folder: Path) -> int:
    """The step of a checkpoint folder; -1 for any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def whole(folder: Path) -> list[Path]:
    """The complete checkpoints under ``folder``, oldest first.

    A complete checkpoint is a folder ``step-<n>`` with counters.json; ``step-8.writing`` is none.
    """
    return [p for p in _numbered(folder) if (p / COUNTERS).is_file()]


def incomplete(folder: Path) -> list[Path]:
    """Folders ``step-<n>`` under ``folder`` without counters.json, oldest first."""
    return [p for p in _numbered(folder) if not (p / COUNTERS).is_file()]


def _numbered(folder: Path) -> list[Path]:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: a file, expected the folder of checkpoints. Move it away")
    return sorted((p for p in folder.glob("step-*") if _number(p) >= 0), key=_number)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under ``folder``."""
    return next(reversed(whole(folder)), None)


def find(path: Path) -> Path:
    """The checkpoint folder ``path``, or the newest complete checkpoint of the run folder ``path``.

    Raises: ValueError when there is none.
    """
    if (path / COUNTERS).is_file():
        return path
    if (newest := latest(path / "checkpoints")) is None:
        kind = "holds no complete checkpoint" if path.is_dir() else "is not a folder"
        hint = ""
        if any(path.glob("*.safetensors")):
            hint = ". It holds a Hugging Face model: name it as model.weights"
        raise ValueError(
            f"{path} {kind}, expected a run folder, such as runs/a, or a checkpoint folder, such "
            f"as runs/a/checkpoints/step-50{hint}"
        )
    return newest


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and the leftovers of interrupted saves."""
    for old in whole(folder)[:-keep]:
        shutil.rmtree(old)
    for left in folder.glob("step-*"):
        if left.suffix in (_WRITING, _REPLACED) and _NAME.fullmatch(left.stem):
            shutil.rmtree(left, ignore_errors=True)


def _collect_in_process() -> None:
    """Collect the results of a save in a plain queue instead of a manager process.

    megatron-core 0.19.2 starts that process even for a synchronous save. It is spawned, so it
    imports the whole program again (3 to 10 s at the first save), and it outlives a crash.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]


def _last_line(error: BaseException) -> str:
    """The message of ``error`` without the tracebacks that torch adds to a CheckpointException; the
    system's own words, such as No space left on device, where an OSError is behind it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        failures = getattr(cause, "failures", None) or {}  # rank -> (error, its stack)
        causes = [failure for failure, _ in failures.values()]
        cause = causes[0] if causes else cause.__cause__ or cause.__context__
    lines = f"{error}".strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _state(parts: Sequence[SavedModule]) -> dict[str, Any]:
    """Sharded tensors, whose names contain global layer numbers and do not depend on the layout."""
    state: dict[str, Any] = {"models": {}}
    for part in parts:
        state["models"] |= (models := _models(part))
        if part.optimizer is not None:
            saved = sharded_state(part.optimizer, models)
            whole = state.setdefault("optimizer", {"step": 0, "params": {}})
            whole["step"] = max(whole["step"], saved["step"])
            whole["params"] |= {part.key(i): x for i, x in saved["params"].items()}
    # the first rank writes the number of steps, which it lacks if all of its weights are frozen
    steps = gather_objects(state.get("optimizer", {}).get("step", 0), parts[0].topo.world)
    if "optimizer" in state:
        state["optimizer"]["step"] = max(steps)
    return state


def _models(part: SavedModule) -> dict[Any, dict[str, Any]]:
    if part.adapters:
        return {part.key(0): part.adapters.sharded(part.prefix)}
    metadata = {"dp_cp_group": part.topo.groups.dp_cp}
    return {
        part.key(i): with_local_keys(
            model.sharded_state_dict(prefix=part.prefix, metadata=metadata),  # type: ignore
            model.config,
        )
        for i, model in enumerate(part.models)
    }
