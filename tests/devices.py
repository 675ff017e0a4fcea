"""What lets one test body run on every device.

Inside a test with the `device` fixture torch's factories and our modules are made on that device. What a default device
does not reach is here: numbers that are the same on every device, comparisons across devices, and torch's modules kept
on the CPU as the oracle of all devices.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

from tieredemb.errors import StorageError
from tieredemb.modules.base import TieredModule

REPOSITORY = Path(__file__).parents[1]
assert_close = functools.partial(torch.testing.assert_close, check_device=False)


REQUIRE_CUDA = os.environ.get("TIEREDEMB_REQUIRE_CUDA", "0") not in ("", "0")


def require_gpu() -> None:
    """Skips the test without a GPU, or fails it under TIEREDEMB_REQUIRE_CUDA=1."""
    if not torch.cuda.is_available():
        (pytest.fail if REQUIRE_CUDA else pytest.skip)("no GPU: torch.cuda.is_available() is false")


def run_profiled(module: str, *options: str) -> str:
    """Runs `python -m module` as users do, and returns what it says. What profiles replays needs a process of its own:
    CUPTI, started where CUDA graphs were made before, has ended in illegal memory accesses that no kernel made, and in
    hanging processes (pytorch/pytorch#75504 and #97199, whose test is a process, too)."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    """Makes `name` torch's default device. On the CPU nothing changes, so that its tests run as users' code does."""
    if name == "cpu":
        yield
        return
    with torch.device(name):
        yield
    torch.cuda.synchronize()  # an error that a kernel left behind belongs to the test that ran it


def given_on_devices(*strategies: SearchStrategy[Any], cpu: int | None = None, cuda: int = 12) -> Callable[..., Any]:
    """`hypothesis.given` for a test that takes `device` first: `cpu` and `cuda` examples (default: the profile's on the
    CPU). A GPU needs 10 ms to build a module and has its own tests for rare cases."""

    def decorate(body: Callable[..., None]) -> Callable[[str], None]:
        def run_for(count: int | None) -> Callable[..., None]:
            @given(*strategies)
            @functools.wraps(body)
            def run(*args: Any, **keywords: Any) -> None:
                body(*args, **keywords)

            return run if count is None else settings(max_examples=count)(run)

        runs = {"cpu": run_for(cpu), "cuda": run_for(cuda)}

        def test(device: str) -> None:
            runs[device](device=device)

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        return test

    return decorate


# --- numbers ----------------------------------------------------------------------------------------------------------


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """`array` as a tensor on the default device."""
    return torch.from_numpy(array).to(torch.get_default_device())


def randint(low: int, high: int, shape: Sequence[int], *, seed: int) -> Tensor:
    """`torch.randint` with the same numbers on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, device="cpu").to(torch.get_default_device())


def randn(*shape: int, seed: int) -> Tensor:
    """`torch.randn` with the same numbers on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


# --- comparisons ------------------------------------------------------------------------------------------------------


def equal(a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, wherever the two are."""
    return torch.equal(a.detach().cpu(), b.detach().cpu())


def assert_same_bits(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert equal(mine, other), f"tensor {number} differs"


def on_cpu(module: nn.Module) -> nn.Module:
    """Keeps an oracle on the CPU, whose torch kernels know fewest special cases; its inputs come from any device."""

    def fetch(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value.cpu() if isinstance(value, Tensor) else value for value in inputs)

    module.cpu().register_forward_pre_hook(fetch)
    return module


# --- our modules ------------------------------------------------------------------------------------------------------


def idle(module: TieredModule) -> bool:
    """Whether no batch is in flight. What nobody can reach any more is collected before that counts.

    Autograd's thread of a GPU drops the graph of a backward that failed after the error has reached us: it is waited
    for.
    """
    deadline = time.monotonic() + 1
    while not _rests(module):
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.001)
    return True


def _rests(module: TieredModule) -> bool:
    try:
        for group in module.tables.groups:
            group.cache.check_idle("test")
    except StorageError:
        return False
    return True
