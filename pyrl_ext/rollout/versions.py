"""The versions of the weights that sampled the tokens of a sample."""

from __future__ import annotations

from collections.abc import Sequence

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
