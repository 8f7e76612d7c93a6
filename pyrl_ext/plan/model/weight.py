"""One megatron parameter, the checkpoint tensors it is made of, and the shards of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Shard = Literal["same", "rows", "columns", "gated", "grouped", "sections", "vocab"]
Size = tuple[int, ...]
Start = Literal["zeros", "ones", "decays", "steps"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One megatron parameter and the checkpoint tensors it is made of.

    Args:
        hf_names: checkpoint names, in the order they are stacked.
        megatron_name: its name, with global ids of layer and expert.
        shard:   how tensor-parallel ranks split it. "same": not at all; "rows"; "columns"; "gated":
                 by rows within each stacked tensor (gate and up); "grouped": by rows, with query,
                 key and value, or two of them, interleaved by query group; "sections": by rows
                 within each of ``sections``; "vocab": by rows of the vocabulary, padded to a
                 multiple of the ranks.
        shapes:  of the checkpoint tensors, in the order of ``hf_names``.
        expert:  id of its expert, whose expert-tensor-parallel ranks split it; None: not an
                 expert's.
        heads:   (query heads, key/value heads) if ``shard`` is "grouped".
        float32: whether it is float32 whatever the model's dtype.
        gates:   whether as many rows of gates follow those of each query head in its checkpoint
                 tensor, if ``shard`` is "grouped"; in the parameter those of each query group.
        sections: of each checkpoint tensor, the rows that one of ``groups`` has in each section, if
                 ``shard`` is "sections": a tensor has group after group, with all sections of each;
                 the parameter has section after section, with all groups of each.
        groups:  of the sections.
        start:   its values without a checkpoint; None: as its name says (`RandomWeights`).
    """

    hf_names: tuple[str, ...]
    megatron_name: str
    shard: Shard
    shapes: tuple[Size, ...]
    expert: int | None = None
    heads: tuple[int, int] = (1, 1)
    float32: bool = False
    gates: bool = False
    sections: tuple[tuple[int, ...], ...] = ()
    groups: int = 1
    start: Start | None = None

    @classmethod
    def same(cls, hf: str, name: str, *size: int, float32: bool = False) -> Weight:
        return cls((hf,), name, "same", (size,), float32=float32)

    @classmethod
    def rows(cls, hf: str, name: str, *size: int) -> Weight:
        return cls((hf,), name, "rows", (size,))

    @classmethod
    def columns(cls, hf: str, name: str, *size: int, expert: int | None = None) -> Weight:
        return cls((hf,), name, "columns", (size,), expert)

    @classmethod
    def inner(cls, hf: Sequence[str], name: str, *size: int, expert: int | None = None) -> Weight:
        """``hf``: gate and up, or up alone."""
        return cls((*hf,), name, "gated" if len(hf) == 2 else "rows", (size,) * len(hf), expert)

    @classmethod
    def grouped(
        cls,
        q: str,
        k: str,
        v: str,
        name: str,
        heads: tuple[int, int],
        *head: int,
        gates: bool = False,
    ) -> Weight:
        """``head``: the shape of one query, key or value head."""
        width, *rest = head
        rows = (heads[0] * (1 + gates), heads[1], heads[1])
        shapes = tuple((n * width, *rest) for n in rows)
        return cls((q, k, v), name, "grouped", shapes, heads=heads, gates=gates)

    @classmethod
    def fused(cls, hf: str, name: str, heads: int, *head: int) -> Weight:
        """Queries, keys and values of ``heads`` heads each, which the checkpoint stacks in one
        tensor."""
        width, *rest = head
        return cls((hf,), name, "grouped", ((3 * heads * width, *rest),), heads=(heads, heads))

    @classmethod
    def sectioned(
        cls,
        name: str,
        sections: Mapping[str, tuple[int, ...]],
        groups: int,
        *rest: int,
    ) -> Weight:
        """``sections``: checkpoint name -> rows of one group in each of its sections."""
        shapes = tuple((groups * sum(rows), *rest) for rows in sections.values())
        return cls(
            tuple(sections),
            name,
            "sections",
            shapes,
            sections=tuple(sections.values()),
            groups=groups,
        )

    @classmethod
    def vocab(cls, hf: str, name: str, *size: int) -> Weight:
        return cls((hf,), name, "vocab", (size,))

    @property
    def is_fused(self) -> bool:
        """True if one checkpoint tensor holds queries, keys and values."""
        return self.shard == "grouped" and len(self.hf_names) == 1

    def sections_of(self, rows: int) -> tuple[int, ...]:
        """Rows of each section that ranks split separately, in a shard of ``rows`` rows."""
        if self.shard == "gated":
            sections = [1, 1]
        elif self.shard == "sections":
            sections = [n for of_tensor in self.sections for n in of_tensor]
        else:
            return (rows,)
        total = sum(sections)
        return tuple(n * rows // total for n in sections)

    def shard_shape(self, size: int) -> Size:
        """Shape of the shard on each of ``size`` tensor-parallel ranks."""
        rows = sum(shape[0] for shape in self.shapes)
        columns = self.shapes[0][1:]
        if self.shard == "same":
            return rows, *columns
        if self.shard == "columns":
            return rows, columns[0] // size
        return -(-rows // size), *columns


def mlp_rows(
    layer: int, name: str, hidden: int, width: int, gated: bool, expert: int | None = None
) -> list[Weight]:
    """The MLP of a layer or of one expert; up, and gate if it is ``gated``, has ``width`` rows."""
    hf = f"model.layers.{layer}.{name}."
    mc = f"decoder.layers.{layer}.{name}.".replace(".experts.", ".experts.local_experts.")
    inner = [f"{hf}{kind}_proj.weight" for kind in (("gate", "up") if gated else ("up",))]
    down = f"{hf}down_proj.weight"
    return [
        Weight.inner(inner, mc + "linear_fc1.weight", width, hidden, expert=expert),
        Weight.columns(down, mc + "linear_fc2.weight", hidden, width, expert=expert),
    ]
