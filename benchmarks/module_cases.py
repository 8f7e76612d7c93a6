"""Small modules on different ranks, and their batch: the cases of `benchmarks.module_pipelines`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.enums import ModelType
from torch import Tensor

from pyrl_ext.pack.encoder_work import meeting

# numbers of a patch, of the encoder and the reader; tokens
PATCH = 12
WIDTH = 32
H = 64
TEXT = 16
MICROBATCHES = 6
SLOTS = 2
ENCODER_LAYERS = 2
READER_LAYERS = 4
AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True)
class Case:
    """``pp2 + 1 -> dp2``: sizes of the encoders, and of the modules that read all of them."""

    name: str
    frozen: bool = False

    @cached_property
    def modules(self) -> dict[str, dict[str, int]]:
        """Module -> its sizes, in the order of the ranks."""
        sides = [side.split(" + ") for side in self.name.removeprefix("frozen ").split(" -> ")]
        names = [f"{k}{i}" for k, side in zip("er", sides, strict=True) for i in range(len(side))]
        words = [word.split() for side in sides for word in side]
        return {
            name: {axis[:-1]: int(axis[-1]) for axis in each if axis != "1"}
            for name, each in zip(names, words, strict=True)
        }

    @property
    def readers(self) -> list[str]:
        return [name for name in self.modules if name[0] == "r"]

    @property
    def encoders(self) -> list[str]:
        return [name for name in self.modules if name[0] == "e"]

    @property
    def feeds(self) -> dict[str, list[str]]:
        return {name: self.readers if name[0] == "e" else [] for name in self.modules}

    @property
    def ranks(self) -> int:
        return sum(size_of(sizes) for sizes in self.modules.values())


CASES = [
    *map(Case, ("1 -> 1", "1 -> pp2", "pp2 -> 1", "pp2 -> pp2", "1 -> dp2", "dp2 -> 1")),
    *map(Case, ("dp2 -> dp2", "1 -> tp2", "1 -> cp2", "1 -> pp2 vpp2", "dp3 -> 1", "dp2 -> cp2")),
    *map(Case, ("1 + 1 -> 1", "pp2 + 1 -> 1", "1 -> 1 + 1", "1 -> 1 + pp2", "1 + 1 -> 1 + 1")),
    *(Case(name, frozen=True) for name in ("frozen 1 -> pp2", "frozen pp2 -> 1")),
]


def size_of(sizes: dict[str, int]) -> int:
    return int(np.prod([sizes.get(axis, 1) for axis in AXES]))


# the batch ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Image:
    """``rows`` rows of the stream from ``first`` on."""

    first: int
    rows: int

    @property
    def patches(self) -> Tensor:
        return torch.randn(self.rows, PATCH, generator=torch.Generator().manual_seed(self.first))


@cache
def batch(kinds: int) -> tuple[list[list[range]], list[list[list[list[Image]]]]]:
    """(rows of each slot of each microbatch, images of each kind in it); the third has none."""
    g = np.random.default_rng(0)
    at = 0
    slots = []
    images = []
    for micro in range(MICROBATCHES):
        slots.append([])
        images.append([])
        for _ in range(SLOTS):
            first = at
            at = at + TEXT
            found = [[] for _ in range(kinds)]
            for number in range(0 if micro == 2 else int(g.integers(1, 4)) * kinds):
                rows = int(g.integers(1, 8))
                found[number % kinds].append(Image(at, rows))
                at += rows + 1
            slots[-1].append(range(first, at))
            images[-1].append(found)
    return slots, images


def rows_of(case: Case, reader: str, micro: int, replica: int, shard: int) -> np.ndarray:
    """Rows of the stream on a rank: a replica's slots, cut among its tp x cp ranks."""
    sizes = case.modules[reader]
    slots = batch(len(case.encoders))[0][micro]
    mine = np.array_split(np.arange(SLOTS), sizes.get("dp", 1))[replica]
    rows = np.concatenate([np.asarray(slots[i]) for i in mine])
    return np.array_split(rows, sizes.get("tp", 1) * sizes.get("cp", 1))[shard]


