"""Published tensors as a sender takes them, and the memory that they take."""

from itertools import cycle

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def in_given_memory(stream):
    """(name, tensor) of ``stream`` in two buffers in turn, as a sender's."""
    turns = cycle((0, 1))
    memory = {}

    def allocate(size):
        turn = next(turns)
        if len(memory.get(turn, ())) < size:
            memory[turn] = torch.empty(size, dtype=torch.uint8)
        return memory[turn]

    for bucket, buffer in stream.buckets(allocate):
        for slot in bucket.slots:
            yield slot.name, slot.view(buffer)


class Held(TorchDispatchMode):
    """Peak bytes of the tensors that are made while it is on."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {id_of(each) for each in tree_leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and id_of(each) not in before:
                storage = each.untyped_storage()
                self.alive[id_of(each)] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def id_of(value):
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
