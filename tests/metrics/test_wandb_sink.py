"""A plan that logs to Weights & Biases, where it is not installed; tests/wandb has the rest."""

import sys
from pathlib import Path

import pytest

from tests.helpers.tiny import tiny_plan


def test_plan_refuses_wandb_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder that wandb wrote is no package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    wanted = "log.wandb: wandb is not installed, expected it. Run: pip install wandb"
    assert wanted in tiny_plan("log.wandb=sums").unsupported
    assert wanted not in tiny_plan().unsupported
