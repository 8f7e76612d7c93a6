"""The families of cases, by the name of what they measure: also that of their tests.

Nothing here imports torch, so that a command can refuse its arguments in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from benchmarks.measure import Case


class Family(NamedTuple):
    """The module that makes a family's cases, and a line about them."""

    cases: str
    text: str


FAMILIES = {
    "gather_rows": Family(
        "benchmarks.cases_pack:gather_rows", "rows of a tensor by an index vector, and back"
    ),
    "gather_fields": Family(
        "benchmarks.cases_pack:gather_fields", "all fields of a microbatch in one call"
    ),
    "gather_routes": Family(
        "benchmarks.cases_pack:gather_routes", "routes of the engine, for the routers of a rank"
    ),
    "layout": Family("benchmarks.cases_pack:layout", "the index map of packed sequences"),
    "feed": Family("benchmarks.cases_pack:feed", "samples on the host to a microbatch of a rank"),
    "replay_probs": Family(
        "benchmarks.cases_ops:replay_probs", "a router with replayed experts: probabilities, map"
    ),
    "swiglu": Family("benchmarks.cases_ops:swiglu", "the gated unit of routed experts"),
    "rms_norm": Family("benchmarks.cases_ops:rms_norm", "RMS norm of rows"),
    "gated_delta_rule": Family(
        "benchmarks.cases_ops:gated_delta_rule", "gated delta nets on packed sequences"
    ),
    "expert_rows": Family(
        "benchmarks.cases_ops:expert_rows", "rows sorted by expert, and their sums"
    ),
    "digests": Family("benchmarks.cases_ops:digests", "digests of the tensors of a weight sync"),
    "experts": Family("benchmarks.cases_experts:experts", "the experts of a layer, both passes"),
    "token_logprob": Family(
        "benchmarks.cases_logprob:token_logprob", "log-probs and entropies of logits"
    ),
    "linear_logprob": Family(
        "benchmarks.cases_linear:linear_logprob", "log-probs and entropies of hidden states"
    ),
    "divergence": Family(
        "benchmarks.cases_divergence:divergence", "divergence from a teacher, of hidden states"
    ),
}

# Timed with glibc's own malloc, as a user runs them: what they are compared with needs much memory.
# Others write a large result, and so as not to time the page faults of that malloc keeps what is
# freed.
FRESH_MEMORY = ("token_logprob", "linear_logprob", "divergence")


def cases_of(family: str) -> Callable[..., Iterator[Case]]:
    """``cases(device, shrink=1)``; ``shrink`` divides the sizes. Only this family is imported."""
    return resolve_name(FAMILIES[family].cases)


# Bars on a GPU of families whose cases have none there: (first words of a case, at least, at most)
GPU_BARS: dict[str, list[tuple[str, dict[str, float], dict[str, float]]]] = {
    "gather_rows": [
        ("routes", {"% of floor": 75}, {}),
        ("hidden", {"% of floor": 75}, {}),
        ("backward of hidden", {"% of floor": 75}, {}),
    ],
    "gather_fields": [("", {"index each": 2}, {})],
    # predicted 25: torch's passes over the logits move 220 bytes of each
    "divergence": [("", {"% of floor": 20}, {})],
    "gather_routes": [("", {"% of floor": 80}, {})],
    "feed": [("a microbatch", {}, {"ms": 0.15})],
    "replay_probs": [("probs and map", {"% of floor": 80}, {}), ("router", {"megatron": 1}, {})],
    "swiglu": [("", {"% of floor": 80}, {})],
    "rms_norm": [("", {"% of floor": 75, "torch": 1}, {})],
    "expert_rows": [("", {"torch": 2}, {})],
    "experts": [("", {"SequentialMLP": 2}, {})],
    # predicted 40 on an H100: about 40 integer instructions for each 4 bytes
    "digests": [("", {"% of floor": 25, "one by one": 2}, {})],
}


def with_gpu_bars(family: str, case: Case) -> Case:
    """The case with the bars that it has on a GPU."""
    for start, at_least, at_most in GPU_BARS.get(family, ()):
        if case.name.startswith(start):
            least = {**case.at_least, **at_least}
            most = {**case.at_most, **at_most}
            case = replace(case, at_least=least, at_most=most)
    return case
