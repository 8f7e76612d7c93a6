"""Memory of the embedded engine: one row per running turn, and the running rows come first.

A turn that finishes leaves a hole; the last running rows move into the holes, so every step works
on the slice [:running] without a gather. What a finished turn holds may stay behind them, parked
for the next turn of its trajectory, until its row is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyrl_ext.rollout.hf.state_slots import StateSlots
from pyrl_ext.samples import Turn

Key = tuple[int, int]  # of a trajectory: prompt id and index


class SlotCache:
    """Keys and values of the running sequences, as the `past_key_values` of a transformers model.

    The model decides what a layer caches: keys and values [slots, heads, capacity, dim], or with
    latent attention the compressed latents and the rotary part, one head each. Layers that carry a
    state have `StateSlots`. The rows and positions that a forward writes are set before it.

    Args:
        num_slots: rows
        capacity: tokens a row can hold
    """

    def __init__(self, num_slots: int, capacity: int):
        self.num_slots = num_slots
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor] | StateSlots] = {}
        self.span = slice(0)  # rows of the forward
        self._source: Tensor | None = None
        self._length = 0
        self._positions = torch.empty(0, 0, dtype=torch.int64)

    def prefill(self, first: int, source: Tensor) -> None:
        """The next forward holds whole prompts; prompt source[i] goes to row first + i.

        Args:
            first: first free row
            source: [M] int64, prompt of each new row (samples of one prompt share its work)
        """
        self._source = source
        self.span = slice(first, first + source.numel())

    def extend(self, first: int, positions: Tensor, length: int) -> None:
        """The next forward holds further tokens of the rows first..first + M - 1.

        Args:
            first: of these rows
            positions: [M, N] int64, where each token goes
            length: keys the forward sees
        """
        self._source = None
        self.span = slice(first, first + len(positions))
        self._positions = positions
        self._length = length

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, ...]:
        """Stores the new keys and values [B, heads, T, dim]; returns those to attend to."""
        if layer_idx not in self.layers:
            # zeros, not empty: a masked key has weight 0, and 0 * nan would be nan
            self.layers[layer_idx] = tuple(  # type: ignore[assignment]
                x.new_zeros(self.num_slots, x.shape[1], self.capacity, x.shape[3])
                for x in (keys, values)
            )
        held = self.layers[layer_idx]
        assert isinstance(held, tuple)
        if self._source is not None:
            for buffer, new in zip(held, (keys, values), strict=True):
                buffer[self.span, :, : new.shape[2]] = new[self._source]
            return keys, values
        rows = torch.arange(self.span.start, self.span.stop, device=keys.device)[:, None]
        for buffer, new in zip(held, (keys, values), strict=True):
            buffer[rows, :, self._positions] = new.transpose(1, 2)
        return tuple(buffer[self.span, :, : self._length] for buffer in held)

    def has_previous_state(self, layer_idx: int, **_: Any) -> bool:
        """True if the forward goes on from states: whole prompts begin without."""
        return self._source is None

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """Stores the last inputs of a convolution over whole prompts [B, channels, T], all of one
        length; returns what it reads."""
        last = F.pad(inputs, (conv_kernel_size - 1, 0))[..., 1 - conv_kernel_size :]
        self._put("inputs", last, layer_idx)
        return inputs

    def update_recurrent_state(self, states: Tensor, layer_idx: int, **_: Any) -> None:
        """Stores the states [B, heads, K, V] behind the last tokens."""
        self._put("state", states, layer_idx)

    def _put(self, name: str, new: Tensor, layer_idx: int) -> None:
        held = self.layers.setdefault(layer_idx, StateSlots(self))
        assert isinstance(held, StateSlots)
        held.store(name, new if self._source is None else new[self._source])

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies the first ``length`` tokens of rows source [N] onto rows target [N]."""
        for held in self.layers.values():
            if isinstance(held, StateSlots):
                held.move(source, target)
                continue
            for buffer in held:
                buffer[target, :, :length] = buffer[source, :, :length]


def key_of(turn: Turn) -> Key:
    """The trajectory of a turn."""
    return turn.prompt.id, turn.index


