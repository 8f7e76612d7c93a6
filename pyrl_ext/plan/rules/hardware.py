"""Kernel backends and the memory of the GPU that the plan names."""

from __future__ import annotations

from pyrl_ext.plan.forecast.fits import fits
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule

rule("hardware.gpu")(fits)


@rule("kernels.backend")
def kernels_on_a_gpu(plan: Plan) -> Found:
    if plan.device == "cpu" and plan.kernels.backend != "auto":
        return f"{plan.kernels.backend} with device cpu, expected auto; kernel backends need a GPU"
