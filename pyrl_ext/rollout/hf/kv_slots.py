"""Memory of the embedded engine: one row per running sequence, and the running rows come first.

A sequence that finishes leaves a hole; the last running rows move into the holes, so every step
works on the slice [:running] without a gather.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class SlotCache:
    """Keys and values of the running sequences, as the `past_key_values` of a transformers model.

    The model decides what a layer caches: keys and values [slots, heads, capacity, dim], or with
    latent attention the compressed latents and the rotary part, one head each. Models call
    only `update`; the rows and positions it writes are set before each forward.

    Args:
        num_slots: rows
        capacity: tokens a row can hold
    """

    def __init__(self, num_slots: int, capacity: int):
        self.num_slots, self.capacity = num_slots, capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._source: Tensor | None = None
        self._first = 0
        self._rows = self._positions = torch.empty(0, dtype=torch.int64)
        self._length = 0

    def prefill(self, first: int, source: Tensor) -> None:
        """The next forward holds whole prompts; prompt source[i] goes to row first + i.

        Args:
            first: first free row
            source: [M] int64, prompt of each new row (samples of one prompt share its work)
        """
        self._source, self._first = source, first

    def decode(self, positions: Tensor, length: int) -> None:
        """The next forward holds one token of each of the rows 0..N-1.

        Args:
            positions: [N] int64, where each row's token goes
            length: keys the forward sees, positions.max() + 1
        """
        self._source = None
        self._rows = torch.arange(positions.numel(), device=positions.device)
        self._positions, self._length = positions, length

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, ...]:
        """Stores the new keys and values [B, heads, T, dim]; returns those to attend to."""
        if layer_idx not in self.layers:
            # zeros, not empty: a masked key has weight 0, and 0 * nan would be nan
            self.layers[layer_idx] = tuple(  # type: ignore[assignment]
                x.new_zeros(self.num_slots, x.shape[1], self.capacity, x.shape[3])
                for x in (keys, values)
            )
        held = self.layers[layer_idx]
        if self._source is not None:
            span = slice(self._first, self._first + self._source.numel())
            for buffer, new in zip(held, (keys, values), strict=True):
                buffer[span, :, : new.shape[2]] = new[self._source]
            return keys, values
        count = self._rows.numel()
        for buffer, new in zip(held, (keys, values), strict=True):
            buffer[self._rows, :, self._positions] = new[:, :, 0]
        return tuple(buffer[:count, :, : self._length] for buffer in held)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies rows source [N] onto rows target [N]."""
        for held in self.layers.values():
            for buffer in held:
                buffer[target] = buffer[source]


class Slots:
    """Token-wise state of the running sequences.

    Args:
        num_slots: rows
        capacity: tokens a row can hold
        route_shape: (layers, experts per token), or None to keep no routes
        route_dtype: narrowest type of an expert id
        device: of the model

    Attributes:
        running: rows in use, 0..running-1
        length: [num_slots] numpy int64 on the host, tokens held by each row
        job: [num_slots] numpy int64 on the host, the sample that each row holds
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
    ):
        self.running = 0
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.job = np.zeros(num_slots, dtype=np.int64)
        self.ahead = np.zeros(num_slots, dtype=np.int64)
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
        return self.length.size - self.running

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

    def retire(self, done: np.ndarray) -> None:
        """Frees the rows where done [running] bool; the last running rows fill the holes."""
        keep = int(self.running - done.sum())
        holes = np.flatnonzero(done[:keep])
        movers = keep + np.flatnonzero(~done[keep:])
        if holes.size:
            for held in (self.length, self.job, self.ahead):
                held[holes] = held[movers]
            device = self.tokens.device
            source, target = (torch.from_numpy(x).to(device) for x in (movers, holes))
            for buffer in (self.tokens, self.logprobs, self.keys, self.routes):
                if buffer is not None:
                    buffer[target] = buffer[source]
            self.cache.move(source, target)
        self.running = keep