class Slots:
    """Token-wise state of the running turns, and of finished ones that may be continued.

    Args:
        num_slots: rows
        capacity: tokens a row can hold
        route_shape: (layers, experts per token), or None to keep no routes
        route_dtype: narrowest type of an expert id
        device: of the model
        parks: whether a finished turn may be continued

    Attributes:
        running: rows in use, 0..running-1
        parked: trajectory -> row of its last turn, which is finished; in the order they finished
        turn: [num_slots] numpy objects on the host, the turn that each row holds
        held: [num_slots] numpy objects on the host, the tokens of each parked row
        length: [num_slots] numpy int64 on the host, tokens held by each row
        start: [num_slots] numpy int64 on the host, tokens of its context
        limit: [num_slots] numpy int64 on the host, tokens it may grow to
        ahead: [num_slots] numpy int64 on the host, by how much the position of a token after the
            prompt differs from its place (images take fewer positions than tokens)
        tokens: [num_slots, capacity] int64; logprobs: the same, float32
        keys: [num_slots] int64, random streams
        routes: [num_slots, capacity, L, K], or None
    """

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        route_shape: tuple[int, int] | None,
        route_dtype: torch.dtype,
        device: torch.device,
        parks: bool = True,
    ):
        self.parks = parks
        self.running = 0
        self.capacity = capacity
        self.parked: dict[Key, int] = {}
        self.turn: Any = np.empty(num_slots, dtype=object)
        self.held: Any = np.empty(num_slots, dtype=object)
        self.length, self.start, self.limit, self.ahead = np.zeros((4, num_slots), dtype=np.int64)
        self.tokens = torch.zeros(num_slots, capacity, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num_slots, capacity, dtype=torch.float32, device=device)
        self.keys = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.routes = None
        if route_shape is not None:
            shape = (num_slots, capacity, *route_shape)
            self.routes = torch.zeros(shape, dtype=route_dtype, device=device)
        self.cache = SlotCache(num_slots, capacity)

    @property
    def free(self) -> int:
        """Rows for further turns; those of parked ones are among them."""
        return self.length.size - self.running

    def clear(self, count: int) -> None:
        """Makes the next ``count`` rows empty: parked ones move, or, the oldest first, are lost."""
        while self.free - len(self.parked) < count:
            del self.parked[next(iter(self.parked))]
        end = self.running + count
        held = set(self.parked.values())
        source = [row for row in held if row < end]
        target = [row for row in range(end, self.length.size) if row not in held]
        self._move(source, target[: len(source)])

    def resume(self, turns: Sequence[Turn]) -> None:
        """Moves the parked rows of these turns' trajectories to the next rows, in their order."""
        rows = [self.parked.pop(key_of(turn)) for turn in turns]
        places = range(self.running, self.running + len(turns))
        others = [row for row in self.parked.values() if row in places]
        vacant = [row for row in rows if row not in places]
        self._move([*rows, *others], [*places, *vacant[: len(others)]])

    def begin(self, turns: Sequence[Turn], keys: Tensor) -> None:
        """Counts the next rows as running these turns; their tokens are there already."""
        span = slice(self.running, self.running + len(turns))
        sizes = np.array([len(turn.prompt.tokens) for turn in turns], dtype=np.int64)
        self.length[span] = self.start[span] = sizes
        self.limit[span] = sizes + np.array([turn.max_new_tokens for turn in turns])
        self.logprobs[span] = 0
        self.keys[span] = keys.to(self.keys.device)
        for row, turn in enumerate(turns, self.running):
            self.turn[row] = turn
        self.running += len(turns)

    def positions(self) -> Tensor:
        """[running] int64 on the device: where each running row's newest token sits."""
        return torch.from_numpy(self.length[: self.running] - 1).to(self.tokens.device)

    def append(self, first: int, tokens: Tensor, logprobs: Tensor) -> None:
        """Adds one token to each of the rows first..running-1."""
        span = slice(first, self.running)
        rows = torch.arange(first, self.running, device=tokens.device)
        where = torch.from_numpy(self.length[span]).to(tokens.device)
        self.tokens[rows, where] = tokens
        self.logprobs[rows, where] = logprobs
        self.length[span] += 1

    def retire(self, done: np.ndarray, park: bool) -> None:
        """Ends the rows where done [running] bool; the last running rows fill the holes.

        Args:
            park: keep what the rows hold, for later turns of their trajectories
        """
        park &= self.parks
        if park:
            self.parked |= {key_of(self.turn[row]): row for row in np.flatnonzero(done).tolist()}
        keep = int(self.running - done.sum())
        holes = np.flatnonzero(done[:keep]).tolist()
        movers = (keep + np.flatnonzero(~done[keep:])).tolist()
        if park:
            self._move(movers + holes, holes + movers)
        else:
            self._move(movers, holes)
        self.running = keep

    def _move(self, source: list[int], target: list[int]) -> None:
        """Copies rows source [N] onto rows target [N], all at once."""
        if source == target:
            return
        for held in (self.turn, self.held, self.length, self.start, self.limit, self.ahead):
            held[target] = held[source]
        length = int(self.length[target].max())
        device = self.tokens.device
        from_, to = (torch.tensor(rows, device=device) for rows in (source, target))
        for buffer in (self.tokens, self.logprobs, self.routes):
            if buffer is not None:
                buffer[to, :length] = buffer[from_, :length]
        self.keys[to] = self.keys[from_]
        self.cache.move(from_, to, length)
        moved = dict(zip(source, target, strict=True))
        self.parked = {key: moved.get(row, row) for key, row in self.parked.items()}
