"""Local, pure operators over ``torch.library``, each with several backends."""

from ._native import check_extension
from ._op import serve_gpu_from, use_backend
from .causal_conv1d import causal_conv1d
from .expand_runs import expand_runs
from .expert_rows import ExpertRows, expert_rows
from .gated_delta_rule import gated_delta_rule
from .gather_fields import Fields, gather_fields
from .gather_routes import count_routes, gather_routes
from .gather_rows import Inverse, gather_rows, invert_rows
from .latent_keys import latent_keys
from .replay_probs import replay_probs
from .rms_norm import rms_norm, rms_norm_residual
from .rotary import rotary
from .squared_relu import squared, squared_relu
from .ssd_scan import ssd_scan
from .sum_rows import sum_rows
from .swiglu import swiglu
from .token_logprob import (
    token_logprob_combine,
    token_logprob_grad,
    token_logprob_grad_,
    token_logprob_rows,
    token_logprob_stats,
)

__all__ = [
    "ExpertRows",
    "Fields",
    "Inverse",
    "causal_conv1d",
    "check_extension",
    "count_routes",
    "expand_runs",
    "expert_rows",
    "gated_delta_rule",
    "gather_fields",
    "gather_routes",
    "gather_rows",
    "invert_rows",
    "latent_keys",
    "replay_probs",
    "rms_norm",
    "rms_norm_residual",
    "rotary",
    "serve_gpu_from",
    "squared",
    "squared_relu",
    "ssd_scan",
    "sum_rows",
    "swiglu",
    "token_logprob_combine",
    "token_logprob_grad",
    "token_logprob_grad_",
    "token_logprob_rows",
    "token_logprob_stats",
    "use_backend",
]
