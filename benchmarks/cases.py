"""The families of cases, by the name of what they measure: also that of their tests."""

from collections.abc import Callable, Iterator
from pkgutil import resolve_name

from benchmarks.measure import Case

FAMILIES = {
    "gather_rows": "benchmarks.cases_rows:gather_rows",
    "gather_fields": "benchmarks.cases_rows:gather_fields",
    "gather_routes": "benchmarks.cases_routes:gather_routes",
    "layout": "benchmarks.cases_layout:layout",
    "feed": "benchmarks.cases_feed:feed",
    "replay_probs": "benchmarks.cases_router:replay_probs",
    "swiglu": "benchmarks.cases_swiglu:swiglu",
    "experts": "benchmarks.cases_experts:experts",
    "token_logprob": "benchmarks.cases_logprob:token_logprob",
    "linear_logprob": "benchmarks.cases_linear:linear_logprob",
}

# Timed with glibc's own malloc, as a user runs them: what they are compared with needs much memory.
# Others write a large result, and so as not to time the page faults of that malloc keeps what is
# freed.
FRESH_MEMORY = ("token_logprob", "linear_logprob")


def cases_of(family: str) -> Callable[..., Iterator[Case]]:
    """``cases(device, shrink=1)``; ``shrink`` divides the sizes. Only this family is imported."""
    return resolve_name(FAMILIES[family])
