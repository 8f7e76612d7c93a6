"""The named components of rewards, of all samples of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pyrl_ext.samples import Sample

if TYPE_CHECKING:
    from pyrl_ext.pack.index import BatchIndex


def components_of(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Name -> [S] float64, the components of the samples' rewards."""
    for sample in samples:
        first = samples[0].components
        same_components(sample.components, first, sample.prompt_id, sample.index)
    names = samples[0].components if samples else ()
    return {name: np.asarray([s.components[name] for s in samples], np.float64) for name in names}


def joined_components(parts: Sequence[BatchIndex], order: np.ndarray) -> dict[str, np.ndarray]:
    """The components of the samples of all parts, of which each has some, in ``order``."""
    for part in parts:
        same_components(part.components, parts[0].components, part.groups[0], part.places[0])
    names = parts[0].components if parts else ()
    return {name: np.concatenate([p.components[name] for p in parts])[order] for name in names}


def read_components(
    data: bytes, at: int, names: Sequence[str], samples: int
) -> tuple[dict[str, np.ndarray], int]:
    """The columns of ``names`` in ``data``, and where they end."""
    size, places = 8 * samples, enumerate(names)
    found = {n: np.frombuffer(data, np.float64, samples, at + i * size) for i, n in places}
    return found, at + len(names) * size


def same_components(found: Iterable[str], first: Iterable[str], prompt: int, place: int) -> None:
    """Refuse a sample whose reward has other components than that of the first one."""
    if set(found) != set(first):
        raise ValueError(
            f"BatchIndex: Sample(prompt {prompt}, sample {place}): reward with components "
            f"{sorted(found)}, expected {sorted(first)} as in other samples of the step; return "
            "0.0 for one that does not apply"
        )
