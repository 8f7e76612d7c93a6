"""A plugin of pytest: only the tests that need a GPU, and a row for each file.

``python -m pytest -p benchmarks.gpu.only_gpu FILE``
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.gpu.rows import FAILED, OK, note

counted: Counter[str] = Counter()
failed: dict[str, str] = {}
chosen: Counter[str] = Counter()


def needs_gpu(item: pytest.Item) -> bool:
    """True if a test is skipped where there is no GPU."""
    return any(
        "GPU" in (reason := str(mark.kwargs.get("reason", ""))) and "sees a GPU" not in reason
        for mark in item.iter_markers("skipif")
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if needs_gpu(item)]
    config.hook.pytest_deselected(items=[item for item in items if not needs_gpu(item)])
    items[:] = kept
    chosen.update(item.nodeid.partition("::")[0] for item in kept)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        failed[report.nodeid] = reason(report)
    if report.when == "call" or not report.passed:
        counted[report.outcome] += 1


def reason(report: pytest.TestReport) -> str:
    """The last line of an error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    return (lines[0] if lines else "")[:300]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        failed[report.nodeid] = str(report.longrepr).strip().splitlines()[-1][:300]


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    for name, why in failed.items():
        note(name, FAILED, why)
    if session.config.option.collectonly:
        for file, number in chosen.items():
            note(file, tests=number)
    else:
        numbers: dict[str, Any] = dict(counted)
        note("tests", FAILED if failed else OK, **numbers)
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
