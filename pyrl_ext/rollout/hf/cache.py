"""The embedded engine's cache: one row per running sequence, as transformers' `past_key_values`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class SlotCache:
    """Keys and values [slots, heads, capacity, dim] of the running sequences.

    The model decides what a layer caches: keys and values, or with latent attention the compressed
    latents and the rotary part, one head each. Layers with a recurrent state have `StateSlots`.
    `prefill` or `decode` comes before each forward.

    Args:
        num_slots: rows
        capacity: tokens of a row
    """

    def __init__(self, num_slots: int, capacity: int):
        self.num_slots = num_slots
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor] | StateSlots] = {}
        self.span = slice(0)  # rows of the forward
        self._source: Tensor | None = None
        self._places = torch.empty(0, dtype=torch.int64)
        self._length = 0

    def prefill(self, first: int, source: Tensor) -> None:
        """The next forward holds whole prompts; prompt source[i] goes to row first + i.

        Args:
            first: first free row
            source: [M] int64, prompt of each new row (samples of one prompt share its work)
        """
        self._source = source
        self.span = slice(first, first + source.numel())

    def decode(self, places: Tensor, length: int) -> None:
        """The next forward holds the newest token of each running row.

        Args:
            places: [running] int64, place of that token in its row
            length: number of keys that the forward sees
        """
        self._source = None
        self.span = slice(len(places))
        self._places = places
        self._length = length

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        """Stores the new keys and values [B, heads, T, dim]; returns those to attend to."""
        if layer_idx not in self.layers:
            # zeros, not empty: a masked key has weight 0, and 0 * nan would be nan
            shape = (self.num_slots, keys.shape[1], self.capacity)
            buffers = [x.new_zeros(*shape, x.shape[3]) for x in (keys, values)]
            self.layers[layer_idx] = (buffers[0], buffers[1])
        layer = self.layers[layer_idx]
        assert isinstance(layer, tuple)
        if self._source is not None:
            for buffer, new in zip(layer, (keys, values), strict=True):
                buffer[self.span, :, : new.shape[2]] = new[self._source]
            return keys, values
        rows = torch.arange(len(self._places), device=keys.device)
        for buffer, new in zip(layer, (keys, values), strict=True):
            buffer[rows, :, self._places] = new[:, :, 0]
        return tuple(buffer[self.span, :, : self._length] for buffer in layer)

    def has_previous_state(self, layer_idx: int, **_: Any) -> bool:
        """True if the forward continues from states: whole prompts begin without."""
        return self._source is None

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """Stores the last inputs of a convolution over whole prompts [B, channels, T], all of one
        length; returns its inputs."""
        last = F.pad(inputs, (conv_kernel_size - 1, 0))[..., 1 - conv_kernel_size :]
        self._store("inputs", last, layer_idx)
        return inputs

    def update_recurrent_state(self, states: Tensor, layer_idx: int, **_: Any) -> None:
        """Stores the states [B, heads, K, V] after the last tokens."""
        self._store("state", states, layer_idx)

    def _store(self, name: str, new: Tensor, layer_idx: int) -> None:
        layer = self.layers.setdefault(layer_idx, StateSlots(self))
        assert isinstance(layer, StateSlots)
        new = new if self._source is None else new[self._source]
        if name not in layer.buffers:
            layer.buffers[name] = new.new_zeros(self.num_slots, *new.shape[1:])
        layer.buffers[name][self.span] = new

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies the first ``length`` tokens of rows source [N] to rows target [N]."""
        for layer in self.layers.values():
            if isinstance(layer, StateSlots):
                for buffer in layer.buffers.values():
                    buffer[target] = buffer[source]
                continue
            for buffer in layer:
                buffer[target, :, :length] = buffer[source, :, :length]


class StateSlots:
    """A layer with a recurrent state: the last inputs of its convolution [slots, channels,
    taps - 1], and its state [slots, heads, K, V].

    Models read and, of a single token, write ``conv_states[0]``; both are views of the rows of the
    forward.
    """

    record_past = False  # transformers asks: nothing is ever taken back

    def __init__(self, cache: SlotCache):
        self.cache = cache
        self.buffers: dict[str, Tensor] = {}

    @property
    def conv_states(self) -> tuple[Tensor]:
        return (self.buffers["inputs"][self.cache.span],)

    @property
    def recurrent_states(self) -> tuple[Tensor]:
        return (self.buffers["state"][self.cache.span],)
