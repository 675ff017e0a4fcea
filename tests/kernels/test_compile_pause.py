"""No garbage is collected while a kernel of ours is compiled, and all is as the user had it afterwards."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from numba.core import event
from numba.core.caching import NullCache

from tieredemb.kernels.compile_pause import CollectorPause
from tieredemb.kernels.cpu import jit


def compiling(module):
    return SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__module__=module))})


OURS, NUMBAS = compiling("tieredemb.cache.plan_cpu"), compiling("numba.np.arrayobj")


@pytest.fixture(autouse=True)
def _collector_stays_on():
    yield
    gc.enable()


def test_collector_is_off_until_the_kernel_is_done_and_on_between_kernels():
    pause = CollectorPause()
    for _ in range(2):
        pause.on_start(OURS)
        pause.on_start(NUMBAS)  # amid the kernel
        pause.on_end(NUMBAS)
        assert not gc.isenabled()
        pause.on_end(OURS)
        assert gc.isenabled()


def test_collector_that_the_user_switched_off_stays_off():
    gc.disable()
    pause = CollectorPause()
    pause.on_start(OURS)
    pause.on_end(OURS)
    assert not gc.isenabled()


def test_kernels_of_others_leave_the_collector_alone():
    pause = CollectorPause()
    pause.on_start(NUMBAS)
    assert gc.isenabled()
    pause.on_end(NUMBAS)
    assert gc.isenabled()


def test_numba_compiles_our_kernels_with_the_collector_off():
    seen = []

    class Listener(event.Listener):
        def on_start(self, notice):
            seen.append(gc.isenabled())

        def on_end(self, notice):
            pass

    def own_kernel(array):
        return array.shape[0]

    own_kernel.__module__ = "tieredemb.of_a_test"
    kernel = jit(own_kernel)
    kernel._cache = NullCache()  # nothing of a test is kept on the disk
    with event.install_listener("numba:compile", Listener()):
        assert kernel(np.zeros(3)) == 3
    assert seen == [False]
    assert gc.isenabled()
