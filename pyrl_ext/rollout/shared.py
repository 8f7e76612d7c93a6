"""Rollouts shared out over the ranks of a process group."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from pyrl_ext.rollout import Engine, Prompt, Sample, Sampling


def generate_shared(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    score: Callable[[list[Sample]], list[Sample]] | None = None,
    group: dist.ProcessGroup | None = None,
    ranks_per_engine: int = 1,
) -> list[Sample]:
    """Every engine generates and scores its share; all ranks return all samples in the same order.

    Engine e takes prompts e, e + engines, ...: whole groups, and long and short prompts alike.

    Args:
        engine: of this rank, holding the same weights on every rank
        prompts: the same list on every rank
        sampling: the same on every rank
        score: fills in the rewards of this rank's samples
        group: None = this process alone
        ranks_per_engine: ranks that hold one engine together: 0 to n - 1, n to 2n - 1, ...

    Returns:
        samples, prompt by prompt, index by index

    Raises:
        RuntimeError: on every rank if one rank failed, naming it and its error; or if the ranks
            were given different prompts or sampling

    Communicates:
        group, all-gather of a line of text and then of the samples (12 bytes a token and its
        routes)
    """
    engines = 1 if group is None else group.size() // ranks_per_engine
    mine = prompts[0 if group is None else group.rank() // ranks_per_engine :: engines]
    try:
        samples = engine.generate(mine, sampling)
        samples = score(samples) if score is not None else samples
        _whole(samples, len(mine) * sampling.samples_per_prompt)
        error = None
    except Exception as caught:  # every rank must learn of it, or the others wait for ever
        samples, error = [], caught
    if group is None:
        if error is not None:
            raise error
        return samples
    _agree(prompts, sampling, error, group)
    first = group.rank() % ranks_per_engine == 0  # the others of an engine have the same
    shares = _gather(samples if first else [], group)[::ranks_per_engine]
    size = sampling.samples_per_prompt
    return [
        sample
        for i in range(len(prompts))
        for sample in shares[i % engines][i // engines * size : (i // engines + 1) * size]
    ]


def _whole(samples: list[Sample], count: int) -> None:
    if len(samples) != count:
        raise RuntimeError(f"generate_shared: engine gave {len(samples)} samples, expected {count}")


def _agree(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    error: Exception | None,
    group: dist.ProcessGroup,
) -> None:
    """Raises on every rank if any rank failed or was asked something else."""
    asked = zlib.crc32(repr(([(p.id, p.tokens) for p in prompts], sampling)).encode())
    failed = None if error is None else f"{type(error).__name__}: {error}"
    states: list[tuple[str | None, int]] = _gather((failed, asked), group)
    lines = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(states) if text is not None]
    if lines:
        raise RuntimeError(
            f"generate_shared: {len(lines)} of {len(states)} ranks failed, expected none\n  "
            + "\n  ".join(lines)
        ) from error
    other = [rank for rank, (_, sent) in enumerate(states) if sent != states[0][1]]
    if other:
        raise RuntimeError(
            f"generate_shared: ranks {other} were given other prompts or sampling than rank 0, "
            "expected the same on every rank"
        )


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found
