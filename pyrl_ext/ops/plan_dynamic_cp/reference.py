from pyrl_ext.plan.forecast.dynamic_cp import search

__all__ = ["search"]
