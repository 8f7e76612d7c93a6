"""Hugging Face checkpoint folders: read slice by slice, write file by file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.megatron.checkpoint import write_whole
from pyrl_ext.ops.tensors import dtype_of
from pyrl_ext.parallel.hf_download import TOKENIZER_FILES
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.rollout.tensor_names import split_experts

INDEX = "model.safetensors.index.json"
FLOATS = {"F64", "F32", "BF16", "F16"}
SHARD_BYTES = 5_000_000_000  # usual on the Hub; the writing rank holds this much in host memory
STACKED = {"qwen3_vl_moe"}  # families whose checkpoints have a layer's experts in one tensor
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_MANY = 1 << 30  # from here on a progress bar is shown [bytes]


# reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file; slicing it reads only that slice.

    Args:
        data:   safetensors' handle of the tensor in the file.
        shape:  of this tensor.
        expert: index of this tensor's expert if the file stacks a layer's experts in one tensor.
        first:  first row of this tensor within that expert.
        turned: the file has an expert's rows as columns.
    """

    data: Any
    shape: torch.Size
    expert: int | None = None
    first: int = 0
    turned: bool = False

    def __getitem__(self, at: Any, /) -> Tensor:
        if self.expert is None:
            return self.data[at]
        rows, columns = at if isinstance(at, tuple) else (at, slice(None))
        start, stop, _ = rows.indices(self.shape[0])
        rows = slice(self.first + start, self.first + stop)
        return (
            self.data[self.expert, columns, rows].T
            if self.turned
            else self.data[self.expert, rows, columns]
        )


class SafetensorsFolder:
    """A HF checkpoint folder. Tensors are read only when they are sliced.

    The experts of a layer may be stored separately or as one tensor, in which their rows may be
    columns; here each has its own name.

    Args:
        hidden: numbers of a hidden state.

    Raises: FileNotFoundError or ValueError naming the file and the tensor if there are no weights,
        the index is wrong, a file is missing or truncated, or a tensor is in two files.
    """

    def __init__(self, folder: str | Path, hidden: int | None = None):
        self.folder = Path(folder)
        index = self._index()
        files = sorted({self.folder / name for name in index.values()})
        files = files or sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"{folder}: no *.safetensors here, expected a Hugging Face checkpoint folder"
            )
        self._stored: dict[str, StoredTensor] = {}
        file_of: dict[str, str] = {}
        for file in files:
            opened = open_safetensors(file)
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                if name in file_of:
                    raise ValueError(
                        f"checkpoint: {name} is in {self.folder}/{file_of[name]} and in "
                        f"{file.name}, expected it in one file. Keep the files of one checkpoint"
                    )
                file_of[name] = file.name
                self._stored |= _parts(name, opened.get_slice(name), hidden)
        if wrong := sorted(index.items() - file_of.items()):
            name, file = wrong[0]
            raise ValueError(
                f"checkpoint: {self.folder / INDEX} says that {name} is in {file}, but it is in "
                f"{file_of.get(name, 'none of its files')}. Fetch index and files again"
            )

    def _index(self) -> dict[str, str]:
        """Tensor -> file according to the index; empty if there is no index."""
        path = self.folder / INDEX
        if not path.exists():
            return {}
        try:
            index = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint: {path}: {type(error).__name__}: {error}, expected HF's JSON with "
                "weight_map"
            ) from error
        files = set(index.values())
        if missing := sorted(name for name in files if not (self.folder / name).is_file()):
            raise FileNotFoundError(
                f"checkpoint: {self.folder / missing[0]} does not exist ({len(missing)} of "
                f"{len(files)} files missing), expected every file that {INDEX} names. Fetch them "
                "again"
            )
        return index

    @property
    def names(self) -> set[str]:
        """All tensors of the checkpoint, one for each expert."""
        return set(self._stored)

    def __call__(self, name: str) -> StoredTensor:
        return self._stored[name]

    def check(self, table: Sequence[Weight], ignored: Mapping[str, str]) -> None:
        """Check that the folder holds the tensors of ``table``, unquantized, and no unknown ones.

        Args:
            ignored: patterns of names that may be there and are not loaded.

        Raises: ValueError naming quantized, missing or unknown tensors.
        """
        wanted = {name for w in table for name in w.hf_names}
        kinds = {n: self._stored[n].data.get_dtype() for n in wanted & self.names}
        if quantized := sorted(n for n, kind in kinds.items() if kind not in FLOATS):
            raise ValueError(
                f"checkpoint: {quantized[0]} in {self.folder} is {kinds[quantized[0]]} "
                f"({len(quantized)} tensors), expected one of {', '.join(sorted(FLOATS))}; "
                "quantized weights are not trained. Convert the checkpoint to bfloat16"
            )
        skipped = {n for n in self.names if any(re.fullmatch(p, n) for p in ignored)}
        missing = sorted(wanted - self.names)
        unknown = sorted(self.names - wanted - skipped)
        if missing or unknown:
            raise ValueError(
                f"checkpoint: {self.folder}: {len(missing)} tensors are missing {missing[:6]}, "
                f"{len(unknown)} are unknown {unknown[:6]}; expected exactly the names of the "
                "model's table"
            )


