"""Whether the plan fits the GPU it names, and the kernels that serve a GPU."""

from __future__ import annotations

import os

from pyrl_ext.plan.forecast.fits import fits
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule

rule("hardware.gpu")(fits)


@rule("kernels.backend")
def kernels_on_a_gpu(plan: Plan) -> Found:
    if plan.device == "cpu" and plan.kernels.backend != "auto":
        return f"{plan.kernels.backend} with device cpu, expected auto; it names who serves a GPU"


@rule("kernels.prebuilt")
def prebuilt_kernels_exist(plan: Plan) -> Found:
    folder = plan.kernels.prebuilt
    if folder is None:
        return None
    if plan.device == "cpu":
        return f"{folder!r} with device cpu, expected null; Triton's kernels run on GPUs only"
    if not os.path.isdir(folder):
        return (
            f"{folder} is no folder, expected one that `python -m pyrl_ext.plan CONFIG --build "
            f"{folder}` wrote"
        )
