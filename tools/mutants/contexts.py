"""The pytest plugin of the map: which test runs which lines, and how long it takes.

Lines that a test's own process runs carry the test's name as their context; lines of processes that tests start carry
none. What runs between tests (imports, fixtures of a session) is named so, or it would count as the latter.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import coverage
import pytest

BETWEEN = "between tests"
VARIANTS = 4  # of a test with parameters: grids of hundreds run the same lines, and the whole map takes an hour

SECONDS: dict[str, float] = {}
PASSED: set[str] = set()


def pytest_configure() -> None:
    _context(BETWEEN)


@pytest.hookimpl(trylast=True)  # after those for a GPU are marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps some variants of each test, evenly spread."""
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("gpu"):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = []
    for each in variants.values():
        step = max(1.0, (len(each) - 1) / (VARIANTS - 1))
        kept += [each[int(i * step)] for i in range(min(VARIANTS, len(each)))]
    items[:] = kept


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    _context(item.nodeid)
    yield
    _context(BETWEEN)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0.0) + report.duration
    if report.when == "call" and report.passed:
        PASSED.add(report.nodeid)
    elif report.failed:
        PASSED.discard(report.nodeid)


def pytest_sessionfinish() -> None:
    passed = {test: round(SECONDS[test], 3) for test in SECONDS if test in PASSED}
    Path(os.environ["MUTANTS_SECONDS"]).write_text(json.dumps(passed))


def _context(name: str) -> None:
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(name)
