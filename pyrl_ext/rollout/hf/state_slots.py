"""Memory of the embedded engine for layers that carry a state along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from pyrl_ext.rollout.hf.kv_slots import SlotCache


class StateSlots:
    """One such layer of the running sequences, in place of a layer of transformers'
    cache: the last inputs of its convolution [slots, channels, taps - 1], and its state [slots,
    heads, K, V].

    Models read and, of a single token, write ``conv_states[0]``; both are views of the rows of the
    forward.

    Args:
        cache: of all layers; its ``span`` is the rows of the forward
    """

    record_past = False  # transformers asks: nothing is ever taken back

    def __init__(self, cache: SlotCache):
        self.cache = cache
        self.held: dict[str, Tensor] = {}

    @property
    def conv_states(self) -> tuple[Tensor]:
        return (self.held["inputs"][self.cache.span],)

    @property
    def recurrent_states(self) -> tuple[Tensor]:
        return (self.held["state"][self.cache.span],)

    def store(self, name: str, new: Tensor) -> None:
        """Writes the rows of the forward."""
        if name not in self.held:
            self.held[name] = new.new_zeros(self.cache.num_slots, *new.shape[1:])
        self.held[name][self.cache.span] = new

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies rows source [N] onto rows target [N]."""
        for held in self.held.values():
            held[target] = held[source]
