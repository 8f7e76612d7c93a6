"""Folders of PEFT adapters: the factors of a model as transformers + peft and engines read them.

Factors have the names of `models.lora_table`: ``<module>.lora_A.weight`` [r, in] and
``<module>.lora_B.weight`` [out, r], for each HF module and each routed expert. A file has the
routed experts of a layer in one of two forms:

- ``single``: under these names.
- ``fused``: as two pairs, ``experts.base_layer`` for gate and up, ``experts`` for down. A is
  [E * r, in] with the experts slowest, B [out, r * E] with the experts fastest. An A for each of
  gate and up makes theirs one pair of rank 2 r: A stacked, B block diagonal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pyrl_ext.megatron.checkpoint import write_whole
from pyrl_ext.models.hf_folder import StoredTensor, open_safetensors
from pyrl_ext.models.shards import Sliceable
from pyrl_ext.ops.dtypes import dtype_of
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.sizes import ModelSizes
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.plan.schema.lora import Lora

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
Form = Literal["single", "fused"]
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"base_model\.model\.(.*)\.lora_([AB])\.weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.lora_([AB])\.weight")
_SHARED = re.compile(r"(.*\.experts)\.((?:gate|up|down)_proj\..*)")  # by all experts of a layer
_PAIR = re.compile(r"(.*\.experts)(?:\.base_layer)?")
_BELOW_LAYER = re.compile(r".*\.layers\.\d+\.(.*)")
_KINDS = ("gate", "up", "down")
_STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # transformers' parameters
# keys of a config that are read, or that say nothing about W x + scale B A x beyond what the
# tensors say; any other must be unset
_KNOWN = {
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "ensure_weight_tying",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
}
# of an adapter whose base weights are the checkpoint's; pissa, for one, leaves others
_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")


# reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OfPair:
    """A factor of one expert in a fused pair, which is read whole."""

    pair: Callable[[], Mapping[str, Tensor]]
    name: str
    shape: torch.Size

    def __getitem__(self, at: Any, /) -> Tensor:
        return self.pair()[self.name][at]


class PeftFolder:
    """A PEFT adapter of either form. Called with the name of a factor, it reads that factor.

    Args:
        lora:    the run's, whose ranks and scales the adapter must have.
        table:   the rows of all factors of the model.
        ignored: patterns of checkpoint names that may be there and are not loaded.

    Attributes:
        one_a: ``experts`` modules whose gate and up have one A in the file: both start with it.

    Raises: FileNotFoundError or ValueError naming what is missing or unknown, or what the run's
        adapters cannot hold: another formula, rank or scale.
    """

    def __init__(
        self,
        folder: str | Path,
        lora: Lora,
        sizes: ModelSizes,
        table: Sequence[Weight],
        ignored: Mapping[str, str],
    ):
        self.folder = Path(folder)
        self.lora = lora
        self.sizes = sizes
        self.one_a: list[str] = []
        for file in (self.folder / CONFIG, self.folder / TENSORS):
            if not file.is_file():
                raise FileNotFoundError(f"adapter: {file} does not exist, expected PEFT's files")
        self._config = _read_config(self.folder / CONFIG)
        self._opened = open_safetensors(self.folder / TENSORS)
        self._held: dict[str, dict[str, Tensor]] = {}
        self._found: dict[str, Sliceable] = {}
        for module in self._modules():
            pair = _PAIR.fullmatch(module)
            self._found |= self._of_pair(module, pair[1]) if pair else self._of_module(module)
        self._check_names(table, ignored)

    def __call__(self, name: str) -> Sliceable:
        first, *others = (self._found[n] for n in _of_experts(name, self.sizes.num_experts))
        if not all(torch.equal(first[:], other[:]) for other in others):
            raise ValueError(
                f"adapter: {self.folder}: {name} differs between experts, expected one for all "
                "with lora.experts: shared_outer. Set lora.experts to per_expert"
            )
        return first

    def _modules(self) -> list[str]:
        """The modules of the file, each with both factors."""
        letters: dict[str, str] = {}
        wrong = list[str]()
        for key in sorted(self._opened.keys()):
            if match := _FACTOR.fullmatch(key):
                letters[match[1]] = letters.get(match[1], "") + match[2]
            else:
                wrong.append(key)
        if wrong := wrong + [module for module, both in letters.items() if both != "AB"]:
            raise ValueError(
                f"adapter: {self.folder / TENSORS}: {len(wrong)} names {wrong[:6]}, expected pairs "
                f"of {_PREFIX}<module>.lora_A.weight and lora_B.weight only"
            )
        return list(letters)

    def _stored(self, module: str) -> tuple[StoredTensor, StoredTensor]:
        """A and B of a module, as they are in the file."""
        slices = (self._opened.get_slice(f"{_PREFIX}{module}.lora_{x}.weight") for x in "AB")
        a, b = (StoredTensor(data, torch.Size(data.get_shape())) for data in slices)
        return a, b

    def _of_module(self, module: str) -> dict[str, Sliceable]:
        a, b = self._stored(module)
        self._check_scale(module, a.shape[0])
        return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}

    def _of_pair(self, module: str, experts: str) -> dict[str, Sliceable]:
        """The factors of single experts in a fused pair."""
        (rows, inputs), (outputs, columns) = (tensor.shape for tensor in self._stored(module))
        number = self.sizes.num_experts
        hidden = self.sizes.hidden_size
        width = self.sizes.moe_intermediate_size
        double = (inputs, outputs) == (hidden, 2 * width)
        if not (double or (inputs, outputs) == (width, hidden)) or rows != columns or rows % number:
            raise ValueError(
                f"adapter: {self.folder}: {module} has A [{rows}, {inputs}] and B [{outputs}, "
                f"{columns}], expected A [E r, in] and B [out, r E] of {number} experts, in and "
                f"out {hidden} and {2 * width} or {width} and {hidden}"
            )
        rank = rows // number
        kinds = ("gate", "up") if double else ("down",)
        halves = double and rank == 2 * self.lora.rank_of(True)
        self._check_scale(f"{experts}.{'gate_up' if double else 'down'}_proj", rank, halves)
        if double and not halves:
            self.one_a.append(experts)
        size = rank // (1 + halves)
        read = partial(self._read_pair, module, kinds, halves)
        shapes = {"A": (size, inputs), "B": (outputs // len(kinds), size)}
        return {
            name: _OfPair(read, name, torch.Size(shapes[letter]))
            for kind in kinds
            for e in range(number)
            for letter in shapes
            for name in [f"{experts}.{e}.{kind}_proj.lora_{letter}.weight"]
        }

    def _read_pair(self, module: str, kinds: Sequence[str], halves: bool) -> dict[str, Tensor]:
        """The factors of each expert in a pair; held are those of two pairs, a layer's."""
        if module not in self._held:
            while len(self._held) > 1:
                del self._held[next(iter(self._held))]
            a, b = (tensor[:] for tensor in self._stored(module))
            number = self.sizes.num_experts
            experts = module.removesuffix(".base_layer")
            self._held[module] = _split(a, b, experts, number, kinds, halves)
        return self._held[module]

    def _check_scale(self, module: str, rank: int, halves: bool = False) -> None:
        """Refuse what the run's ranks or alpha cannot hold; ``halves``: gate and up stacked."""
        config = self._config
        expert = ".experts." in module
        mine = self.lora.rank_of(expert)
        key = "expert_rank" if expert else "rank"
        declared = _by_pattern(config.get("rank_pattern"), module, config["r"])
        if rank != mine * (1 + halves) or declared != rank:
            raise ValueError(
                f"adapter: {self.folder}: {module} has rank {rank} ({declared} by {CONFIG}), "
                f"expected {mine} as in lora.{key}. Set lora.{key} to that of the adapter"
            )
        scale = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]) / rank
        if abs(scale - self.lora.scale_of(expert)) > 1e-6 * scale:
            raise ValueError(
                f"adapter: {self.folder}: {module} is added times {scale:g}, expected "
                f"{self.lora.scale_of(expert):g}, which is lora.alpha / lora.{key}. Set lora.alpha "
                f"to {scale * mine:g}"
            )

    def _check_names(self, table: Sequence[Weight], ignored: Mapping[str, str]) -> None:
        number = self.sizes.num_experts
        wanted = {x for row in table for name in row.hf_names for x in _of_experts(name, number)}
        missing = sorted(wanted - self._found.keys())
        beside = self._found.keys() - wanted
        beside = {n for n in beside if not any(re.fullmatch(p, n) for p in ignored)}
        # a module whose B is zero is none: the forms have gate, up and down of an expert together
        unknown = sorted(
            n for n in beside if self._found[re.sub(r"lora_A(?=\.weight$)", "lora_B", n)][:].any()
        )
        if missing or unknown:
            kinds = sorted({n.split(".")[-3] for n in self._found})
            raise ValueError(
                f"adapter: {self.folder}: {len(missing)} factors are missing {missing[:6]}, "
                f"{len(unknown)} are unknown {unknown[:6]}; expected exactly those of lora.targets "
                f"and lora.experts. It has {', '.join(kinds)}"
            )


