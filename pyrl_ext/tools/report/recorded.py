"""Recorded samples for the page: a table of them, and the load of the experts.

A run has them with ``rollout.record``; `pyrl eval` leaves those of its evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyrl_ext.tools.report.evaluations import RESULTS
from pyrl_ext.tools.report.state import Folder

if TYPE_CHECKING:
    from pyrl_ext.rollout.recorded import Scores
    from pyrl_ext.samples import Sample

SAMPLES = 1000
"""Most samples of a run on the page."""

BEST = 2
"""Number of highlighted samples of the best reward, and of the worst."""

HEAD = 240
TAIL = 80
"""Tokens shown of a longer sample: its first ones, from the end of the prompt on, and its last."""

UNLIKELY = (-0.1, -0.7, -2.3, -4.6)
"""Log-probs below which a token has the next tone; the last is a probability of 1 %."""

GAPS = (0.003, 0.03, 0.1, 0.5)
"""Differences of log-probs above which a token has the next tone; the band of
``mismatch/abs_mean`` is the middle two."""

TRAINING = "training"

# token ids -> their text
TextOf = Callable[[tuple[int, ...]], str]


@dataclass
class ShownSample:
    """A sample as the page's script reads it; the lists have an entry for each piece.

    A piece is a token, the tokens of one character, or a remark on tokens that are left out.

    Args:
        set: "training", or the name of the evaluation set.
        step: whose update trains on it, or that was finished when it was evaluated.
        name: its prompt and number in words.
        reward: None if it is not finite.
        parts: components of the reward by name; None if one is not finite.
        length: number of tokens after the prompt.
        truncated: True if the budget of tokens ended it.
        kinds: a letter for each piece: prompt, sampled, observed, or x for a remark.
        logprobs: of the engine [nats]; 0 where nothing was sampled.
        gaps: the trainer's log-prob before the update, minus the engine's; None where it is not
            known or not finite. Empty if the trainer's log-probs are not known.
        experts: of the first token, by router layer; empty if they are left out.
    """

    set: str
    step: int
    name: str
    reward: float | None
    parts: dict[str, float | None]
    length: int
    truncated: bool
    texts: list[str] = field(default_factory=list[str])
    kinds: str = ""
    logprobs: list[float] = field(default_factory=list[float])
    gaps: list[float | None] = field(default_factory=list[float | None])
    experts: list[str] = field(default_factory=list[str])

    def add(
        self,
        kind: str,
        text: str,
        logprob: float = 0.0,
        gap: float | None = None,
        experts: str = "",
    ) -> None:
        """Append a piece."""
        self.kinds += kind
        self.texts.append(text)
        self.logprobs.append(round(logprob, 3))
        if gap is not None:
            gap = float(f"{gap:.2g}") if math.isfinite(gap) else None
        self.gaps.append(gap)
        self.experts.append(experts)


@dataclass
class Recorded:
    """What a run recorded.

    Args:
        missing: why there is nothing to show.
        note: on what is shown in another way.
        samples: of the table, the newest first.
        total: number of recorded samples.
        best: numbers of the highlighted ones, the best first.
        step: newest one of training; -1 if none is recorded.
        layers: [L] 0-based ids of the layers with a router.
        load: [L][E] share of the routed tokens that each expert processed in that step, times
            E / K: 1 is even.
        tokens: number of tokens with a route.
        compared: True if the trainer's log-probs are known.
    """

    missing: str = ""
    note: str = ""
    samples: list[ShownSample] = field(default_factory=list[ShownSample])
    total: int = 0
    best: list[int] = field(default_factory=list[int])
    step: int = -1
    layers: Sequence[int] = ()
    load: list[list[float]] = field(default_factory=list[list[float]])
    tokens: int = 0
    compared: bool = False


@dataclass
class Batch:
    """The recorded samples of one set and step: their files, and the number in each."""

    set: str
    step: int
    files: dict[Path, int] = field(default_factory=dict[Path, int])

    @property
    def size(self) -> int:
        """Number of samples."""
        return sum(self.files.values())


def recorded(folder: Folder, most: int = SAMPLES) -> Recorded:
    """Up to ``most`` samples that ``folder`` recorded, and the load of its newest step."""
    plan = folder.plan
    if plan is None or not plan.has_rollouts:
        return Recorded(folder.no_plan or "A run without rollouts has no samples.")
    from pyrl_ext.data.files import DataError
    from pyrl_ext.data.recordings import load_samples  # imports torch
    from pyrl_ext.data.tokenizer import load_tokenizer

    result = Recorded()
    batches = _batches(folder, result)
    if not batches:
        record = plan.rollout.record
        missing = f"No step is in {record}/ yet."
        if record is None:
            missing = "Not recorded: rollout.record=rollouts keeps the samples of every step."
        return Recorded(result.note or missing)
    try:
        decode = load_tokenizer(plan.tokenizer_path or "").decode
    except DataError as error:  # of a hub id that is not on this machine
        result.note += f" Ids instead of text: {error}"
        decode = _ids
    text_of = cache(lambda ids: decode([*ids]))  # few of the tokens are distinct
    result.total = sum(batch.size for batch in batches)
    for batch, count in zip(batches, shares([batch.size for batch in batches], most), strict=True):
        newest = batch is batches[0] and batch.set == TRAINING
        try:
            if newest:
                samples = [sample for file in batch.files for sample in load_samples(file)]
                _add_newest(result, folder, batch, samples, count, text_of)
                continue
            for file, size in batch.files.items():
                taken = min(size, count)
                count -= taken
                for sample in load_samples(file, range(taken)):
                    result.samples.append(_shown(batch, sample, text_of, {}))
        except ValueError as error:
            result.note += f" {error}"
    return result


def shares(sizes: Sequence[int], most: int) -> list[int]:
    """Number of samples to show of each batch: half of ``most`` is for the first,
    and the others share the rest equally."""
    if sum(sizes) <= most:
        return [*sizes]
    first = min(sizes[0], most // 2)
    others = len(sizes) - 1
    left = most - first
    if others <= left:
        return [first, *[left // max(1, others)] * others]
    return [first, *[1] * left, *[0] * (others - left)]


def _batches(folder: Folder, result: Recorded) -> list[Batch]:
    """What the run and `pyrl eval` recorded: the newest step of training, then all others, newer
    ones first. Files that cannot be read are in the note."""
    from pyrl_ext.data.recordings import read_index, step_of
    from pyrl_ext.rollout.recorded import EVALUATIONS

    patterns = {f"{RESULTS.parent}/*/": " (pyrl eval)"}
    if folder.plan and (record := folder.plan.rollout.record):
        patterns |= {f"{record}/": "", f"{record}/{EVALUATIONS}/*/": ""}
    found: dict[tuple[str, int], Batch] = {}
    for pattern, suffix in patterns.items():
        for file in sorted(folder.path.glob(f"{pattern}step-*.safetensors")):
            step = step_of(file)
            if step is None:
                continue
            name = file.parent.name + suffix if "*" in pattern else TRAINING
            batch = found.setdefault((name, step), Batch(name, step))
            try:
                batch.files[file] = len(read_index(file)["samples"])
            except ValueError as error:
                result.note += f" {error}"
    batches = [batch for batch in found.values() if batch.files]
    trained = max((batch.step for batch in batches if batch.set == TRAINING), default=-1)
    batches.sort(key=lambda batch: (-batch.step, batch.set))
    batches.sort(key=lambda batch: (batch.set, batch.step) != (TRAINING, trained))
    return batches


def _add_newest(
    result: Recorded,
    folder: Folder,
    batch: Batch,
    samples: list[Sample],
    count: int,
    text_of: TextOf,
) -> None:
    """The newest step of training: its first ``count`` samples and the highlighted ones, with the
    trainer's log-probs, and the load of the experts."""
    from pyrl_ext.rollout.recorded import load_scores

    gaps: list[dict[int, float]] = [{} for _ in samples]
    try:
        scores = load_scores(next(iter(batch.files)).parent, batch.step)
        gaps = [_gaps(sample, scores) for sample in samples]
    except ValueError as error:
        result.note += f" The trainer's log-probs are left out: {error}"
    result.step = batch.step
    result.layers = samples[0].layer_ids
    result.compared = any(gaps)
    best = highlighted(samples)
    shown = sorted({*range(count), *best})
    for place in shown:
        sample = _shown(batch, samples[place], text_of, gaps[place], place in best)
        result.samples.append(sample)
    result.best = [shown.index(place) for place in best]
    if samples[0].routes is not None and folder.plan is not None:
        result.load = expert_load(samples, folder.plan.sizes.num_experts)
        result.tokens = sum(int(sample.route_mask.sum()) for sample in samples)


