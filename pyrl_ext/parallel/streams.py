"""The CUDA stream on which the trainer works, and that it stays the same."""

from __future__ import annotations

import torch

from pyrl_ext.ops.tensors import on_gpu


def stream_of(device: torch.device) -> int:
    """Number of the stream that is current in this thread; 0 on a CPU, which has none."""
    if not on_gpu(device):
        return 0
    return torch.get_device_module(device).current_stream(device).stream_id


def need_stream(call: str, built: int, now: int) -> None:
    """Raise RuntimeError if another stream is current than when the model was built.

    vLLM 0.32 makes a stream of its process and leaves it current in the thread that builds the
    engine (`vllm/utils/torch_utils.py`, `current_stream`). So the engine is built first, and the
    model, its buffers and all steps are on that stream. A step on another one would read tensors
    while they are written: nothing orders work on two streams.

    Args:
        call: for the message.
        built: `stream_of` when the model was built.
        now: `stream_of` the call.
    """
    if now != built:
        raise RuntimeError(
            f"{call}: CUDA stream {now:#x} is current, expected {built:#x}, on which the model was "
            "built. Build the rollout engine, which changes the stream, before the model, and call "
            "this in the thread that built both"
        )
