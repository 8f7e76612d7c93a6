"""megatron-core's messages between pipeline stages, without waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

Shape = tuple[int, int, int]


class KnownShapes(P2PCommunicator):
    """Receives tensors whose shapes all stages know from the schedule.

    Where microbatches differ in length, megatron-core 0.19.2 sends the shape of every tensor before
    it, waits for the whole device (p2p_communication.py:263) and reads the shape: the host cannot
    launch ahead. Its other wait, after each tensor, is off by ``batch_p2p_sync=False``.

    Args:
        microbatches: of the pass.
        shape_of: (microbatch, place) -> shape that the chunk at this place of the pipeline, counted
            over all chunks of all stages, hands to the next one; so is the gradient's.

    Raises: RuntimeError on a rank that is to send a tensor of another shape.
    """

    def __init__(
        self, group: Any, config: Any, microbatches: int, shape_of: Callable[[int, int], Shape]
    ):
        super().__init__(group, config)
        chunks = self.virtual_pipeline_model_parallel_size or 1
        turns = get_schedule_table(microbatches, chunks, config.microbatch_group_size_per_vp_stage)
        pp = group.size()
        rank = group.rank()

        def edges(back: bool, behind: int) -> Iterator[Shape]:
            """Shapes in the order of messages over the edge ``behind`` this rank's chunks, 0, or
            before them, -1; of gradients, chunks take their turns from the last one on."""
            for number, chunk in turns:
                place = (chunks - 1 - chunk if back else chunk) * pp + rank + behind
                if 0 <= place < chunks * pp - 1:
                    yield shape_of(number, place)

        self._received = edges(False, -1)
        self._sent = edges(False, 0)
        self._gradients = edges(True, 0)
        self._sent_back = edges(True, -1)

    def _communicate_shapes(  # type: ignore[override]
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        for tensor, shapes in ((tensor_send_next, self._sent), (tensor_send_prev, self._sent_back)):
            if tensor is not None and (shape := next(shapes, None)) != tuple(tensor.shape):
                raise RuntimeError(
                    f"KnownShapes: stage {self.current_stage} sends {list(tensor.shape)}, expected "
                    f"{shape}, which the other stage is about to receive"
                )
        return (
            next(self._received) if recv_prev else None,
            next(self._gradients) if recv_next else None,
        )
