"""A prompt and its images, without torch: worker processes of user code import this module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """One image, cut into patches.

    Args:
        row: its first token in the sample, a placeholder
        rows: number of its tokens, all of them placeholders
        grid: its patches in time, height and width
        patches: [P, W] uint8, the numbers of each patch as the model's processor orders them
    """

    row: int
    rows: int
    grid: tuple[int, int, int]
    patches: Tensor

    def load(self) -> Image:
        """Itself: it is decoded already."""
        return self


class PromptImage(Protocol):
    """An image of a prompt, which nothing has decoded yet."""

    @property
    def row(self) -> int:
        """Its first token, a placeholder."""
        ...

    @property
    def rows(self) -> int:
        """Number of its tokens."""
        ...

    def load(self) -> Image:
        """Decode it and cut it into patches."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question.

    Args:
        id: names the prompt everywhere (groups, random streams, error messages); unique in a batch
        tokens: [P] token ids, P >= 1
        answer: what the reward function compares with, of any type
        text: the prompt as text, for messages and logs
        meta: further fields of its record, for reward functions
        images: in the order of their tokens
        source: its name in data.sources; empty without them
    """

    id: int
    tokens: tuple[int, ...]
    answer: Any = None
    text: str = ""
    meta: Mapping[str, Any] | None = None
    images: tuple[PromptImage, ...] = ()
    source: str = ""
