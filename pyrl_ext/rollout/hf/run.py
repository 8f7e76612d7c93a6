"""One stream of the embedded engine: the turns that wait, run, finish, and are continued."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.rollout.engine import TurnFeed, need_processor, replaced
from pyrl_ext.rollout.hf.kv_slots import Key, Slots, key_of
from pyrl_ext.rollout.hf.sampling import draw, stream_keys
from pyrl_ext.rollout.hf.stop_strings import StopStrings
from pyrl_ext.samples import Image, Prompt, Sample, Sampling, Turn, kept_counts

if TYPE_CHECKING:
    from pyrl_ext.rollout.hf.engine import HFEngine


class Run:
    """One call of `answer` or `stream`: which turns wait, which run, and which may be continued.

    It holds keys and values of the weights it began with alone, and ends with them.

    Args:
        engine: that has loaded weights
        feed: of the turns
        sampling: see `Engine.answer`
        call: "answer" or "stream", for messages
    """

    def __init__(self, engine: HFEngine, feed: TurnFeed, sampling: Sampling, call: str):
        self.engine = engine
        self.feed = feed
        self.sampling = sampling
        self.call = call
        assert engine.version is not None
        self.version = engine.version
        self._loads = engine.loads
        self.open = True  # more turns may come
        self.waiting: deque[Turn] = deque()
        self._busy: set[Key] = set()  # trajectories with a turn that waits or runs
        self._images: dict[int, tuple[Image, ...]] = {}
        self._kept: dict[Key, list[Tensor]] = {}  # the sets that running turns are drawn from
        self.stop = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=engine.device)
        self.stops = StopStrings(engine.tokenizer, sampling.stop) if sampling.stop else None
        self.slots = Slots(
            min(engine.max_num_seqs, feed.trajectories),
            feed.max_tokens,
            engine.route_shape(),
            stored(engine.route_dtype),
            engine.device,
            # a state is that behind all of a turn's tokens, padding included
            parks=not engine.has_states,
        )

    def images(self, prompt: Prompt) -> tuple[Image, ...]:
        """The images of a prompt, decoded once; its samples share them."""
        if prompt.id not in self._images:
            self._images[prompt.id] = tuple(each.load() for each in prompt.images)
        return self._images[prompt.id]

    def goes_on(self) -> bool:
        """Takes the turns that came, and waits for some if nothing else is to be done; whether
        there is any turn to answer, or one may come."""
        if (self.engine.version, self.engine.loads) != (self.version, self._loads):
            raise replaced(f"HFEngine.{self.call}", self.version)
        turns = None
        if self.open:
            turns = self.feed.take(wait=not self.waiting and not self.slots.running)
            self.open = turns is not None
        checked = None
        for turn in turns or ():
            if turn.prompt is not checked:  # one for a whole group
                self._check(turn)
                checked = turn.prompt
            self._add(turn)
        return bool(self.open or self.waiting or self.slots.running)

    def _add(self, turn: Turn) -> None:
        key = key_of(turn)
        context = turn.prompt.tokens
        if key in self._busy:
            raise ValueError(f"{self._where(turn)}: an earlier one runs, expected one at a time")
        self._busy.add(key)
        self.waiting.append(turn)
        if (row := self.slots.parked.get(key)) is not None:
            before = self.slots.held[row]
            if context[: len(before)] != before:  # a fork
                del self.slots.parked[key]

    def _check(self, turn: Turn) -> None:
        where = self._where(turn)
        prompt = turn.prompt
        text = self.engine.text
        vocab = text.vocab_size
        places = text.max_position_embeddings
        need_processor(f"HFEngine.{self.call}", [prompt], self.engine.images.scale)
        if not prompt.tokens:
            raise ValueError(f"{where}: 0 tokens, expected at least one")
        for most, what in ((places, "positions"), (self.feed.max_tokens, "tokens of the feed")):
            if len(prompt.tokens) + turn.max_new_tokens > most:
                raise ValueError(
                    f"{where}: {len(prompt.tokens)} tokens + max_new_tokens "
                    f"{turn.max_new_tokens}, expected at most {most} {what} in all"
                )
        bad = [t for t in prompt.tokens if not 0 <= t < vocab]
        if bad:
            raise ValueError(f"{where}: token id {bad[0]}, expected 0 to {vocab - 1}")

    def _where(self, turn: Turn) -> str:
        part = f"prompt {turn.prompt.id}"
        if self.call == "answer":
            part = f"turn {turn.number} of sample {turn.index} of {part}"
        return f"HFEngine.{self.call}({part})"

    def should_admit(self) -> bool:
        """A prefill costs a whole forward, so it waits until a quarter of the slots is free, and,
        while more turns may come, until those that wait are an eighth of those that run."""
        free = self.slots.free
        waiting = len(self.waiting)
        enough = free >= waiting or 4 * free >= self.slots.length.size
        if self.open:
            enough &= 8 * waiting >= self.slots.running
        return waiting > 0 and free > 0 and enough

    def continuing(self, max_tokens: int) -> list[Turn]:
        """Takes the waiting turns out that go on from a parked row, as many as one forward has."""
        found: list[Turn] = []
        width = 0
        for turn in self.waiting if self.slots.parked else ():
            if (row := self.slots.parked.get(key_of(turn))) is None:
                continue
            width = max(width, len(turn.prompt.tokens) - int(self.slots.length[row]) + 1)
            if found and (len(found) + 1) * width > max_tokens:
                break
            found.append(turn)
        taken = {key_of(turn) for turn in found}
        if taken:
            self.waiting = deque(turn for turn in self.waiting if key_of(turn) not in taken)
        return found

    def beginning(self, max_tokens: int) -> tuple[list[Turn], list[Prompt], np.ndarray]:
        """Takes waiting turns out that are computed from their first token, and frees their rows.

        Returns:
            turns [M], their distinct prompts, and the index of each turn's prompt among them [M]
        """
        turns: list[Turn] = []
        prompts: list[Prompt] = []
        source: list[int] = []
        width = 0
        while self.waiting and len(turns) < self.slots.free:
            prompt = self.waiting[0].prompt
            if not prompts or not _same(prompts[-1], prompt):
                if prompts and self.engine.has_states and len(prompt.tokens) != width:
                    break  # padding would change the states
                width = max(width, len(prompt.tokens))
                if prompts and (len(prompts) + 1) * width > max_tokens:
                    break
                prompts.append(prompt)
            turns.append(self.waiting.popleft())
            source.append(len(prompts) - 1)
        self.slots.clear(len(turns))
        return turns, prompts, np.array(source)

    def begin(self, turns: Sequence[Turn]) -> None:
        """The next rows run these turns from now on."""
        ids, indices = zip(*(key_of(turn) for turn in turns), strict=True)
        keys = stream_keys(self.sampling.seed, torch.tensor(ids), torch.tensor(indices))
        self.slots.begin(turns, keys)

    def advance(self, first: int, logits: Tensor) -> list[Sample]:
        """Draws a token for the rows first..running-1; removes finished rows and returns them."""
        slots = self.slots
        span = slice(first, slots.running)
        places = torch.from_numpy(slots.length[span]).to(logits.device)
        tokens, logprobs, kept = draw(logits, slots.keys[span], places, self.sampling)
        slots.append(first, tokens, logprobs)
        self.drawn(first, tokens, logprobs, logits)
        if kept is not None:
            self._keep(first, kept)
        stopped = torch.isin(tokens, self.stop).cpu().numpy()
        if self.stops is not None:
            stopped |= self.stops.complete(self._tails(span, self.stops.window))
        done = np.zeros(slots.running, dtype=bool)
        done[span] = stopped | (slots.length[span] >= slots.limit[span])
        if not done.any():
            return []
        finished = self._harvest(np.flatnonzero(done), stopped[done[span]])
        slots.retire(done, park=self.open)
        return finished

    def drawn(self, first: int, tokens: Tensor, logprobs: Tensor, logits: Tensor) -> None:
        """The rows first..running-1 got a token each; a server sends them on."""

    def _keep(self, first: int, kept: Tensor) -> None:
        """Add the sets [rows, V] of a token of each of the rows first..running-1.

        Syncs: reads their sizes.
        """
        ids = kept.nonzero()[:, 1].int().cpu()
        for row, each in enumerate(ids.split(kept.sum(1).tolist()), first):
            self._kept.setdefault(key_of(self.slots.turn[row]), []).append(each)

    def _tails(self, span: slice, window: int) -> list[list[int]]:
        """Up to `window` last tokens of the responses in these rows."""
        ends = self.slots.length[span]
        begins = np.maximum(ends - window, self.slots.start[span])
        low = begins.min()
        block = self.slots.tokens[span, low : ends.max()].cpu().numpy()
        return [
            row[begin - low : end - low].tolist()
            for row, begin, end in zip(block, begins, ends, strict=True)
        ]

    def _harvest(self, rows: np.ndarray, stopped: np.ndarray) -> list[Sample]:
        """Copies finished rows to samples."""
        slots = self.slots
        engine = self.engine
        take = torch.from_numpy(rows).to(engine.device)
        width = int(slots.length[rows].max())
        tokens = slots.tokens[take, :width].cpu()
        logprobs = slots.logprobs[take, :width].cpu()
        routes = None if slots.routes is None else slots.routes[take, :width].cpu()
        if not bool(torch.isfinite(logprobs).all()):
            row = int((~torch.isfinite(logprobs)).any(1).nonzero()[0])
            raise RuntimeError(
                f"{self._where(slots.turn[rows[row]])}: non-finite logits, expected numbers; "
                f"weights of version {self.version} produced them"
            )
        finished = []
        for number, row in enumerate(rows.tolist()):
            turn = slots.turn[row]
            size = int(slots.length[row])
            start = int(slots.start[row])
            places = torch.arange(size)
            known = places < (size - 1 if routes is not None else 0)
            experts = None
            if routes is not None:
                experts = routes[number, :size].clone()
                experts[-1] = 0
                experts = experts.view(engine.route_dtype)
            sets = self._kept.pop(key_of(turn), None)
            sample = Sample(
                prompt_id=turn.prompt.id,
                index=turn.index,
                tokens=tokens[number, :size].clone(),
                prompt_len=start,
                loss_mask=places >= start,
                rollout_logprobs=logprobs[number, :size].clone(),
                routes=experts,
                layer_ids=engine.layer_ids,
                route_mask=known,
                weight_version=self.version,
                finish_reason="stop" if stopped[number] else "length",
                images=self.images(turn.prompt),
                turn=turn.number,
                kept_counts=None if sets is None else kept_counts(sets, start),
                kept_ids=None if sets is None else torch.cat(sets),
            )
            finished.append(sample)
            self._busy.discard(key_of(turn))
            if self.open:
                slots.held[row] = turn.prompt.tokens + tuple(sample.response)
        return finished


def _same(one: Prompt, other: Prompt) -> bool:
    return one is other or (one.id == other.id and one.tokens == other.tokens)


def stored(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width that torch can index; it cannot write into uint16 by index."""
    return torch.int16 if dtype == torch.uint16 else dtype
