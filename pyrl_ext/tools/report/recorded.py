"""Recorded rollouts for the page: samples of best and worst reward, and the load of the experts.

A run has them with ``rollout.record``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pyrl_ext.tools.report.state import Folder

if TYPE_CHECKING:
    from pyrl_ext.rollout.recorded import Scores
    from pyrl_ext.samples import Sample

SHOWN = 2
"""Number of samples of the best reward, and of the worst."""

TOKENS = 320
"""Most tokens shown of a sample: the end of its prompt, and the beginning of its response."""

UNLIKELY = (-0.1, -0.7, -2.3, -4.6)
"""Log-probs below which a token has the next tone; the last is a probability of 1 %."""

GAPS = (0.003, 0.03, 0.1, 0.5)
"""Differences of log-probs above which a token has the next tone; the band of
``mismatch/abs_mean`` is the middle two."""


@dataclass(frozen=True)
class Piece:
    """A token as text, or the tokens of one character.

    Args:
        kind: "prompt", "sampled" or "observed".
        tone: 0 to 4, by the gap; without a gap by how unlikely the engine found the token.
        gap: the trainer's log-prob before the update, minus the engine's; None if not known.
        experts: of the first token, by router layer.
    """

    text: str
    kind: str
    tone: int
    logprob: float
    gap: float | None
    experts: str


@dataclass(frozen=True)
class ShownSample:
    """A sample as the page shows it."""

    title: str
    reward: float
    pieces: list[Piece]
    left_out: int


@dataclass
class Recorded:
    """The newest recorded step of a run.

    Args:
        missing: why there is nothing to show.
        note: on what is shown in another way.
        samples: the best, then the worst.
        layers: [L] 0-based ids of the layers with a router.
        load: [L][E] share of the routed tokens that each expert processed, times E / K: 1 is even.
        tokens: number of tokens with a route.
        compared: True if the trainer's log-probs are known.
    """

    missing: str = ""
    note: str = ""
    step: int = -1
    samples: list[ShownSample] = field(default_factory=list[ShownSample])
    layers: Sequence[int] = ()
    load: list[list[float]] = field(default_factory=list[list[float]])
    tokens: int = 0
    compared: bool = False


def recorded(folder: Folder) -> Recorded:
    """The samples and the load of the newest step that ``folder`` recorded."""
    plan = folder.plan
    if plan is None or not plan.has_rollouts:
        return Recorded(folder.no_plan or "A run without rollouts has no samples.")
    if plan.rollout.record is None:
        return Recorded("Not recorded: rollout.record=rollouts keeps the samples of every step.")
    path = folder.path / plan.rollout.record
    files = sorted(path.glob("step-*.safetensors"))
    if not files:
        return Recorded(f"No step is in {plan.rollout.record}/ yet.")
    from pyrl_ext.data.files import DataError
    from pyrl_ext.data.tokenizer import load_tokenizer
    from pyrl_ext.rollout.recorded import load_samples, load_scores  # imports torch

    step = int(files[-1].name[len("step-") :][:6])
    try:
        samples = [s for file in path.glob(f"step-{step:06d}*") for s in load_samples(file)]
    except ValueError as error:
        return Recorded(str(error))
    result = Recorded(step=step, layers=samples[0].layer_ids)
    try:
        decode = load_tokenizer(plan.tokenizer_path or "").decode
    except DataError as error:  # of a hub id that is not on this machine
        result.note = f"Ids instead of text: {error}"
        decode = _ids
    chosen = sorted((s for s in samples if s.reward == s.reward), key=lambda s: -s.reward)
    if len(chosen) > 2 * SHOWN:
        chosen = chosen[:SHOWN] + chosen[-SHOWN:]
    gaps: list[dict[int, float]] = [{} for _ in chosen]
    try:
        scores = load_scores(path, step)
        gaps = [_gaps(sample, scores) for sample in chosen]
    except ValueError as error:
        result.note += f" The trainer's log-probs are left out: {error}"
    result.compared = any(gaps)
    result.samples = [_shown(s, decode, gap) for s, gap in zip(chosen, gaps, strict=True)]
    if samples[0].routes is not None:
        result.load = expert_load(samples, plan.sizes.num_experts)
        result.tokens = sum(int(sample.route_mask.sum()) for sample in samples)
    return result


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
        raise ValueError(f"{_title(sample)}: scores of {tokens.tolist()}, expected 0 to {size - 1}")
    gaps = logprobs - sample.rollout_logprobs[tokens]
    return dict(zip(tokens.tolist(), gaps.tolist(), strict=True))


def _title(sample: Sample) -> str:
    return f"prompt {sample.prompt_id}, sample {sample.index}"


def _shown(
    sample: Sample, decode: Callable[[list[int]], str], gaps: dict[int, float]
) -> ShownSample:
    size = sample.tokens.numel()
    begin = max(0, sample.prompt_len - TOKENS // 4)  # the task is at the end of a long prompt
    end = min(size, begin + TOKENS)
    pieces = []
    at = begin
    while at < end:
        stop = at + 1
        text = decode(sample.tokens[at:stop].tolist())
        while "\ufffd" in text and stop < min(end, at + 6):  # a character of several tokens
            stop += 1
            text = decode(sample.tokens[at:stop].tolist())
        pieces.append(_piece(sample, at, visible(text), gaps.get(at)))
        at = stop
    return ShownSample(_title(sample), sample.reward, pieces, size - (end - begin))


def _piece(sample: Sample, at: int, text: str, gap: float | None) -> Piece:
    logprob = float(sample.rollout_logprobs[at])
    experts = ""
    if sample.routes is not None and bool(sample.route_mask[at]):
        experts = " | ".join(" ".join(map(str, layer)) for layer in sample.routes[at].tolist())
    if not sample.loss_mask[at]:
        kind = "prompt" if at < sample.prompt_len else "observed"
        return Piece(text, kind, 0, logprob, None, experts)
    if gap is None:
        tone = sum(logprob < limit for limit in UNLIKELY)
    else:
        tone = sum(abs(gap) > limit for limit in GAPS)
    return Piece(text, "sampled", tone, logprob, gap, experts)


def visible(text: str) -> str:
    """``text`` with signs for characters that a page would hide, or that reverse its order."""
    return "".join(
        "↵\n" if c == "\n" else c if c.isprintable() or c == "\t" else f"⟨U+{ord(c):04X}⟩"
        for c in text
    )
