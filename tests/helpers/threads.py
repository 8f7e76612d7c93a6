"""The number of threads that torch computes on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    """Compute on so many threads in this block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
