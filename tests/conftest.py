"""What all tests share: the device they run on, the real logs, and a deterministic hypothesis."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import forks
import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).parents[1]
LONGEST = {  # files of tests that took 20 seconds and more on two cores
    *("test_kernel_cache.py", "test_gpu_benchmarks.py", "test_dense_optimizers.py", "test_compile_beside.py"),
    *("test_row_format.py", "test_dist.py", "test_device_functions.py", "test_peak_memory.py", "test_saving.py"),
    *("test_compare_checkouts.py", "test_interrupts.py", "test_checkpoint_files.py"),
}
os.environ["TIEREDEMB_CHECK_LAUNCHES"] = "1"  # children inherit it
# torch's threads sleep while they wait for each other: else they spin on cores that other tests need
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
forks.prepare()  # before there are workers, which share them

# CI must not fail by luck: examples are the same in every run. `pytest --hypothesis-profile=explore` seeks new ones.
settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("deterministic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--campaign",
        action="store_true",
        help="interrupt every line and fail every system call, which takes an hour, instead of an even sample",
    )
    parser.addoption(
        "--golden", action="store_true", help="run all golden programs, which takes minutes, instead of a sample"
    )
    parser.addoption(
        "--built-into",
        metavar="DIRECTORY",
        type=Path,
        help="keep the wheel and the sdist that tests/test_dist.py builds and checks in this directory",
    )


# --- fixtures ---------------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        from tieredemb.kernels import DEVICES

        metafunc.parametrize("device", DEVICES, indirect=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same numbers from torch's own generator whatever ran before it."""
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # which notes the stack for each kind of device that is not there, and takes milliseconds for that
        seed = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
        seed(0)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every device that has kernels, as torch's default device. Without a GPU "cuda" skips, or fails under
    TIEREDEMB_REQUIRE_CUDA=1."""
    import devices

    from tieredemb.kernels import DEVICES

    name: str = request.param
    if name == "cuda" and "cuda" not in DEVICES:
        pytest.fail("TIEREDEMB_REQUIRE_CUDA=1, but this version of tieredemb has no CUDA kernels")
    if name == "cuda":
        devices.require_gpu()
    with devices.default_device(name):
        yield name


@pytest.fixture
def gpu() -> Iterator[None]:
    """For tests that mean something on a GPU alone: torch's default device is the GPU."""
    import devices

    devices.require_gpu()
    with devices.default_device("cuda"):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small work in many calls: torch's threads would wait for each other longer than they work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def thawed() -> Iterator[None]:
    """For tests of what the collector finds: what modules hold, too."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Directory of the real logs (never part of the repository): TIEREDEMB_DATA, or `../shared/data`."""
    given = os.environ.get("TIEREDEMB_DATA")
    path = Path(given) if given else REPOSITORY.parent / "shared" / "data"
    if given and not path.is_dir():
        pytest.fail(f"TIEREDEMB_DATA={given} is no directory")
    if not path.is_dir():
        pytest.skip(f"no real logs at {path}; set TIEREDEMB_DATA to their directory")
    return path


@pytest.hookimpl(tryfirst=True)  # before they are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs the real logs, and what asks for a GPU by a fixture or a parameter (`pytest_runtest_makereport`
    finds what has to be marked where it stands). Files that take longest come first: with several workers none is still
    busy with one when the others have ended."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "data_dir" in fixtures:
            item.add_marker("data")
        if "gpu" in fixtures or (hasattr(item, "callspec") and item.callspec.params.get("device") == "cuda"):
            item.add_marker("gpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test that is skipped where there is no GPU, as its reason says, and is not marked: `-m gpu` would leave
    it out."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and not item.get_closest_marker("gpu"):
        *_, reason = report.longrepr
        if "GPU" in reason and not importlib.import_module("torch").cuda.is_available():
            report.outcome, report.longrepr = "failed", f"needs a GPU: mark it by @pytest.mark.gpu ({reason})"
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Takes what is imported by now, which stays, out of the reach of the collector: conversions and tests go through
    all objects some thousand times. The fixture `thawed` puts it back."""
    if session.config.option.collectonly:
        return
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # which the first of torch's optimizers would import
    freeze(session.items)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Takes what the tests of a file have left, such as imports and compiled kernels, out of its reach, too."""
    if nextitem is not None and nextitem.path != item.path:
        freeze([item])


def freeze(items: list[pytest.Item]) -> None:
    """Not where modules of other libraries are to be looked through, which may hold weights."""
    if not any(item.path.parent.name == "clients" for item in items):
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def worlds():
    """Worlds of 1 to 4 ranks, each started when a test first asks for it, and kept."""
    from sharding.worlds import kept

    yield from kept()
