"""Local, pure operators over ``torch.library``, each with several backends."""

from ._op import use_backend
from .expand_runs import expand_runs
from .gather_routes import gather_routes
from .gather_rows import gather_rows
from .token_logprob import token_logprob_grad, token_logprob_stats

__all__ = [
    "expand_runs",
    "gather_routes",
    "gather_rows",
    "token_logprob_grad",
    "token_logprob_stats",
    "use_backend",
]
