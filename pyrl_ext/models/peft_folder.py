"""Folders of PEFT adapters: the factors of a model as transformers + peft and engines read them.

Factors have the names of `models.lora_table`: ``<module>.lora_A.weight`` [r, in] and
``<module>.lora_B.weight`` [out, r], for each HF module and each routed expert. They are written
under these names. peft itself saves the routed experts of a layer as two fused pairs, which are
read too: ``experts.base_layer`` for gate and up, ``experts`` for down. A is [E * r, in] with the
experts slowest, B [out, r * E] with the experts fastest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.megatron.checkpoint import write_whole
from pyrl_ext.models.hf_folder import open_safetensors
from pyrl_ext.ops.tensors import dtype_of
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.lora import expert_linears
from pyrl_ext.plan.model.sizes import ModelSizes
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.plan.schema.lora import Lora

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"base_model\.model\.(.*)\.lora_([AB])\.weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.lora_([AB])\.weight")
_SHARED = re.compile(r"(.*\.experts)\.([a-z]\w*\..*)")  # by all experts of a layer
_FUSED = re.compile(r"(.*\.experts)(?:\.base_layer)?")
_BELOW_LAYER = re.compile(r".*\.layers\.\d+\.(.*)")
_KINDS = ("gate", "up", "down")
# keys of a config that are read, or that say nothing about W x + scale B A x beyond what the
# tensors say; any other must be unset
_KNOWN = set(
    [
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
    ]
)
# of an adapter whose base weights are the checkpoint's; pissa, for one, leaves others
_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")


# reading -----------------------------------------------------------------------------------------


def read_adapter(
    folder: Path,
    lora: Lora,
    sizes: ModelSizes,
    table: Sequence[Weight],
    ignored: Iterable[str],
) -> dict[str, Tensor]:
    """The factors of a PEFT adapter by their names in ``table``, mapped from the file.

    Where gate and up of the experts share A, both start with it.

    Args:
        lora:    the run's, whose ranks and scales the adapter must have.
        table:   the rows of all factors of the model.
        ignored: patterns of checkpoint names that may be there and are not loaded.

    Raises: FileNotFoundError or ValueError naming what is missing or unknown, or what the run's
        adapters cannot hold: another formula, rank or scale.
    """
    for file in (folder / CONFIG, folder / TENSORS):
        if not file.is_file():
            raise FileNotFoundError(f"adapter: {file} does not exist, expected PEFT's files")
    config = _read_config(folder / CONFIG)
    factors: dict[str, Tensor] = {}
    for module, (a, b) in _read_modules(folder / TENSORS).items():
        fused = _FUSED.fullmatch(module)
        if fused is None:
            _check_scale(folder, module, config, lora, len(a))
            factors[f"{module}.lora_A.weight"] = a
            factors[f"{module}.lora_B.weight"] = b
            continue
        number = sizes.num_experts
        kinds = _fused_kinds(f"{folder}: {module}", a, b, sizes)
        # 2: gate and up have an A each
        multiple = 2 if kinds == _KINDS[:2] and len(a) == 2 * number * lora.rank_of(True) else 1
        _check_scale(
            folder, f"{fused[1]}.{'_'.join(kinds)}_proj", config, lora, len(a) // number, multiple
        )
        for name, tensor in _split_fused(fused[1], a, b, number, kinds, multiple).items():
            factors[sizes.hf_part(name)] = tensor  # peft's is of transformers' module
    _check_names(folder, factors, table, sizes.num_experts, ignored)
    names = [name for row in table for name in row.hf_names]
    return {name: _one(folder, name, factors, sizes.num_experts) for name in names}


def _read_modules(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each module of the file."""
    stored = open_safetensors(path)
    modules: dict[str, dict[str, Tensor]] = {}
    wrong: list[str] = []
    for key in sorted(stored.keys()):
        if match := _FACTOR.fullmatch(key):
            modules.setdefault(match[1], {})[match[2]] = stored.get_tensor(key)
        else:
            wrong.append(key)
    wrong += [module for module, pair in modules.items() if len(pair) < 2]
    if wrong:
        raise ValueError(
            f"adapter: {path}: {len(wrong)} names {wrong[:6]}, expected pairs of "
            f"{_PREFIX}<module>.lora_A.weight and lora_B.weight only"
        )
    return {module: (pair["A"], pair["B"]) for module, pair in modules.items()}


