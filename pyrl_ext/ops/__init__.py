"""Local, pure operators over ``torch.library``, each with several backends."""

from ._op import use_backend
from .gather_routes import gather_routes
from .gather_rows import gather_rows
from .token_logprob import token_logprob_grad, token_logprob_stats

__all__ = [
    "gather_routes",
    "gather_rows",
    "token_logprob_grad",
    "token_logprob_stats",
    "use_backend",
]
