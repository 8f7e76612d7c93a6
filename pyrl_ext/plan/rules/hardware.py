"""Whether the plan fits the GPU it names."""

from __future__ import annotations

from pyrl_ext.plan.forecast.fits import fits
from pyrl_ext.plan.rules._rule import rule

rule("hardware.gpu")(fits)
