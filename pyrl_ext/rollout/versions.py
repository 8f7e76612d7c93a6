"""The versions of the weights that sampled the tokens of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyrl_ext.samples import Sample


def spans_of(sample: Sample) -> tuple[tuple[int, int, int], ...]:
    """(begin, end, version) of all tokens that were sampled, as `Sample.version_spans`."""
    sampled = sample.spans or ((sample.prompt_len, sample.tokens.numel()),)
    return sample.version_spans or tuple((*span, sample.weight_version) for span in sampled)


def newest(sample: Sample) -> int:
    """The version of the weights that sampled the last token."""
    return spans_of(sample)[-1][2]


def joined_spans(turns: Sequence[Sample]) -> tuple[tuple[int, int, int], ...]:
    """`Sample.version_spans` of the sample that turns become; empty if one version sampled all."""
    spans = [span for turn in turns for span in spans_of(turn)]
    return tuple(spans) if len({version for *_, version in spans}) > 1 else ()


def oldest_trained(sample: Sample) -> int | None:
    """The oldest version that sampled a token under the loss mask; None: there is no such token."""
    versions = sample.versions[sample.loss_mask]
    return int(versions.min()) if versions.numel() else None


def need_versions(samples: Sequence[Sample], oldest: int | None, newest: int | None) -> None:
    """Refuse samples with trained tokens older than ``oldest``, or newer than the trainer.

    Args:
        oldest: version whose tokens are trained on; None: any
        newest: of the trainer; None: any

    Raises: ValueError naming the sample, the token and its version.
    """
    for sample in samples:
        versions = sample.versions
        wrong = sample.loss_mask & (
            (versions < (versions if oldest is None else oldest))
            | (versions > (versions if newest is None else newest))
        )
        if bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            raise ValueError(
                f"Sample(prompt {sample.prompt_id}, sample {sample.index}): token {token} is of "
                f"version {int(versions[token])}, expected {oldest} to {newest}, the trainer's and "
                "rollout.ahead before it. Raise rollout.ahead, or set rollout.stale_groups: train"
            )


def with_newest_routes(sample: Sample) -> Sample:
    """The sample without the routes that were recorded before the last update within it.

    A token has a route once the weights after it read it: the first row of the newest weights is
    that of the token before the first one that they sampled.
    """
    spans = spans_of(sample)
    if sample.routes is None or spans[0][2] == spans[-1][2]:
        return sample
    first = next(begin for begin, _, version in spans if version == spans[-1][2])
    mask = sample.route_mask.clone()
    mask[: first - 1] = False
    masked = int(sample.route_mask.sum() - mask.sum())
    return replace(sample, route_mask=mask, masked=sample.masked + masked)
