"""Run megatron-core 0.19.2 on CPU tensors over gloo. The only file that patches torch.cuda.

Each patch below replaces one place where megatron-core assumes a CUDA device. A run on a GPU never
imports this file. Plans with ``device: cpu`` call `install`, which is permanent for the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
from typing import Any

import torch

from pyrl_ext.parallel.suppress_warnings import hide_gpu_warnings

CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")
_WRITES_CUDA_LITERALLY = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.utils",
    "megatron.core.models.common.embeddings.rope_utils",
)


class _Ordered:
    """A stream or an event on a device where every operation is complete when its call returns."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = synchronize = record = wait = wait_stream

    def record_event(self, *_: Any) -> _Ordered:
        return self


class _TorchWithoutCuda:
    """``torch`` as seen by a megatron module that writes ``device="cuda"``."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in _FACTORIES:
            value = _on_cpu(value)
        setattr(self, name, value)
        return value


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        return factory(*args, device=CPU if device == "cuda" else device, **kwargs)

    return make


@functools.cache
def install() -> None:
    """Patch megatron-core and torch.cuda to run on the CPU, once per process."""
    hide_gpu_warnings()
    _answer_torch_cuda()
    _answer_random_state()
    _answer_cuda_literals()
    _answer_split_sizes()
    _answer_uneven_shards()
    _leave_fusers_uncompiled()
    keep_memory()


def keep_memory() -> None:
    """Let malloc keep what is freed, from now on: a process holds the most it ever held.

    With glibc's defaults a tensor above 32 MiB is mapped anew in every call, and its page faults
    cost several times what is done with it. A C library without ``mallopt`` stays as it is.
    """
    # glibc's malloc.h
    M_TRIM_THRESHOLD = -1
    M_MMAP_MAX = -4
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)  # never return the end of the heap


def _answer_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU  # ~60 sites: torch.empty(..., device=current_device())
    cuda.Stream = cuda.Event = _Ordered  # all-to-all dispatcher, DDP, p2p, checkpointing
    stream = _Ordered()
    cuda.current_stream = lambda *_: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.synchronize = lambda *_: None
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self  # distributed optimizer's checkpoint loading


def _answer_random_state() -> None:
    """The random-state tracker forks the CUDA generator; here there is one generator, the CPU's."""
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _answer_cuda_literals() -> None:
    proxy = _TorchWithoutCuda()
    for name in _WRITES_CUDA_LITERALLY:
        importlib.import_module(name).torch = proxy  # type: ignore[attr-defined]

    kind = torch.Tensor.type  # optimizers and clipper compare type() with "torch.cuda.FloatTensor"

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = kind(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    torch.Tensor.type = type_as_on_cuda  # type: ignore[method-assign]


def _answer_split_sizes() -> None:
    """Split sizes that are on the CPU stay tensors, but all_to_all_single wants a sequence."""
    from megatron.core.transformer.moe import token_dispatcher

    def as_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return value.numpy() if as_numpy and torch.is_tensor(value) else value

    token_dispatcher.maybe_move_tensor_to_cpu = as_host


def _answer_uneven_shards() -> None:
    """With ep and etp above 1, expert-tensor ranks exchange unlike numbers of tokens; gloo gathers
    and scatters equal shapes only, so they are padded to the longest."""
    from megatron.core.tensor_parallel import mappings

    equal_gather = mappings._gather_along_first_dim
    equal_scatter = mappings._reduce_scatter_along_first_dim

    def padded(part: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])

    def gather(
        x: Any, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        sizes = output_split_sizes
        if sizes is None or group.size() == 1 or not any(sizes):
            return equal_gather(x, group, None, *args, **kwargs)
        parts = equal_gather(padded(x, max(sizes)), group).split(max(sizes))
        return torch.cat([part[:rows] for part, rows in zip(parts, sizes, strict=True)])

    def scatter(
        x: Any, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        sizes = input_split_sizes
        if sizes is None or group.size() == 1 or not any(sizes):
            return equal_scatter(x, group, None, *args, **kwargs)
        parts = [padded(part, max(sizes)) for part in x.split(sizes)]
        return equal_scatter(torch.cat(parts), group)[: sizes[group.rank()]]

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter


def _leave_fusers_uncompiled() -> None:
    """torch.compile would spend 12 to 27 s of C++ compilation on functions of a few elements."""
    from megatron.core import jit
    from megatron.core.transformer.moe.router import TopKRouter

    jit.disable_jit_fuser()  # what is imported from here on
    # the one on our path that was imported before
    TopKRouter._apply_expert_bias = inspect.unwrap(TopKRouter._apply_expert_bias)
