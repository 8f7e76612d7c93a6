"""The place of each tensor of a Hugging Face checkpoint in a live transformers model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.adapters import adapters_of, is_factor
from pyrl_ext.rollout.draft_layers import draft_shapes
from pyrl_ext.rollout.hf.adapters import attach
from pyrl_ext.rollout.hf.checkpoint_renames import published
from pyrl_ext.rollout.hf.model import model_class, read_config
from pyrl_ext.rollout.tensor_names import AHEAD, layer_of, split_experts


class Destinations:
    """Checkpoint name -> the model's memory, with one view per fused expert.

    Args:
        model: a transformers model whose expert layers hold `gate_up_proj` [E, 2I, H] (gate rows
            first), or `up_proj` [E, I, H] without gates, and `down_proj` [E, H, I]

    Attributes:
        parts: checkpoint name -> views of the memory that its rows fill, one after the other; the
            last is as wide as the tensor

    Raises:
        ValueError: expert weights of another layout
    """

    def __init__(self, model: PreTrainedModel):
        self.where = type(model).__name__
        self.parts = published(model.config, dict(_views(model)))
        config: Any = model.config.get_text_config()
        layers = int(config.num_hidden_layers)
        extra = int(getattr(config, "num_nextn_predict_layers", None) or 0)
        self.mtp_layers = {*range(layers, layers + extra), AHEAD}

    @classmethod
    def from_config(
        cls, config: dict[str, Any] | str | Path, lora: Lora | None = None, drafts: bool = False
    ) -> Destinations:
        """The destinations of the model of a config; without memory, for names and shapes.

        Args:
            lora: adapters that it applies, whose factors have destinations too
            drafts: its MTP layers have destinations too
        """
        known = read_config(config)
        with torch.device("meta"):
            model = model_class(known).from_config(known)
        model.tie_weights()
        held = cls.of(model, lora)
        if drafts:
            shapes = draft_shapes(config)
            held.parts |= {n: [torch.empty(s, device="meta")] for n, s in shapes.items()}
        return held

    @classmethod
    def of(cls, model: PreTrainedModel, lora: Lora | None) -> Destinations:
        """The destinations of a model, which gets adapters if there is ``lora``."""
        if lora is not None:
            attach(model, adapters_of(lora, cls(model).parts))
        return cls(model)

    def shape(self, name: str) -> torch.Size:
        """Shape of a checkpoint tensor."""
        parts = self.parts[name]
        if len(parts) == 1:
            return parts[0].shape
        return torch.Size((len(parts) * parts[-1].shape[0], *parts[-1].shape[1:]))

    def tensor(self, name: str) -> Tensor:
        """A checkpoint tensor as the model holds it: a view, or a copy of several."""
        parts = self.parts[name]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.reshape(parts[-1].shape) for part in parts])

    @torch.no_grad()
    def fill(
        self, named: Iterable[tuple[str, Tensor]], only: Collection[str] | None = None
    ) -> None:
        """Writes every destination exactly once; tensors of MTP layers are skipped.

        Args, Raises, Syncs: as `check`; after an error the model is partly written
        """
        for name, value in self.check(named, only):
            parts = self.parts[name]
            rows = value.chunk(len(parts)) if len(parts) > 1 else [value]
            for part, part_rows in zip(parts, rows, strict=True):
                part.copy_(part_rows.reshape(part.shape))

    def check(
        self,
        named: Iterable[tuple[str, Tensor]],
        only: Collection[str] | None = None,
        not_finite: Callable[[], Collection[str]] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Passes on the tensors that have a destination.

        Args:
            only: names of the tensors that are sent; None: all
            not_finite: names of those that hold nan or inf, asked after the last one; None: each
                tensor is looked at

        Raises:
            ValueError: after the last tensor, listing unknown and missing names, names given twice,
                wrong shapes and non-finite values

        Syncs: once, after the last tensor, for the finiteness of all together.
        """
        expected = self.parts.keys() if only is None else set(only)
        seen = set[str]()
        finite: dict[str, Tensor] = {}
        problems: list[str] = []
        for name, value in named:
            if name not in self.parts:
                if layer_of(name) not in self.mtp_layers:
                    problems.append(f"{name}: unknown name")
            elif name not in expected:
                problems.append(f"{name}: not among the {len(expected)} that were announced")
            elif name in seen:
                problems.append(f"{name}: given twice")
            elif value.shape != (shape := self.shape(name)):
                problems.append(f"{name}: shape {list(value.shape)}, expected {list(shape)}")
            else:
                if not_finite is None:
                    finite[name] = torch.isfinite(value).all()
                yield name, value
            seen.add(name)
        missing = expected - seen
        problems += [f"{name}: missing" for name in self.parts if name in missing]
        if not_finite is not None:
            broken = not_finite()
            problems += [f"{n}: holds nan or inf" for n in self.parts if n in broken and n in seen]
        if finite:
            first = next(iter(finite.values()))
            flags = torch.stack([flag.to(first.device) for flag in finite.values()]).tolist()
            problems += [f"{n}: holds nan or inf" for n, ok in zip(finite, flags) if not ok]
        if problems:
            raise ValueError(
                f"{self.where}.load_weights: {len(problems)} problems, expected every parameter "
                f"and persistent buffer exactly once:\n  " + "\n  ".join(problems)
            )

    def need_whole_layers(self, names: Collection[str]) -> None:
        """Raises ValueError if ``names`` holds only some of the tensors of a decoder layer."""
        layers = {layer_of(name) for name in names if not is_factor(name)} - {None}
        weights = (name for name in self.parts if not is_factor(name))
        lacking = [n for n in weights if n not in names and layer_of(n) in layers]
        if lacking:
            raise ValueError(
                f"{self.where}.load_weights: {len(lacking)} tensors of {len(layers)} layers are "
                f"not sent, {lacking[:4]}, expected whole layers; this engine fuses their tensors"
            )


def _views(model: PreTrainedModel) -> Iterable[tuple[str, Tensor]]:
    persistent = model.state_dict(keep_vars=True)
    names = {name for name, _ in model.named_parameters()}  # tied parameters once
    names |= {name for name, _ in model.named_buffers()}
    for name, tensor in persistent.items():
        if name not in names:
            continue
        experts = split_experts(name, tensor.shape)
        if experts is not None:
            for single, expert, rows in experts:
                yield single, tensor.detach()[expert, rows]
        elif name.rpartition(".")[0].endswith("experts") and tensor.dim() == 3:
            raise ValueError(
                f"{type(model).__name__}: expert weight {name} {list(tensor.shape)}, expected "
                "gate_up_proj or up_proj, and down_proj"
            )
        else:
            yield name, tensor.detach()
