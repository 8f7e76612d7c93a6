"""Adapters: pieces of this package inside other trainers, one module a trainer."""

from pyrl_ext.integrations.patches import report, uninstall

__all__ = ["report", "uninstall"]
