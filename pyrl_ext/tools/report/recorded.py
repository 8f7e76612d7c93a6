"""Recorded rollouts for the page: samples of best and worst reward, and the load of the experts.

A run has them with ``rollout.record``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyrl_ext.tools.report.state import Folder

if TYPE_CHECKING:
    from pyrl_ext.rollout.recorded_scores import Scores
    from pyrl_ext.samples import Sample

Gaps = dict[int, float]
"""Token of a sample -> the trainer's log-prob less the engine's."""

SHOWN = 2
"""Samples of the best reward, and as many of the worst."""

TOKENS = 320
"""Most tokens shown of a sample: the end of its prompt, and the beginning of its response."""


UNLIKELY = (-0.1, -0.7, -2.3, -4.6)
"""Log-probs below which a token has the next tone; the last is a probability of 1 %."""

APART = (0.003, 0.03, 0.1, 0.5)
"""Differences of log-probs above which it has; the band of their mean is the middle two."""


class Piece(NamedTuple):
    """Some tokens as text; those of one character are together.

    Args:
        kind: "prompt", "sampled" or "observed".
        tone: 0 to 4, how far trainer and engine differ about it; where that is not known, how
            unlikely the engine found it.
        apart: the trainer's log-prob before the update, less the engine's; None: not known.
        experts: of the first token, by router layer.
    """

    text: str
    kind: str
    tone: int
    logprob: float
    apart: float | None
    experts: tuple[tuple[int, ...], ...]

    @property
    def experts_text(self) -> str:
        """The experts, layer after layer."""
        return " | ".join(" ".join(map(str, layer)) for layer in self.experts)


class Shown(NamedTuple):
    """A sample as the page shows it."""

    title: str
    reward: float
    pieces: list[Piece]
    left_out: int


class Recorded(NamedTuple):
    """The newest recorded step of a run.

    Args:
        samples: the best, then the worst.
        layers: [L] 0-based ids of the layers with a router.
        load: [L][E] share of the routed tokens that each expert processed, times E / K: 1 is even.
        tokens: that have a route.
        compared: whether the trainer's log-probs are known.
        why: there is nothing to show, because of this.
        note: what is shown otherwise than asked.
    """

    step: int = -1
    samples: Sequence[Shown] = ()
    layers: Sequence[int] = ()
    load: Sequence[Sequence[float]] = ()
    tokens: int = 0
    compared: bool = False
    why: str = ""
    note: str = ""

    @property
    def busiest(self) -> float:
        """The largest load."""
        return max(max(layer) for layer in self.load)


def recorded(folder: Folder) -> Recorded:
    """The samples and the load of the newest step that ``folder`` recorded."""
    plan = folder.plan
    if plan is None or not plan.has_rollouts:
        return Recorded(why=folder.no_plan or "A run without rollouts has no samples.")
    if plan.rollout.record is None:
        return Recorded(
            why="Not recorded: rollout.record=rollouts keeps the samples of every step."
        )
    files = sorted((folder.path / plan.rollout.record).glob("step-*.safetensors"))
    if not files:
        return Recorded(why=f"No step is in {plan.rollout.record}/ yet.")
    from pyrl_ext.data.files import DataError
    from pyrl_ext.data.tokenizer import load_tokenizer
    from pyrl_ext.rollout.recorded_file import load_samples  # brings torch
    from pyrl_ext.rollout.recorded_scores import load_scores

    newest = files[-1].name[: len("step-000000")]
    try:
        samples = [s for f in files if f.name.startswith(newest) for s in load_samples(f)]
    except ValueError as error:
        return Recorded(why=str(error))
    step = int(newest.removeprefix("step-"))
    scored = sorted((s for s in samples if s.reward == s.reward), key=lambda s: -s.reward)
    chosen = scored if len(scored) <= 2 * SHOWN else [*scored[:SHOWN], *scored[-SHOWN:]]
    note = ""
    decode = _ids
    try:
        decode = load_tokenizer(plan.tokenizer_path or "").decode
    except DataError as error:  # a hub's, which is not on this machine
        note = f"Ids instead of text: {error}"
    gaps: list[Gaps] = [{} for _ in chosen]
    try:
        scores = load_scores(folder.path / plan.rollout.record, step)
        gaps = [_gaps(sample, scores) for sample in chosen]
    except ValueError as error:
        note += f" The trainer's log-probs are left out: {error}"
    shown = [_shown(s, decode, apart) for s, apart in zip(chosen, gaps, strict=True)]
    load = expert_load(samples, plan.sizes.num_experts) if samples[0].routes is not None else []
    tokens = sum(int(s.route_mask.sum()) for s in samples)
    return Recorded(step, shown, samples[0].layer_ids, load, tokens, any(gaps), note=note)


def _ids(ids: list[int]) -> str:
    return "".join(f"{each} " for each in ids)


def expert_load(samples: Sequence[Sample], experts: int) -> list[list[float]]:
    """[L][E] share of the tokens with a route that use each expert, over the even share K / E."""
    ids = np.concatenate([s.routes[s.route_mask].numpy() for s in samples if s.routes is not None])
    tokens, layers, topk = ids.shape
    even = max(1, tokens) * topk / experts
    counts = (np.bincount(ids[:, n].ravel(), minlength=experts) for n in range(layers))
    return [[round(float(c) / even, 3) for c in each] for each in counts]


def _gaps(sample: Sample, scores: Scores) -> Gaps:
    key = (sample.prompt_id, sample.index, sample.turn)
    size = sample.tokens.numel()
    if key not in scores:
        return {}
    tokens, logprobs = scores[key]
    places = tokens.tolist()
    if beyond := [place for place in places if not 0 <= place < size]:
        raise ValueError(f"{_title(sample)}: a score of token {beyond[0]}, expected one of {size}")
    differences = logprobs - sample.rollout_logprobs[tokens]
    return dict(zip(places, differences.tolist(), strict=True))


def _title(sample: Sample) -> str:
    return f"prompt {sample.prompt_id}, sample {sample.index}"


def _shown(sample: Sample, decode: Any, gaps: Gaps) -> Shown:
    size = sample.tokens.numel()
    prompt = sample.prompt_len
    begin = max(0, prompt - TOKENS // 4)  # the task is at the end of a long prompt
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
    return Shown(_title(sample), sample.reward, pieces, size - (end - begin))


def _piece(sample: Sample, at: int, text: str, apart: float | None) -> Piece:
    logprob = float(sample.rollout_logprobs[at])
    sampled = bool(sample.loss_mask[at])
    kind = "prompt" if at < sample.prompt_len else "sampled" if sampled else "observed"
    limits = UNLIKELY if apart is None else APART
    tone = sum(logprob < limit if apart is None else abs(apart) > limit for limit in limits)
    routed = sample.routes is not None and bool(sample.route_mask[at])
    experts = sample.routes[at].tolist() if routed and sample.routes is not None else []
    apart = apart if sampled else None
    return Piece(text, kind, tone * sampled, logprob, apart, tuple(map(tuple, experts)))


def visible(text: str) -> str:
    """``text`` with signs for characters that a page would hide, or that turn its order around."""
    return "".join(
        "↵\n" if c == "\n" else c if c.isprintable() or c == "\t" else f"⟨U+{ord(c):04X}⟩"
        for c in text
    )