def _of_experts(name: str, number: int) -> list[str]:
    """The names of a factor in a file: one, or as many as experts share it."""
    shared = _SHARED.fullmatch(name)
    return [f"{shared[1]}.{e}.{shared[2]}" for e in range(number)] if shared else [name]


def _read_config(path: Path) -> dict[str, Any]:
    """The adapter's config. Raises: ValueError if it is of another kind than plain LoRA."""
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
        kind = config["peft_type"]
        _ = config["r"] + 0
        _ = config["lora_alpha"] + 0
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"adapter: {path}: {type(error).__name__}: {error}, expected JSON of PEFT with r"
        ) from error
    plain = {"bias": ("none", None), "init_lora_weights": _INITIAL, "peft_type": ("LORA",)}
    wrong = {
        key: value
        for key, value in config.items()
        if (value not in plain[key] if key in plain else value and key not in _KNOWN)
    }
    if wrong:
        raise ValueError(
            f"adapter: {path} has {wrong}, expected a LoRA adapter that adds lora_alpha / r B A x "
            f"to W x and nothing else (peft_type is {kind})"
        )
    return config


def _by_pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """The value of the first pattern that PEFT finds in a module's name, or its parameter's."""
    for pattern, value in (patterns or {}).items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in (module, f"{module}.weight")):
            return value
    return default