def open_safetensors(file: Path) -> Any:
    """safetensors' handle of a file. Raises: ValueError if it is not complete."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"checkpoint: {file} ({file.stat().st_size} bytes): {error}, expected a complete "
            "safetensors file. Fetch it again"
        ) from error


def _parts(name: str, data: Any, hidden: int | None) -> Iterator[tuple[str, StoredTensor]]:
    """The tensor as it is, or its experts one by one if it stacks those of a layer."""
    shape = data.get_shape()
    turned = len(shape) == 3 and hidden not in (None, shape[1 + name.endswith("up_proj")])
    experts = split_experts(name, [shape[0], *shape[:0:-1]] if turned else shape)
    if experts is None:
        yield name, StoredTensor(data, torch.Size(shape))
        return
    for single, expert, rows in experts:
        assert isinstance(expert, int)  # no adapter's factor is in a checkpoint of weights
        size = torch.Size((rows.stop - rows.start, shape[1 if turned else 2]))
        yield single, StoredTensor(data, size, expert, rows.start, turned)


# writing -----------------------------------------------------------------------------------------


def stacked(named: Iterable[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """``named`` with the experts of a layer in one tensor, [E, H, 2I] and [E, I, H], as published;
    holds the tensors of one layer's experts on the host."""
    parts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in named:
        found = _SINGLE.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        fused = f"{found[1]}.{'down' if found[3] == 'down' else 'gate_up'}_proj"
        held = parts.setdefault(fused, {})
        held[int(found[2]), found[3]] = tensor.detach().to("cpu", copy=True)
        kinds = ("down",) if found[3] == "down" else ("gate", "up")
        if len(held) == experts * len(kinds):
            each = (torch.cat([held[e, kind] for kind in kinds]).T for e in range(experts))
            yield fused, torch.stack(list(each))
            del parts[fused]


def save_safetensors(
    folder: Path,
    named: Iterable[tuple[str, Tensor]],
    hf: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint that transformers loads: ``config.json`` and ``model.safetensors``, or
    several ``model-00001-of-0000n.safetensors`` with their index.

    Args:
        named: each tensor is copied before the next one is requested.
        dtype: of the tensors in the files, except the routers' selection bias; None: unchanged.
        max_shard_bytes: of a file, and of host memory; a larger tensor gets a file to itself.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    files: list[list[str]] = []
    total = 0
    for tensors in _by_file(named, dtype, max_shard_bytes):
        save_file(tensors, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append([*tensors])
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors  # before the next ones are copied
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files):
        file = "model.safetensors"
        if len(files) > 1:
            file = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        part = (folder / f"{i}.part").rename(folder / file)
        shutil.copymode(folder / "config.json", part)  # safetensors: for the owner alone
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _by_file(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, limit: int
) -> Iterator[dict[str, Tensor]]:
    """``named`` on the host, in groups of at most ``limit`` bytes."""
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        kind = None if name.endswith("e_score_correction_bias") else dtype
        copied = tensor.detach().to("cpu", kind, copy=True).contiguous()
        size += copied.nbytes
        if tensors and size > limit:
            yield tensors
            tensors = {}
            size = copied.nbytes
        tensors[name] = copied
    yield tensors


def write_hf(
    folder: Path,
    named: Iterable[tuple[str, Tensor]],
    plan: Plan,
    topo: Topology,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """The main rank writes ``named``, the model's config, tokenizer and processor into ``folder``.

    The other ranks only iterate ``named``, whose collectives need them. If writing fails, the main
    rank iterates the rest, so that no other rank waits for it.

    Args:
        dtype: see `save_safetensors`; None: the plan's.
    """
    named = iter(named)
    if not topo.is_main:
        _drain(named)
        return
    name = dtype or plan.model.dtype
    kind = dtype_of(name)
    hf = written_config(plan, name)
    size = parameters(plan.sizes).total * kind.itemsize
    fit = stacked(named, plan.sizes.num_experts) if plan.model.family in STACKED else named
    shown = progress(fit, f"writing {folder}", None, size, plan.log.progress)
    try:
        save_safetensors(folder, shown, hf, kind, max_shard_bytes)
        _copy_tokenizer(plan, folder)
    finally:
        _drain(named)


def save_checkpoint_hf(
    folder: Path,
    named: Iterable[tuple[str, Tensor]],
    plan: Plan,
    topo: Topology,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """`write_hf`, complete or not at all; an existing folder is replaced.

    Communicates: as ``named`` does, and the ranks that failed.
    Raises: OSError on every rank if the main rank cannot write; the unfinished folder is deleted.
    """

    def write(writing: Path) -> None:
        write_hf(writing, named, plan, topo, dtype, max_shard_bytes)

    write_whole(folder, topo, write)


def written_config(plan: Plan, dtype: str) -> dict[str, Any]:
    """The HF config of the written checkpoint: its dtype, unquantized, with the MTP layers that the
    plan has."""

    def fitted(part: Mapping[str, Any]) -> dict[str, Any]:
        hf = {key: value for key, value in part.items() if key != "quantization_config"}
        for key in {"num_nextn_predict_layers", "mtp_num_hidden_layers"} & hf.keys():
            hf[key] = plan.num_mtp_layers
        for key in {"text_config", "vision_config"} & hf.keys():
            hf[key] = fitted(hf[key])
        return hf | dict.fromkeys({"dtype", "torch_dtype"} & hf.keys(), dtype)

    hf = fitted(plan.hf)
    return hf if {"dtype", "torch_dtype"} & hf.keys() else hf | {"dtype": dtype}


def _copy_tokenizer(plan: Plan, folder: Path) -> None:
    if plan.tokenizer_path is None:
        return
    for pattern in TOKENIZER_FILES:
        for file in Path(plan.tokenizer_path).glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _drain(named: Iterator[Any]) -> None:
    for _ in named:
        pass


def progress[T](
    things: Iterable[T], what: str, count: int | None, size: int, shown: bool
) -> Iterable[T]:
    """``things``, with a progress bar if their ``size`` [bytes] is large.

    Args:
        count: number of things; None: unknown.
        shown: False: no progress bar, whatever the size.
    """
    if not shown or size < _MANY:
        return things
    from rich.console import Console
    from rich.progress import track

    return track(things, what, count, console=Console(stderr=True))
