"""A run that several files start from."""

from pathlib import Path

import pytest

from tests.helpers.saving_runs import run


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that made three steps, and saved each."""
    folder = tmp_path_factory.mktemp("three") / "run"
    assert run(folder, "steps=3") == 0
    return folder