def highlighted(samples: Sequence[Sample]) -> list[int]:
    """Numbers of the samples with the highest and the lowest finite rewards, the best first, no two
    with the same tokens."""
    finite = [place for place, sample in enumerate(samples) if math.isfinite(sample.reward)]
    distinct = {samples[place].tokens.numpy().tobytes(): place for place in finite}
    ordered = sorted(distinct.values(), key=lambda place: -samples[place].reward)
    if len(ordered) <= 2 * BEST:
        return ordered
    return ordered[:BEST] + ordered[-BEST:]


def _ids(ids: list[int]) -> str:
    return "".join(f"{token} " for token in ids)


def expert_load(samples: Sequence[Sample], experts: int) -> list[list[float]]:
    """[L][E] share of the tokens with a route that use each expert, over the even share K / E."""
    ids = np.concatenate([s.routes[s.route_mask].numpy() for s in samples if s.routes is not None])
    tokens, layers, topk = ids.shape
    even = max(1, tokens) * topk / experts
    counts = [np.bincount(ids[:, n].ravel(), minlength=experts) for n in range(layers)]
    return np.round(np.array(counts) / even, 3).tolist()


def _gaps(sample: Sample, scores: Scores) -> dict[int, float]:
    """Token -> its gap."""
    key = (sample.prompt_id, sample.index, sample.turn)
    if key not in scores:
        return {}
    tokens, logprobs = scores[key]
    size = sample.tokens.numel()
    if int(tokens.max()) >= size or int(tokens.min()) < 0:
        raise ValueError(f"{_name(sample)}: scores of {tokens.tolist()}, expected 0 to {size - 1}")
    gaps = logprobs - sample.rollout_logprobs[tokens]
    return dict(zip(tokens.tolist(), gaps.tolist(), strict=True))


