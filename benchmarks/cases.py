"""The families of cases, by the name of what they measure: also that of their tests."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pkgutil import resolve_name

from benchmarks.measure import Case

FILES = {
    "cases_pack": ("gather_rows", "gather_fields", "gather_routes", "layout", "feed"),
    "cases_ops": ("replay_probs", "swiglu", "rms_norm", "gated_delta_rule", "expert_rows"),
    "cases_experts": ("experts",),
    "cases_logprob": ("token_logprob",),
    "cases_linear": ("linear_logprob",),
}
FAMILIES = {name: f"benchmarks.{file}:{name}" for file, names in FILES.items() for name in names}

# Timed with glibc's own malloc, as a user runs them: what they are compared with needs much memory.
# Others write a large result, and so as not to time the page faults of that malloc keeps what is
# freed.
FRESH_MEMORY = ("token_logprob", "linear_logprob")


def cases_of(family: str) -> Callable[..., Iterator[Case]]:
    """``cases(device, shrink=1)``; ``shrink`` divides the sizes. Only this family is imported."""
    return resolve_name(FAMILIES[family])


# Bars on a GPU of families whose cases have none there: (first words of a case, at least, at most)
GPU_BARS: dict[str, list[tuple[str, dict[str, float], dict[str, float]]]] = {
    "gather_rows": [
        ("routes", {"% of floor": 75}, {}),
        ("hidden", {"% of floor": 75}, {}),
        ("backward of hidden", {"% of floor": 75}, {}),
    ],
    "gather_fields": [("", {"index each": 2}, {})],
    "gather_routes": [("", {"% of floor": 80}, {})],
    "feed": [("a microbatch", {}, {"ms": 0.15})],
    "replay_probs": [("probs and map", {"% of floor": 80}, {}), ("router", {"megatron": 1}, {})],
    "swiglu": [("", {"% of floor": 80}, {})],
    "rms_norm": [("", {"% of floor": 75, "torch": 1}, {})],
    "expert_rows": [("", {"torch": 2}, {})],
    "experts": [("", {"SequentialMLP": 2}, {})],
}


def with_gpu_bars(family: str, case: Case) -> Case:
    """The case with the bars that it has on a GPU."""
    for start, at_least, at_most in GPU_BARS.get(family, ()):
        if case.name.startswith(start):
            least = {**case.at_least, **at_least}
            most = {**case.at_most, **at_most}
            case = replace(case, at_least=least, at_most=most)
    return case