def _fused_kinds(where: str, a: Tensor, b: Tensor, sizes: ModelSizes) -> tuple[str, ...]:
    """The linears of a fused pair of experts, by its shapes."""
    rows, inputs = a.shape
    outputs, columns = b.shape
    hidden = sizes.hidden_size
    width = sizes.moe_intermediate_size
    kinds = {(hidden, 2 * width): _KINDS[:2], (width, hidden): _KINDS[2:]}
    if (inputs, outputs) not in kinds or rows != columns or rows % sizes.num_experts:
        raise ValueError(
            f"adapter: {where} has A [{rows}, {inputs}] and B [{outputs}, {columns}], expected A "
            f"[E r, in] and B [out, r E] of {sizes.num_experts} experts, in and out {hidden} and "
            f"{2 * width} or {width} and {hidden}"
        )
    return kinds[inputs, outputs]


def _split_fused(
    experts: str, a: Tensor, b: Tensor, number: int, kinds: Sequence[str], multiple: int
) -> dict[str, Tensor]:
    """The factors of single experts in a fused pair.

    Args:
        multiple: 2: A of gate and up are stacked, and B is block diagonal; 1: they share A.

    Raises: ValueError if B should be block diagonal and is not.
    """
    a = a.unflatten(0, (number, -1))
    b = b.unflatten(1, (-1, number)).permute(2, 0, 1)
    factors: dict[str, Tensor] = {}
    ranks = a.chunk(multiple, 1)
    for i, (kind, rows) in enumerate(zip(kinds, b.chunk(len(kinds), 1), strict=True)):
        blocks = rows.chunk(multiple, 2)
        if multiple == 2 and blocks[1 - i].any():
            rank = a.shape[1]
            raise ValueError(
                f"adapter: {experts}: gate and up share factors of rank {rank}, expected "
                f"{rank // 2} for each. Set lora.expert_rank to {rank}: both start with all"
            )
        for e in range(number):
            factors[f"{experts}.{e}.{kind}_proj.lora_A.weight"] = ranks[i % multiple][e]
            factors[f"{experts}.{e}.{kind}_proj.lora_B.weight"] = blocks[i % multiple][e]
    return factors


def _check_scale(
    folder: Path, module: str, config: Mapping[str, Any], lora: Lora, rank: int, multiple: int = 1
) -> None:
    """Refuse what the run's ranks or alpha cannot hold; ``multiple`` as in `_split_fused`."""
    where = f"{folder}: {module}"
    expert = ".experts." in module
    expected = lora.rank_of(expert)
    key = "expert_rank" if expert else "rank"
    declared = _by_pattern(config.get("rank_pattern"), module, config["r"])
    if rank != expected * multiple or declared != rank:
        raise ValueError(
            f"adapter: {where} has rank {rank} ({declared} by {CONFIG}), expected {expected} as in "
            f"lora.{key}. Set lora.{key} to that of the adapter"
        )
    scale = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]) / rank
    if not abs(scale - lora.scale_of(expert)) <= 1e-6 * scale:  # NaN is refused
        raise ValueError(
            f"adapter: {where} is added times {scale:g}, expected {lora.scale_of(expert):g}, which "
            f"is lora.alpha / lora.{key}. Set lora.alpha to {scale * expected:g}"
        )


def _check_names(
    folder: Path,
    factors: Mapping[str, Tensor],
    table: Sequence[Weight],
    number: int,
    ignored: Iterable[str],
) -> None:
    wanted = {x for row in table for name in row.hf_names for x in _of_experts(name, number)}
    missing = sorted(wanted - factors.keys())
    skipped = re.compile("|".join(["(?!)", *ignored]))
    # a module whose B is zero is none: a file has gate, up and down of an expert together
    unknown = sorted(
        name
        for name in factors.keys() - wanted
        if not skipped.fullmatch(name)
        and factors[re.sub(r"lora_A(?=\.weight$)", "lora_B", name)].any()
    )
    if missing or unknown:
        kinds = sorted({name.split(".")[-3] for name in factors})
        raise ValueError(
            f"adapter: {folder}: {len(missing)} factors are missing {missing[:6]}, {len(unknown)} "
            f"are unknown {unknown[:6]}; expected exactly those of lora.targets and lora.experts. "
            f"It has {', '.join(kinds)}"
        )


def _one(folder: Path, name: str, factors: Mapping[str, Tensor], number: int) -> Tensor:
    """The factor ``name``; one that experts share must be equal for all of them."""
    first, *others = (factors[single] for single in _of_experts(name, number))
    if not all(torch.equal(first, other) for other in others):
        raise ValueError(
            f"adapter: {folder}: {name} differs between experts, expected one for all with "
            "lora.experts: shared_outer. Set lora.experts to per_expert"
        )
    return first