def _name(sample: Sample) -> str:
    turn = f", turn {sample.turn}" if sample.turn else ""
    return f"prompt {sample.prompt_id}, sample {sample.index}{turn}"


def _shown(
    batch: Batch,
    sample: Sample,
    text_of: TextOf,
    gaps: dict[int, float],
    experts: bool = False,
) -> ShownSample:
    size = sample.tokens.numel()
    shown = ShownSample(
        set=batch.set,
        step=batch.step,
        name=_name(sample),
        reward=_rounded(sample.reward),
        parts={name: _rounded(value) for name, value in sample.components.items()},
        length=size - sample.prompt_len,
        truncated=sample.finish_reason == "length",
    )
    begin = max(0, sample.prompt_len - TAIL)  # the task is at the end of a long prompt
    head_end = min(size, begin + HEAD)
    tail_begin = max(head_end, size - TAIL)
    at = 0
    for start, end in ((begin, head_end), (tail_begin, size)):
        if start > at:
            shown.add("x", f"[{start - at:,} tokens left out]")
        at = start
        while at < end:
            stop = at + 1
            text = text_of(tuple(sample.tokens[at:stop].tolist()))
            while "\ufffd" in text and stop < min(end, at + 6):  # a character of several tokens
                stop += 1
                text = text_of(tuple(sample.tokens[at:stop].tolist()))
            kind = "s" if sample.loss_mask[at] else "p" if at < sample.prompt_len else "o"
            route = ""
            if experts and sample.routes is not None and bool(sample.route_mask[at]):
                layers = sample.routes[at].tolist()
                route = " | ".join(" ".join(map(str, layer)) for layer in layers)
            logprob = float(sample.rollout_logprobs[at])
            shown.add(kind, visible(text), logprob, gaps.get(at), route)
            at = stop
    if not experts:
        shown.experts.clear()
    if not gaps:
        shown.gaps.clear()
    return shown


def _rounded(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def visible(text: str) -> str:
    """``text`` with signs for characters that a page would hide, or that reverse its order."""
    return "".join(
        "↵\n" if c == "\n" else c if c.isprintable() or c == "\t" else f"⟨U+{ord(c):04X}⟩"
        for c in text
    )
