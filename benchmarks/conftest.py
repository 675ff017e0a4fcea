"""Options and fixtures: `--quick` shrinks every size to try the harness out and keeps its results apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.machine import cores
from benchmarks.record import RESULTS, Record, save

Save = Callable[[str, str, Sequence[Record]], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="tiny sizes; results go to a temporary directory")
    parser.addoption("--results", type=Path, default=None, help=f"where results go (default: {RESULTS.name}/)")
    parser.addoption("--state-gib", type=float, default=1.0, help="size of the tables of bench_state (default: 1)")
    parser.addoption("--state-directory", default="/dev/shm", help="where bench_state's files go (default: /dev/shm)")


@pytest.fixture(scope="session")
def quick(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--quick"))


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config, quick: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen: Path | None = pytestconfig.getoption("--results")
    return chosen or (tmp_path_factory.mktemp("results") if quick else RESULTS)


@pytest.fixture
def keep(results: Path) -> Save:
    """Saves the records of one benchmark."""
    return lambda name, workload, records: save(results, name, workload, records)


@pytest.fixture(autouse=True)
def threads() -> Iterator[int]:
    """All cores, for torch and for tieredemb, which takes its threads from torch."""
    torch.set_num_threads(cores())
    yield cores()
    torch.set_num_threads(cores())