def _of_experts(name: str, number: int) -> list[str]:
    """The names of a factor in a file: one, or one for each expert that shares it."""
    shared = _SHARED.fullmatch(name)
    return [f"{shared[1]}.{e}.{shared[2]}" for e in range(number)] if shared else [name]


def _read_config(path: Path) -> dict[str, Any]:
    """The adapter's config. Raises: ValueError if it is of another kind than plain LoRA."""
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
        kind = config["peft_type"]
        if not math.isfinite(config["r"] + config["lora_alpha"]):
            raise ValueError(f"lora_alpha {config['lora_alpha']}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"adapter: {path}: {type(error).__name__}: {error}, expected JSON of PEFT with the "
            "numbers r and lora_alpha"
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


# writing -----------------------------------------------------------------------------------------


def save_adapter(
    folder: Path,
    named: Iterable[tuple[str, Tensor]],
    plan: Plan,
    topo: Topology,
    dtype: str | None = None,
) -> None:
    """The main rank writes the factors ``named`` as a PEFT adapter, complete or not at all, holding
    them on the host; the other ranks only iterate them.

    Args:
        dtype: of the factors in the file; None: unchanged.

    Communicates: as ``named`` does, and the ranks that failed.
    Raises: OSError on every rank if the main rank cannot write.
    """
    kind = None if dtype is None else dtype_of(dtype)
    factors = {n: t.detach().to("cpu", kind, copy=True) for n, t in named if topo.is_main}

    def write(writing: Path) -> None:
        if topo.is_main:
            write_adapter(writing, factors, plan)

    write_whole(folder, topo, write)


def write_adapter(folder: Path, factors: Mapping[str, Tensor], plan: Plan) -> None:
    """Write ``factors`` and the config that PEFT needs into ``folder``."""
    from safetensors.torch import save_file

    whole = _whole_experts(factors, plan.sizes)
    tensors = {_PREFIX + name: tensor.contiguous() for name, tensor in whole.items()}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(_adapter_config(plan, whole), indent=2) + "\n")


def _whole_experts(factors: Mapping[str, Tensor], sizes: ModelSizes) -> dict[str, Tensor]:
    """``factors`` with those that experts share once for each, and zeros for what experts lack:
    peft has adapters of their gate, up and down together, or none."""
    number = sizes.num_experts
    linears = expert_linears(sizes)
    whole: dict[str, Tensor] = {}
    for name, tensor in factors.items():
        names = _of_experts(name, number)
        whole |= {single: tensor.clone() if len(names) > 1 else tensor for single in names}
    kinds = {m[1]: m[3] for name in whole if (m := _EXPERT.fullmatch(name))}
    for experts, kind in kinds.items():
        a, b = (whole[f"{experts}.0.{kind}.lora_{letter}.weight"] for letter in "AB")
        rank, inputs = a.shape
        outputs = len(b)
        for other in linears:
            turned = (other == linears[-1]) != (kind == linears[-1])
            rows, columns = (inputs, outputs) if turned else (outputs, inputs)
            for e in range(number):
                name = f"{experts}.{e}.{other}.lora_"
                whole.setdefault(f"{name}A.weight", a.new_zeros(rank, columns))
                whole.setdefault(f"{name}B.weight", a.new_zeros(rows, rank))
    return whole


def _adapter_config(plan: Plan, factors: Iterable[str]) -> dict[str, Any]:
    assert plan.lora is not None
    rank = plan.lora.rank
    routed = plan.lora.rank_of(True)
    modules = {name.rsplit(".lora_", 1)[0] for name in factors}
    below = {_BELOW_LAYER.sub(r"\1", module) for module in modules if ".experts." not in module}
    # in models with experts peft 0.21 takes a module called gate_proj, up_proj or down_proj for the
    # experts', and leaves out all others of that name; as parameters it has them
    mlps = {name for name in below if plan.sizes.num_experts and name.startswith("mlp.")}
    kinds = {name.rsplit(".", 1)[-1] for name in below - mlps}
    parameters = {f"{name}.weight" for name in mlps}
    ranks: dict[str, int] = {}
    if any(".experts." in module for module in modules):
        # peft fuses the experts itself: it takes 2 r for them, even if a pattern sets another rank
        if rank != routed:
            ranks = dict.fromkeys(sorted(kinds | parameters), rank)
        rank = routed
        kinds |= {*expert_linears(plan.sizes)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": plan.model.weights,
        "r": rank,
        "lora_alpha": plan.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(kinds),
        "target_parameters": sorted(parameters),
        "rank_pattern": ranks,
    }