def _split(
    a: Tensor, b: Tensor, experts: str, number: int, kinds: Sequence[str], halves: bool
) -> dict[str, Tensor]:
    """The factors of single experts in a pair; the inverse of `_fused`.

    Raises: ValueError if ``halves``, and B is not block diagonal.
    """
    a = a.unflatten(0, (number, -1))
    b = b.unflatten(1, (-1, number)).permute(2, 0, 1)
    found: dict[str, Tensor] = {}
    outputs, rank = (n // len(kinds) for n in b.shape[1:])
    for i, kind in enumerate(kinds):
        rows = slice(i * outputs, (i + 1) * outputs)
        ranks = slice(None)
        if halves:
            ranks = slice(i * rank, (i + 1) * rank)
            other = slice((1 - i) * rank, (2 - i) * rank)
            if b[:, rows, other].any():
                raise ValueError(
                    f"adapter: {experts}: gate and up share factors of rank {2 * rank}, expected "
                    f"{rank} for each. Set lora.expert_rank to {2 * rank}: both start with all"
                )
        for e in range(number):
            found[f"{experts}.{e}.{kind}_proj.lora_A.weight"] = a[e, ranks]
            found[f"{experts}.{e}.{kind}_proj.lora_B.weight"] = b[e, rows, ranks]
    return found


# writing -----------------------------------------------------------------------------------------


def save_adapter(
    folder: Path,
    named: Iterable[tuple[str, Tensor]],
    plan: Plan,
    topo: Topology,
    dtype: str | None = None,
    form: Form = "single",
) -> None:
    """The main rank writes the factors ``named`` as a PEFT adapter, complete or not at all, holding
    them on the host; the other ranks only iterate them.

    Args:
        dtype: of the factors in the file; None: unchanged.

    Communicates: as ``named`` does, and whether a rank failed.
    Raises: OSError on every rank if the main rank cannot write.
    """
    kind = None if dtype is None else dtype_of(dtype)
    factors = {n: t.detach().to("cpu", kind, copy=True) for n, t in named if topo.is_main}

    def write(writing: Path) -> None:
        if topo.is_main:
            write_adapter(writing, factors, plan, form)

    write_whole(folder, topo, write)


def write_adapter(folder: Path, factors: Mapping[str, Tensor], plan: Plan, form: Form) -> None:
    """Write ``factors`` and the config that PEFT needs into ``folder``."""
    from safetensors.torch import save_file

    number = plan.sizes.num_experts
    whole = _whole_experts(factors, number)
    tensors = _fused(whole, number) if form == "fused" else whole
    held = {_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / TENSORS, metadata={"format": "pt"})
    config = _adapter_config(plan, whole, form)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _whole_experts(factors: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """``factors`` with those that experts share once for each, and zeros for what experts lack:
    peft has adapters of their gate, up and down together, or none."""
    found: dict[str, Tensor] = {}
    for name, tensor in factors.items():
        names = _of_experts(name, number)
        found |= {each: tensor.clone() if len(names) > 1 else tensor for each in names}
    for module in _experts_in(found):
        some = next(kind for kind in _KINDS if f"{module}.0.{kind}_proj.lora_A.weight" in found)
        a, b = (found[f"{module}.0.{some}_proj.lora_{letter}.weight"] for letter in "AB")
        (rank, inputs), outputs = a.shape, len(b)
        for kind in _KINDS:
            turned = (kind == "down") != (some == "down")
            here, there = (outputs, inputs) if turned else (inputs, outputs)
            for e in range(number):
                name = f"{module}.{e}.{kind}_proj.lora_"
                found.setdefault(f"{name}A.weight", a.new_zeros(rank, here))
                found.setdefault(f"{name}B.weight", a.new_zeros(there, rank))
    return found


def _experts_in(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(m[1] for name in names if (m := _EXPERT.fullmatch(name))))


def _fused(factors: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """``factors`` in the form of that name."""
    found = {name: tensor for name, tensor in factors.items() if not _EXPERT.fullmatch(name)}
    for module in _experts_in(factors):
        names = (f"{module}.{{}}.{kind}_proj.lora_{x}.weight" for kind in _KINDS for x in "AB")
        gate_a, gate_b, up_a, up_b, down_a, down_b = (
            torch.stack([factors[name.format(e)] for e in range(number)]) for name in names
        )
        zero = torch.zeros_like(gate_b)
        both = torch.cat([torch.cat([gate_b, zero], 2), torch.cat([zero, up_b], 2)], 1)
        pairs = (".base_layer", torch.cat([gate_a, up_a], 1), both), ("", down_a, down_b)
        for inner, a, b in pairs:
            found[f"{module}{inner}.lora_A.weight"] = a.flatten(0, 1)
            found[f"{module}{inner}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return found


def _adapter_config(plan: Plan, factors: Iterable[str], form: Form) -> dict[str, Any]:
    assert plan.lora is not None
    rank = plan.lora.rank
    routed = plan.lora.rank_of(True)
    alpha = plan.lora.alpha
    modules = {name.rsplit(".lora_", 1)[0] for name in factors}
    below = {_BELOW_LAYER.sub(r"\1", module) for module in modules if ".experts." not in module}
    # in models with experts peft 0.21 takes a module called gate_proj, up_proj or down_proj for the
    # experts', and leaves out all others of that name; as parameters it has them
    mlps = {name for name in below if plan.sizes.num_experts and name.startswith("mlp.")}
    kinds = {name.rsplit(".", 1)[-1] for name in below - mlps}
    parameters = {f"{name}.weight" for name in mlps}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    if any(".experts." in module for module in modules):
        if form == "fused":
            both, down = _STACKED
            ranks = {both: 2 * routed, down: routed}
            alphas = {both: 2 * alpha}
            parameters |= set(_STACKED)
        else:  # peft fuses these experts itself: it takes 2 r for them, whatever a pattern says
            ranks = dict.fromkeys(sorted(kinds | parameters), rank) if rank != routed else {}
            rank = routed
            kinds |= {f"{kind}_proj" for kind in _KINDS}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": plan.model.weights,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(kinds),
        "target_parameters": sorted(parameters),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }
