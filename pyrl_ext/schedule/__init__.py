"""Which samples run together, when and on which ranks: pure functions of numbers."""

from typing import TYPE_CHECKING

from pyrl_ext.lazy import exported

if TYPE_CHECKING:
    from pyrl_ext.schedule.cp_problem import CostModel, CpGroups, ExchangeCost
    from pyrl_ext.schedule.microbatches import plan_dynamic_cp, plan_microbatches
    from pyrl_ext.schedule.packing import equal_parts
    from pyrl_ext.schedule.schedule import Group, Schedule

__all__ = [
    "CostModel",
    "CpGroups",
    "ExchangeCost",
    "Group",
    "Schedule",
    "equal_parts",
    "plan_dynamic_cp",
    "plan_microbatches",
]

_HOMES = {
    "CostModel": "cp_problem",
    "CpGroups": "cp_problem",
    "ExchangeCost": "cp_problem",
    "Group": "schedule",
    "Schedule": "schedule",
    "equal_parts": "packing",
    "plan_dynamic_cp": "microbatches",
    "plan_microbatches": "microbatches",
}
__getattr__ = exported(__name__, _HOMES)
