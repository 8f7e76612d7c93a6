"""Reading a checkpoint that a stranger wrote calls nothing of the stranger's."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from pyrl_ext.megatron import checkpoint
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.atomic_write import write_digests
from pyrl_ext.parallel.saved_code import find_code
from pyrl_ext.trainer.policy import Policy
from tests.helpers.tiny import tiny_plan

pytestmark = pytest.mark.multiprocess

OBJECT = "common_state/shard_0_1"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    with topology.start(tiny_plan()) as topo:
        Policy.build(tiny_plan(), topo).save(folder)
    return folder


class Opens:
    """Is unpickled by a call of a class that torch's reader has next to the metadata's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return FileSystemReader, ("elsewhere",)


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, ran: Path):
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.ran}",)


def plant_in_metadata(folder: Path, evil: Planted) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(evil))


def plant_inside_metadata(folder: Path, evil: object) -> None:
    metadata = read_metadata(folder)
    metadata.planner_data = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_as_object(folder: Path, evil: Planted) -> None:
    plant_data(folder, evil, read_metadata(folder), OBJECT)


def plant_as_tensor(folder: Path, evil: Planted) -> None:
    """In the place of a tensor, which the metadata calls an object."""
    metadata = read_metadata(folder)
    name = "embedding.word_embeddings.weight"
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    plant_data(folder, evil, metadata, name)


def plant_outside(folder: Path, evil: object) -> None:
    """In a file that the digests do not list."""
    torch.save(evil, folder.parent / "evil")
    metadata = read_metadata(folder)
    for index, place in metadata.storage_data.items():
        if index.fqn == OBJECT:
            length = (folder.parent / "evil").stat().st_size
            moved = replace(place, relative_path="../evil", offset=0, length=length)
            metadata.storage_data[index] = moved
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_in_json(folder: Path, evil: Planted) -> None:
    for name in ("metadata.json", "counters.json", "plan.json"):
        (folder / name).write_bytes(pickle.dumps(evil))


def plant_data(folder: Path, evil: Planted, metadata: Any, name: str) -> None:
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    torch.save(evil, file)
    added = file.read_bytes()
    file.write_bytes(data + added)
    for index, place in metadata.storage_data.items():
        if index.fqn == name:
            metadata.storage_data[index] = replace(place, offset=len(data), length=len(added))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def read_metadata(folder: Path) -> Any:
    return FileSystemReader(folder).read_metadata()


# -> True if megatron and torch run it
PLANTS = {
    plant_in_metadata: True,
    plant_inside_metadata: True,
    plant_as_object: True,
    plant_as_tensor: False,
    plant_outside: True,
    plant_in_json: False,
}


@pytest.mark.parametrize(
    ("plant", "runs"), PLANTS.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_load_runs_no_code_of_a_checkpoint(
    plant: Callable[[Path, Planted], None],
    runs: bool,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Also where its digests were written again. Without the check, most of these run."""
    folder = shutil.copytree(saved, tmp_path / "step-1")
    ran = tmp_path / "ran"
    plant(folder, Planted(ran))
    with topology.start(tiny_plan()) as topo:
        (folder / "digests.json").unlink()
        write_digests(folder, topo)
        policy = Policy.build(tiny_plan(), topo, initial=False)
        for call in (policy.load, partial(policy.start_from, optimizer=True)):
            with pytest.raises(ValueError) as caught:
                call(folder)
            assert not ran.exists()
        if runs:
            assert "somebody may have changed" in str(caught.value)
            monkeypatch.setattr(checkpoint, "find_code", lambda folder: None)
            with contextlib.suppress(Exception):
                policy.load(folder)
            assert ran.exists()


def test_load_reads_no_other_metadata_of_the_folder(saved: Path, tmp_path: Path):
    folder = shutil.copytree(saved, tmp_path / "step-1")
    ran = tmp_path / "ran"
    (folder / "__0.metadata").write_bytes(pickle.dumps(Planted(ran)))
    with topology.start(tiny_plan()) as topo:
        (folder / "digests.json").unlink()
        write_digests(folder, topo)
        with pytest.raises(ValueError, match=r"__0\.metadata: it names posix\.system"):
            Policy.build(tiny_plan(), topo, initial=False).load(folder)
    assert not ran.exists()


def test_find_code_refuses_other_places_and_classes(saved: Path, tmp_path: Path):
    """Whatever they hold."""
    assert find_code(saved) is None
    folder = shutil.copytree(saved, tmp_path / "step-1")
    plant_outside(folder, {"step": 1})
    assert "is in '../evil', outside of the checkpoint" in (find_code(folder) or "")
    folder = shutil.copytree(saved, tmp_path / "step-2")
    plant_inside_metadata(folder, Opens())
    assert "names torch.distributed.checkpoint.filesystem.FileSystemReader" in (
        find_code(folder) or ""
    )
