"""A stream of the embedded engine: turns wait, run in rows of the cache, and finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.rollout.engine import TurnFeed, need_processor
from pyrl_ext.rollout.hf.cache import SlotCache
from pyrl_ext.rollout.hf.model import RoutedModel
from pyrl_ext.rollout.hf.sampling import StopStrings, draw, stream_keys
from pyrl_ext.samples import Image, Prompt, Sample, Sampling, Turn, kept_counts, route_dtype

MAX_PREFILL_TOKENS = 16384
"""Padded prompt tokens of one prefill; a longer prompt runs alone."""


class Slots:
    """Token-wise state of the running turns: rows 0..running-1.

    A finished turn leaves a hole; the last running rows move into the holes, so every forward works
    on a slice without a gather.

    Args:
        num_slots: rows
        capacity: tokens of a row
        model: decides the shape of routes

    Attributes:
        turn: [num_slots] objects, the turn of each row
        kept: [num_slots] objects, the sets of tokens that each response was drawn from
        length, start, limit: [num_slots] int64 on the host, tokens of each row, of its context, and
            the most it may have
        ahead: [num_slots] int64 on the host, position less place of the tokens after the prompt
            (images take fewer positions than tokens)
        tokens: [num_slots, capacity] int64; logprobs: the same, float32
        keys: [num_slots] int64, random streams
        routes: [num_slots, capacity, L, K], or None without routers
    """

    def __init__(self, num_slots: int, capacity: int, model: RoutedModel):
        device = model.device
        self.running = 0
        self.turn: Any = np.empty(num_slots, dtype=object)
        self.kept: Any = np.empty(num_slots, dtype=object)
        self.length, self.start, self.limit, self.ahead = np.zeros((4, num_slots), dtype=np.int64)
        self.tokens = torch.zeros(num_slots, capacity, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num_slots, capacity, dtype=torch.float32, device=device)
        self.keys = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.routes = None
        self.route_dtype = route_dtype(model.num_experts)
        if model.layer_ids:
            shape = (len(model.layer_ids), int(model.text.num_experts_per_tok))
            # torch cannot write into uint16 by index
            dtype = torch.int16 if self.route_dtype == torch.uint16 else self.route_dtype
            self.routes = torch.zeros(num_slots, capacity, *shape, dtype=dtype, device=device)
        self.cache = SlotCache(num_slots, capacity)

    @property
    def free(self) -> int:
        """Number of rows for further turns."""
        return self.length.size - self.running

    def begin(self, turns: Sequence[Turn], keys: Tensor) -> None:
        """Counts the next rows as running these turns; their tokens are there already."""
        span = slice(self.running, self.running + len(turns))
        sizes = np.array([len(turn.prompt.tokens) for turn in turns], dtype=np.int64)
        self.length[span] = sizes
        self.start[span] = sizes
        self.limit[span] = sizes + np.array([turn.max_new_tokens for turn in turns])
        self.logprobs[span] = 0
        self.keys[span] = keys.to(self.keys.device)
        for row, turn in enumerate(turns, self.running):
            self.turn[row] = turn
            self.kept[row] = []
        self.running += len(turns)

    def append(self, first: int, tokens: Tensor, logprobs: Tensor) -> None:
        """Adds one token to each of the rows first..running-1."""
        span = slice(first, self.running)
        rows = torch.arange(first, self.running, device=tokens.device)
        places = torch.from_numpy(self.length[span]).to(tokens.device)
        self.tokens[rows, places] = tokens
        self.logprobs[rows, places] = logprobs
        self.length[span] += 1

    def retire(self, done: np.ndarray) -> None:
        """Ends the rows where done [running] bool; the last running rows fill the holes."""
        keep = int(self.running - done.sum())
        holes = np.flatnonzero(done[:keep])
        movers = keep + np.flatnonzero(~done[keep:])
        self.running = keep
        if not len(holes):
            return
        for array in (self.turn, self.kept, self.length, self.start, self.limit, self.ahead):
            array[holes] = array[movers]
        length = int(self.length[holes].max())
        source = torch.from_numpy(movers).to(self.tokens.device)
        target = torch.from_numpy(holes).to(self.tokens.device)
        for buffer in (self.tokens, self.logprobs, self.routes):
            if buffer is not None:
                buffer[target, :length] = buffer[source, :length]
        self.keys[target] = self.keys[source]
        self.cache.move(source, target, length)


def check_turn(turn: Turn, model: RoutedModel, max_tokens: int) -> None:
    """Raises ValueError for a turn that the model cannot answer.

    Args:
        max_tokens: longest context and response together
    """
    where = _where(turn)
    prompt = turn.prompt
    vocab = model.text.vocab_size
    positions = model.text.max_position_embeddings
    need_processor("HFEngine.answer", [prompt], model.images.scale)
    if not prompt.tokens:
        raise ValueError(f"{where}: 0 tokens, expected at least one")
    for most, unit in ((positions, "positions"), (max_tokens, "tokens of the feed")):
        if len(prompt.tokens) + turn.max_new_tokens > most:
            raise ValueError(
                f"{where}: {len(prompt.tokens)} tokens + max_new_tokens "
                f"{turn.max_new_tokens}, expected at most {most} {unit} in all"
            )
    if bad := [token for token in prompt.tokens if not 0 <= token < vocab]:
        raise ValueError(f"{where}: token id {bad[0]}, expected 0 to {vocab - 1}")


def _where(turn: Turn) -> str:
    place = f"turn {turn.number} of sample {turn.index} of prompt {turn.prompt.id}"
    return f"HFEngine.answer({place})"


class EngineRun:
    """One call of `answer`.

    Args:
        model: with loaded weights
        version: of the weights
        feed: of the turns
        sampling: see `Engine.answer`
        max_num_seqs, tokenizer: as `HFEngine`
    """

    def __init__(
        self,
        model: RoutedModel,
        version: int,
        feed: TurnFeed,
        sampling: Sampling,
        max_num_seqs: int,
        tokenizer: Tokenizer | None,
    ):
        self.model = model
        self.version = version
        self.feed = feed
        self.sampling = sampling
        self.open = True  # more turns may come
        self.waiting: deque[Turn] = deque()
        self.slots = Slots(min(max_num_seqs, feed.trajectories), feed.max_tokens, model)
        self.stop = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=model.device)
        self.stops = StopStrings(tokenizer, sampling.stop) if sampling.stop else None
        self._images: dict[int, tuple[Image, ...]] = {}

    def has_work(self) -> bool:
        """Takes new turns, and waits for some if none waits or runs; True if there are turns, or
        some may come."""
        turns = None
        if self.open:
            turns = self.feed.take(wait=not self.waiting and not self.slots.running)
            self.open = turns is not None
        checked = None
        for turn in turns or ():
            if turn.prompt is not checked:  # one for a whole group
                check_turn(turn, self.model, self.feed.max_tokens)
                checked = turn.prompt
            self.waiting.append(turn)
        return bool(self.open or self.waiting or self.slots.running)

    def forward(self) -> list[Sample]:
        """One forward, if any turn waits or runs; returns the samples that it finishes."""
        first = self.slots.running
        if self._should_admit():
            return self._advance(first, self._prefill())
        return self._advance(0, self._decode()) if first else []

    def _should_admit(self) -> bool:
        """True if waiting turns begin now. A prefill costs a whole forward, so it waits until a
        quarter of the slots is free, and, while more turns may come, until the number of waiting
        turns is an eighth of those that run."""
        free = self.slots.free
        waiting = len(self.waiting)
        enough = free >= waiting or 4 * free >= self.slots.length.size
        if self.open:
            enough &= 8 * waiting >= self.slots.running
        return waiting > 0 and free > 0 and enough

    def _admit(self) -> tuple[list[Turn], list[Prompt], np.ndarray]:
        """Takes waiting turns for one prefill: turns [M], their distinct prompts, and the index of
        each turn's prompt [M]."""
        turns: list[Turn] = []
        prompts: list[Prompt] = []
        places: dict[tuple[int, tuple[int, ...]], int] = {}
        source: list[int] = []
        width = 0
        while self.waiting and len(turns) < self.slots.free:
            prompt = self.waiting[0].prompt
            key = (prompt.id, prompt.tokens)
            if key not in places:
                size = len(prompt.tokens)
                if prompts and self.model.has_states and size != width:
                    break  # padding would change the states
                width = max(width, size)
                if prompts and (len(prompts) + 1) * width > MAX_PREFILL_TOKENS:
                    break
                places[key] = len(prompts)
                prompts.append(prompt)
            turns.append(self.waiting.popleft())
            source.append(places[key])
        return turns, prompts, np.array(source)

    def _prefill(self) -> Tensor:
        """Runs the contexts of newly admitted turns; returns their first logits [M, V]."""
        turns, prompts, source = self._admit()
        slots = self.slots
        first = slots.running
        device = self.model.device
        sizes = np.array([len(prompt.tokens) for prompt in prompts], dtype=np.int64)
        width = int(sizes.max())
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : sizes[row]] = prompt.tokens
        tokens = torch.from_numpy(ids).to(device)
        take = torch.from_numpy(source).to(device)
        ends, end_of = np.unique(sizes - 1, return_inverse=True)
        slots.cache.prefill(first, take)
        # prompts are padded on the right: a causal mask already hides the padding
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
        images = [self._images_of(prompt) for prompt in prompts]
        places, ahead = self.model.images.positions(images, width, sizes)
        pixels = self.model.images.inputs(images, device, self.model.model.dtype)
        keep = torch.from_numpy(ends).to(device)
        logits = self.model.forward(tokens, causal, places.to(device), slots.cache, keep, **pixels)
        span = slice(first, first + len(turns))
        slots.tokens[span, :width] = tokens[take]
        slots.ahead[span] = ahead[source]
        if slots.routes is not None:
            routes = self.model.routes().to(slots.routes.dtype)
            slots.routes[span, :width] = routes.view(len(prompts), width, *routes.shape[1:])[take]
        self.begin(turns)
        return logits[take, torch.from_numpy(end_of.reshape(-1)[source]).to(device)]

    def begin(self, turns: Sequence[Turn]) -> None:
        """The next rows run these turns from now on."""
        ids = torch.tensor([turn.prompt.id for turn in turns])
        indices = torch.tensor([turn.stream for turn in turns])
        self.slots.begin(turns, stream_keys(self.sampling.seed, ids, indices))

    def _decode(self) -> Tensor:
        """Runs the newest token of every running row; returns the next logits [running, V]."""
        slots = self.slots
        device = self.model.device
        lengths = slots.length[: slots.running]
        length = int(lengths.max())
        places = torch.from_numpy(lengths - 1).to(device)
        rows = torch.arange(slots.running, device=device)
        slots.cache.decode(places, length)
        seen = torch.arange(length, device=device) <= places[:, None]
        ahead = torch.from_numpy(slots.ahead[: slots.running]).to(device)
        positions = (places + ahead)[:, None]
        if self.model.images.three:
            positions = positions.expand(3, -1, -1)
        tokens = slots.tokens[rows, places][:, None]
        logits = self.model.forward(tokens, seen[:, None, None], positions, slots.cache, 1)
        if slots.routes is not None:
            slots.routes[rows, places] = self.model.routes().to(slots.routes.dtype)
        return logits[:, -1]

    def _advance(self, first: int, logits: Tensor) -> list[Sample]:
        """Draws a token for the rows first..running-1; removes finished rows and returns them."""
        slots = self.slots
        span = slice(first, slots.running)
        places = torch.from_numpy(slots.length[span]).to(logits.device)
        tokens, logprobs, kept = draw(logits, slots.keys[span], places, self.sampling)
        slots.append(first, tokens, logprobs)
        self.drawn(first, tokens, logprobs, logits)
        if kept is not None:
            ids = kept.nonzero()[:, 1].int().cpu()
            for row, row_ids in enumerate(ids.split(kept.sum(1).tolist()), first):
                slots.kept[row].append(row_ids)
        stopped = torch.isin(tokens, self.stop).cpu().numpy()
        if self.stops is not None:
            stopped |= self.stops.complete(self._tails(span, self.stops.window))
        done = np.zeros(slots.running, dtype=bool)
        done[span] = stopped | (slots.length[span] >= slots.limit[span])
        if not done.any():
            return []
        finished = self.harvest(np.flatnonzero(done), stopped[done[span]])
        slots.retire(done)
        return finished

    def drawn(self, first: int, tokens: Tensor, logprobs: Tensor, logits: Tensor) -> None:
        """Called with a new token of each of the rows first..running-1; a server sends them."""

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

    def harvest(self, rows: np.ndarray, stopped: np.ndarray) -> list[Sample]:
        """Copies rows to samples. Raises: RuntimeError for non-finite logits."""
        slots = self.slots
        take = torch.from_numpy(rows).to(self.model.device)
        width = int(slots.length[rows].max())
        tokens = slots.tokens[take, :width].cpu()
        logprobs = slots.logprobs[take, :width].cpu()
        routes = None if slots.routes is None else slots.routes[take, :width].cpu()
        if not bool(torch.isfinite(logprobs).all()):
            row = int((~torch.isfinite(logprobs)).any(1).nonzero()[0])
            raise RuntimeError(
                f"{_where(slots.turn[rows[row]])}: non-finite logits, expected numbers; "
                f"weights of version {self.version} produced them"
            )
        samples: list[Sample] = []
        for number, row in enumerate(rows.tolist()):
            turn: Turn = slots.turn[row]
            size = int(slots.length[row])
            start = int(slots.start[row])
            places = torch.arange(size)
            experts = None
            if routes is not None:
                experts = routes[number, :size].clone()
                experts[-1] = 0
                experts = experts.view(slots.route_dtype)
            sets: list[Tensor] = slots.kept[row]
            sample = Sample(
                prompt_id=turn.prompt.id,
                index=turn.index,
                tokens=tokens[number, :size].clone(),
                prompt_len=start,
                loss_mask=places >= start,
                rollout_logprobs=logprobs[number, :size].clone(),
                routes=experts,
                layer_ids=self.model.layer_ids,
                route_mask=places < (0 if routes is None else size - 1),
                weight_version=self.version,
                finish_reason="stop" if stopped[number] else "length",
                images=self._images_of(turn.prompt),
                turn=turn.number,
                kept_counts=kept_counts(sets, start) if sets else None,
                kept_ids=torch.cat(sets) if sets else None,
            )
            samples.append(sample)
        return samples

    def _images_of(self, prompt: Prompt) -> tuple[Image, ...]:
        """The images of a prompt, decoded once; its samples share them."""
        if prompt.id not in self._images:
            self._images[prompt.id] = tuple(image.load() for image in prompt.images)
        return self._images[prompt.id]
