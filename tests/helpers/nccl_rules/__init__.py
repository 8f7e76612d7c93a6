"""NCCL's rules on gloo: a multi-rank test fails where GPUs would hang, crash or compute nonsense.

gloo connects all ranks when a group is made, buffers sends, and takes any type and layout. NCCL
does not. Every rank writes down what it asks `torch.distributed` for. When the ranks have ended, or
stand still, the lists are compared (`checks`) and run once more by NCCL's rules (`simulation`). So
what is found does not depend on how fast which rank was.

The rules:

1. First use. A communicator is made at its first use, and the host waits there for all its ranks:
   of a pair of ranks for an unbatched message, of the whole group for a collective or a batch.
2. One queue a communicator and rank. A launch begins when the one before it is complete; a send is
   complete when its receive runs. The messages of one batch are one launch.
3. All members make the same collective calls in one order: kind, types, shapes, reduce operation,
   root, and split sizes that fit; both ends of a message have one type and number of elements.
4. Types, reduce operations and layouts that NCCL has; in-place outputs where NCCL expects them.
5. No two ranks first use two communicators in opposite orders.
6. `communicators`: those that NCCL would make in this process, to be compared with a plan's.

What is on the device: on a GPU the backend is ``cpu:gloo,cuda:nccl``, so that host tensors, objects
and barriers stay with gloo there. On a CPU a tensor does not show where it would be, so the caller
decides (`record.is_on_device`): calls of the files in `record.HOST_CALLERS`, which hold counts,
agreements and rows on the host, and of the tests themselves are the host's; all others, megatron's
among them, are the device's.
"""

from tests.helpers.nccl_rules.checks import problems, read
from tests.helpers.nccl_rules.record import communicators, install, mark
from tests.helpers.nccl_rules.watch import Watch

__all__ = ["Watch", "communicators", "install", "mark", "problems", "read"]