def images_of(case: Case, encoder: str, micro: int, replica: int) -> list[Image]:
    """The images that a replica encodes: contiguous shares in the order of the readers' replicas,
    as the bridge of megatron wants them."""
    kind = case.encoders.index(encoder)
    slots = [each[kind] for each in batch(len(case.encoders))[1][micro]]
    encoders = case.modules[encoder].get("dp", 1)
    readers = case.modules[case.readers[0]].get("dp", 1)
    if readers >= encoders:
        return [i for s in np.array_split(np.arange(SLOTS), encoders)[replica] for i in slots[s]]
    each = encoders // readers
    mine = np.array_split(np.arange(SLOTS), readers)[replica // each]
    images = [image for slot in mine for image in slots[slot]]
    return [images[i] for i in np.array_split(np.arange(len(images)), each)[replica % each]]


def stream_of(images: list[Image]) -> np.ndarray:
    """Row of the stream of each row that the images become."""
    return np.concatenate([np.empty(0, int), *(np.arange(i.rows) + i.first for i in images)])


def drawn(name: str, *shape: int) -> torch.nn.Parameter:
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.nn.Parameter(torch.randn(*shape, generator=g) / shape[-1] ** 0.5)


# the modules -------------------------------------------------------------------------------------


class Stage(torch.nn.Module):
    """Layers ``layers`` of a module, with what megatron's schedules ask of a model."""

    def __init__(self, name: str, layers: range, of: int, config: Any):
        super().__init__()
        self.name = name
        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        self.first = not layers[0]
        self.last = layers[-1] == of - 1
        self.vp_stage = None
        self.given: Any = None
        width = WIDTH if name[0] == "e" else H
        self.named = {f"{name}.{i}": drawn(f"{name}.{i}", width, width) for i in layers}
        if self.first:
            rows = PATCH if name[0] == "e" else 100
            self.named[f"{name}.embedding"] = drawn(f"{name}.embedding", rows, width)
        if self.last and name[0] == "e":
            self.named[f"{name}.head"] = drawn(f"{name}.head", WIDTH, H)
        self.held = torch.nn.ParameterList(self.named.values())

    def set_input_tensor(self, tensor: Any) -> None:
        self.given = tensor[0] if isinstance(tensor, list) else tensor

    def through(self, x: Tensor) -> Tensor:
        for name, weight in self.named.items():
            if name.rpartition(".")[2].isdigit():
                x = x + torch.tanh(x @ weight)
        return x

    def inner(self) -> Tensor:
        """The output of the stage before: megatron's communicator of modules hands on a mapping,
        and in it a list."""
        given = self.given[self.name] if isinstance(self.given, dict) else self.given
        return given[0] if isinstance(given, list) else given


class Encoder(Stage):
    def forward(self, images: list[Image]) -> Tensor:
        """Without images, a row of zeros that is cut off at the end."""
        if self.first:
            x = torch.cat([i.patches for i in images]) if images else torch.zeros(1, PATCH)
            x = (x @ self.named[f"{self.name}.embedding"])[:, None]
        else:
            x = self.inner()
        x = self.through(x)
        if not self.last:
            return x
        rows = sum(image.rows for image in images)
        return (x[:, 0] @ self.named[f"{self.name}.head"])[:rows]


class Reader(Stage):
    def forward(self, rows: np.ndarray, taken: list[tuple[Tensor, Tensor]]) -> Tensor:
        """
        Args:
            taken: (places in ``rows``, values of an encoder there).
        """
        if self.first:
            x = self.named[f"{self.name}.embedding"][torch.from_numpy(rows % 100)]
            for places, values in taken:
                x = x.index_copy(0, places, values)
            x = x[:, None]
        else:
            x = self.inner()
        return self.through(x)

    def loss(self, rows: np.ndarray, x: Tensor) -> Tensor:
        weights = torch.sin(torch.from_numpy(rows).float() + len(self.name))
        return (x[:, 0].square().sum(1) * weights).sum()


def build(case: Case, name: str, stage: int, config: Any) -> list[Any]:
    """The chunks of a stage."""
    sizes = case.modules[name]
    vpp = sizes.get("vpp", 1)
    pp = sizes.get("pp", 1)
    of, kind = (ENCODER_LAYERS, Encoder) if name[0] == "e" else (READER_LAYERS, Reader)
    each = of // (vpp * pp)
    chunks = []
    for chunk in range(vpp):
        first = (chunk * pp + stage) * each
        chunks.append(kind(name, range(first, first + each), of, config))
        chunks[-1].vp_stage = chunk if vpp > 1 else None
        chunks[-1].requires_grad_(not (case.frozen and name[0] == "e"))
    return chunks


def alone(group: Any, case: Case) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by plain autograd."""
    one = Case(" -> ".join(" + ".join("1" for _ in side) for side in (case.encoders, case.readers)))
    built = {name: build(one, name, 0, None)[0] for name in one.modules}
    total = torch.zeros(())
    for micro in range(MICROBATCHES):
        for reader in one.readers:
            rows = rows_of(one, reader, micro, 0, 0)
            taken = []
            for encoder in one.encoders:
                images = images_of(one, encoder, micro, 0)
                route = meeting(stream_of(images), rows)
                taken.append((route.dest, built[encoder](images).index_select(0, route.source)))
            total = total + built[reader].loss(rows, built[reader](rows, taken))
    total.backward()
    found = {n: p.grad for m in built.values() for n, p in m.named.items() if p.grad is not None}
    return float(total.detach()), found
