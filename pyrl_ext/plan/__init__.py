"""The plan: one YAML file, checked as a whole and frozen before anything is built.

Pure Python and pydantic, so that `python -m pyrl_ext.plan config.yaml` answers at once. Errors are
one `ConfigError` that lists every problem with its file and line.
"""

from typing import TYPE_CHECKING

from pyrl_ext.lazy import exported

if TYPE_CHECKING:
    from pyrl_ext.plan.compile import compile_plan
    from pyrl_ext.plan.language.errors import ConfigError
    from pyrl_ext.plan.plan import Plan
    from pyrl_ext.plan.resume import Difference

__all__ = ["ConfigError", "Difference", "Plan", "compile_plan"]

_HOMES = {
    "compile_plan": "compile",
    "ConfigError": "language.errors",
    "Plan": "plan",
    "Difference": "resume",
}
__getattr__ = exported(__name__, _HOMES)
