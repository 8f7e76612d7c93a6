"""A policy on the double: megatron's calls of torch.cuda reach the double's device and streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.megatron import cpu
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from tests.helpers import gpu_double
from tests.helpers.gpu_double import memory, streams
from tests.helpers.gpu_double.tensor import OnDevice


@contextmanager
def on_double(plan: Plan) -> Iterator[Topology]:
    """The topology of a plan for a CPU, whose tensors are on the double: build the policy, and run
    it, in `gpu_double.rehearsed`. Groups stay on gloo, which gets the tensors' host memory."""
    gpu_double.install()
    device = memory.device()
    with _answering_torch_cuda(device), topology.start(plan) as topo:
        colocated = {name: replace(each, device=device) for name, each in topo.colocated.items()}
        yield replace(topo, device=device, colocated=colocated)


@contextmanager
def _answering_torch_cuda(device: torch.device) -> Iterator[None]:
    """`cpu.install`, with the double in place of the CPU."""
    from megatron.core.transformer.moe import token_dispatcher

    cpu.install()
    cuda: Any = torch.cuda
    cuda.Stream = streams.Stream
    cuda.Event = streams.Event
    cuda.current_stream = streams.current_stream
    cuda.stream = streams.on_stream
    cuda.synchronize = torch.get_device_module(device).synchronize

    def to_double(self: Tensor, *_: Any, non_blocking: bool = False, **__: Any) -> Tensor:
        return self.to(device, non_blocking=non_blocking)

    tensor: Any = Tensor
    tensor.cuda = to_double
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host  # type: ignore[attr-defined]
    before = cpu.CPU
    cpu.CPU = device  # pyright: ignore[reportConstantRedefinition]
    try:
        yield
    finally:
        cpu.CPU = before  # pyright: ignore[reportConstantRedefinition]


def _to_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron's own function, which asks whether ``value`` is on CUDA."""
    if not isinstance(value, OnDevice):
        return value.numpy() if as_numpy and torch.is_tensor(value) else value
    here = value.to("cpu", non_blocking=True)
    if record_stream:
        value.record_stream(streams.current_stream())
    return here.numpy() if as_numpy else here
