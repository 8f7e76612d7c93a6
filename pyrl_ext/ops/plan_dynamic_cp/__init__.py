"""plan_dynamic_cp: microbatches and context-parallel sizes from lengths; numbers, no tensors.

Backends: native (C++), reference (Python, which the plan's forecast runs without this package).
"""

from pyrl_ext.ops._native import C
from pyrl_ext.plan.forecast.cp_problem import Problem
from pyrl_ext.plan.forecast.dynamic_cp import Found

from . import native, reference


def search(problem: Problem) -> Found:
    """The plan of `pyrl_ext.plan.forecast.dynamic_cp.search`, natively where the extension is."""
    return reference.search(problem) if C is None else native.search(problem)
