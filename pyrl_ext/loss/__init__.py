"""Advantages, losses, and the log-probs that they need."""

from typing import TYPE_CHECKING

from pyrl_ext.lazy import exported

if TYPE_CHECKING:
    from pyrl_ext.loss import vocab_parallel
    from pyrl_ext.loss.evaluation import evaluate
    from pyrl_ext.loss.fused_head import linear_logprob, linear_logprob_loss

__all__ = ["evaluate", "linear_logprob", "linear_logprob_loss", "vocab_parallel"]

_HOMES = {
    "evaluate": "evaluation",
    "linear_logprob": "fused_head",
    "linear_logprob_loss": "fused_head",
    "vocab_parallel": "vocab_parallel",
}
__getattr__ = exported(__name__, _HOMES)
