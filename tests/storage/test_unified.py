"""Cold rows that kernels use in place: managed memory, and host memory once it is pinned.

What every tier does is in `test_storage_contract.py`. Tables stay far below a GPU's memory. Without a GPU the tests
that need one skip; TIEREDEMB_REQUIRE_CUDA=1 fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import warnings

import numpy as np
import pytest
import torch

from tieredemb.errors import ConfigError, MissingDependencyError, StorageError, StorageFullError, TieredEmbError
from tieredemb.kernels.compiler import Kernel, options
from tieredemb.storage import cuda_driver, unified
from tieredemb.storage.base import Metadata, RowLayout
from tieredemb.storage.host import HostMemory, HostRows
from tieredemb.storage.unified import UnifiedMemory, UnifiedRows

GPU = torch.device("cuda", 0)
LAYOUT = RowLayout(rows=70_000, width=64, state_width=1)  # 17 MiB of weights
TIERS = {
    "unified": UnifiedMemory(),
    "unified, untouched": UnifiedMemory(pretouch=False),
    "pinned": HostMemory(),
}


def open_rows(storage, layout=LAYOUT):
    return storage.open(layout, name="", identity={})


@pytest.fixture(params=TIERS)
def cold(request, gpu):
    rows = open_rows(TIERS[request.param])
    rows.attach(GPU)
    yield rows
    rows.close()


def gather(cold, keys):
    """Rows of `cold` as a kernel reads them."""
    keys, out = torch.as_tensor(keys, device=GPU), torch.zeros(len(keys), cold.layout.width, device=GPU)
    kernel = Kernel("doctor/probe.cu", "rows_gather", options(torch.float32, cold.layout.width))
    kernel(8, 1024, keys, len(keys), cold.weight.ctypes.data, out)
    return out


def scatter(cold, keys, rows):
    """Writes rows of `cold` by a kernel, and waits for it."""
    keys = torch.as_tensor(keys, device=GPU)
    kernel = Kernel("doctor/probe.cu", "rows_scatter", options(torch.float32, cold.layout.width))
    kernel(8, 1024, keys, len(keys), cold.weight.ctypes.data, rows)
    torch.cuda.synchronize()


def states_seen_by_the_gpu(cold):
    """The states as a kernel reads them: rows of one word."""
    words = cold.layout.state_width + 1
    keys = torch.arange(cold.layout.rows * words, device=GPU)
    out = torch.zeros(len(keys), 1, device=GPU)
    kernel = Kernel("doctor/probe.cu", "rows_gather", options(torch.float32, 1))
    kernel(8, 1024, keys, len(keys), cold.state.ctypes.data, out)
    return out.view(torch.int32).view(cold.layout.rows, words)


# --- on the GPU -------------------------------------------------------------------------------------------------------


def test_rows_are_readable_on_the_device(cold):
    assert cold.device_readable
    cold.attach(GPU)  # a second time
    assert cold.device_readable
    assert not states_seen_by_the_gpu(cold).any()


def test_kernel_reads_what_the_host_wrote(cold):
    cold.weight[:] = np.random.default_rng(0).standard_normal(cold.weight.shape, np.float32)
    cold.state[:, -1] = np.arange(LAYOUT.rows)
    keys = torch.randperm(LAYOUT.rows, device=GPU)[:50_000].contiguous()
    assert np.array_equal(gather(cold, keys).cpu().numpy(), cold.weight[keys.cpu().numpy()])
    assert torch.equal(
        states_seen_by_the_gpu(cold)[:, -1].cpu(), torch.arange(LAYOUT.rows, dtype=torch.int32, device="cpu")
    )


def test_host_reads_what_a_kernel_wrote(cold):
    keys = torch.randperm(LAYOUT.rows, device=GPU)[:50_000].contiguous()
    rows = torch.randn(len(keys), LAYOUT.width, device=GPU)
    scatter(cold, keys, rows)
    assert np.array_equal(cold.weight[keys.cpu().numpy()], rows.cpu().numpy())
    assert not cold.state.any()


def test_reset_zeroes_the_states_on_both_sides(cold):
    weight, state = cold.weight, cold.state
    cold.weight[:] = 1
    cold.state[:] = 5
    cold.metadata.batch = 7
    assert (states_seen_by_the_gpu(cold) == 5).all()
    cold.reset()
    assert not cold.state.any()
    assert not states_seen_by_the_gpu(cold).any()
    assert (cold.weight is weight, cold.state is state) == (True, True)
    assert cold.metadata == Metadata()
    cold.weight[9] = 3
    assert (gather(cold, [9]) == 3).all()


def test_reset_waits_for_the_kernels_that_write(cold):
    states = torch.full((1 << 15, cold.layout.state_width + 1), 9.0, device=GPU)
    keys = torch.arange(len(states), device=GPU)
    kernel = Kernel("doctor/probe.cu", "rows_scatter", options(torch.float32, 2))
    kernel(1, 32, keys, len(keys), cold.state.ctypes.data, states)  # compiles
    torch.cuda._sleep(200_000_000)  # 0.1 s
    kernel(1, 32, keys, len(keys), cold.state.ctypes.data, states)
    cold.reset()
    torch.cuda.synchronize()
    assert not cold.state.any()


def test_attach_keeps_what_the_rows_hold(gpu):
    cold = open_rows(HostMemory())
    cold.weight[:], cold.state[3] = 2, 4
    cold.attach(GPU)
    assert (gather(cold, [0, 69_999]) == 2).all()
    assert np.flatnonzero(cold.state.any(1)).tolist() == [3]
    cold.close()


def pointer_type(address):
    """CUmemorytype of an address: 1 host, 2 device, or None for memory that the driver does not know."""
    value = ctypes.c_uint()
    code = cuda_driver._driver().cuPointerGetAttribute(ctypes.byref(value), 2, ctypes.c_uint64(address))
    return value.value if code == 0 else None


def test_memory_is_given_back_with_the_last_array(cold):
    address, row = cold.weight.ctypes.data, cold.weight[3:4]
    row[:] = 6
    cold.close()
    gc.collect()
    assert pointer_type(address) is not None
    assert (row == 6).all()
    del row
    gc.collect()
    assert pointer_type(address) is None


def test_opening_and_closing_leaks_nothing(gpu):
    free = []
    # other processes use the GPU too, so one round that kept nothing is the proof: a leak keeps something in each
    for _ in range(100):
        for storage in TIERS.values():
            rows = open_rows(storage)
            rows.attach(GPU)
            rows.close()
        gc.collect()
        free.append(torch.cuda.mem_get_info()[0])
        if len(free) > 2 and free[-1] >= free[-2]:
            return
    pytest.fail(f"each of {len(free)} rounds left less memory free: {free}")


def test_forked_child_frees_nothing(gpu):
    cold = open_rows(UnifiedMemory())
    cold.weight[5] = 8
    gc.collect()
    gc.freeze()  # what other tests left on the GPU is not the child's to collect
    child = os.fork()
    if child == 0:
        try:
            cold.close()
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (gather(cold, [5]) == 8).all()
    cold.close()


def test_unified_memory_falls_back_to_pinned_rows_and_says_so(gpu, monkeypatch):
    monkeypatch.setattr(cuda_driver, "has_concurrent_managed_access", lambda device: False)
    with pytest.warns(UserWarning, match="no concurrent managed access"):
        rows = open_rows(UnifiedMemory())
    assert isinstance(rows, HostRows)
    assert rows.device_readable
    rows.weight[1] = 2
    assert (gather(rows, [1]) == 2).all()
    rows.close()


def test_unified_memory_of_a_small_table_says_nothing(gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = open_rows(UnifiedMemory())
    assert isinstance(rows, UnifiedRows)
    rows.close()


def test_memory_that_cannot_be_had_is_an_error(gpu):
    with cuda_driver.context_of(GPU):
        with pytest.raises(StorageError, match=r"managed memory: .*use File\(path\)"):
            cuda_driver.alloc_managed(1 << 60)
        with pytest.raises(StorageError, match=r"could not be pinned: .*use UnifiedMemory\(\)"):
            cuda_driver.register_host(4096, 4096)
    assert torch.zeros(3, device=GPU).sum() == 0  # no error is left behind for torch to find


# --- without one ------------------------------------------------------------------------------------------------------


def test_unified_memory_without_a_gpu_says_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"UnifiedMemory\(\) needs an NVIDIA GPU.*use HostMemory\(\)"):
        open_rows(UnifiedMemory())


def test_missing_driver_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libabsent.so.7")
    cuda_driver._driver.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"libabsent\.so\.7 does not load"):
        open_rows(UnifiedMemory())
    cuda_driver._driver.cache_clear()


@pytest.mark.parametrize("pretouch", [1, 0, None, "yes"])
def test_config_takes_booleans_alone(pretouch):
    with pytest.raises(ConfigError, match="pretouch of UnifiedMemory must be True or False"):
        UnifiedMemory(pretouch=pretouch)


def test_config_is_frozen_picklable_and_comparable():
    storage = UnifiedMemory(pretouch=False)
    assert pickle.loads(pickle.dumps(storage)) == storage != UnifiedMemory()
    with pytest.raises(AttributeError):
        storage.pretouch = True


def test_table_beyond_physical_memory_is_refused_before_the_gpu_is_asked(monkeypatch):
    monkeypatch.setattr(cuda_driver, "check_gpu", lambda what: None)
    with pytest.raises(StorageFullError, match=r"use File\(path\)"):
        open_rows(UnifiedMemory(), RowLayout(rows=2**40, width=64))


def test_table_beyond_the_gpus_free_memory_warns_with_both_sizes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    with pytest.warns(UserWarning, match=r"2\.05 GiB .* 1\.00 GiB .*unproven"):
        unified._warn_beyond_gpu(RowLayout(rows=1 << 22, width=127, state_width=3), GPU)


def test_host_rows_stay_as_they_are_for_a_cpu():
    cold = open_rows(HostMemory(), RowLayout(rows=10, width=4))
    cold.attach(torch.device("cpu"))
    assert not cold.device_readable
    cold.close()


def test_host_rows_without_a_gpu_refuse_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cold = open_rows(HostMemory(), RowLayout(rows=10, width=4))
    with pytest.raises(TieredEmbError, match="needs an NVIDIA GPU"):
        cold.attach(GPU)
    assert not cold.device_readable
    cold.close()


class _Driver:
    """Stands in for the calls on host memory; counts what is pinned."""

    def __init__(self, monkeypatch, *, room, reaches=True):
        self.pinned, self.room = {}, room
        monkeypatch.setattr(cuda_driver, "check_gpu", lambda what: None)
        monkeypatch.setattr(cuda_driver, "context_of", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(cuda_driver, "reaches_pinned_memory", lambda device: reaches)
        monkeypatch.setattr(cuda_driver, "register_host", self.register)
        monkeypatch.setattr(cuda_driver, "unregister_host", self.pinned.pop)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def register(self, address, size_bytes):
        if len(self.pinned) == self.room:
            raise StorageError("no more")
        ctypes.c_char.from_address(address)  # mapped
        self.pinned[address] = size_bytes


def test_host_rows_are_unpinned_with_the_last_array(monkeypatch):
    driver, cold = _Driver(monkeypatch, room=2), open_rows(HostMemory())
    cold.attach(GPU)
    cold.attach(GPU)
    weight, state = cold.weight.ctypes.data, cold.state.ctypes.data
    assert driver.pinned == {weight: LAYOUT.weight_bytes, state: LAYOUT.state_bytes}
    row = cold.weight[7]
    cold.close()
    assert list(driver.pinned) == [weight]
    del row
    assert not driver.pinned


def test_host_rows_that_cannot_be_pinned_whole_go_on_unpinned(monkeypatch):
    driver, cold = _Driver(monkeypatch, room=1), open_rows(HostMemory())
    with pytest.raises(StorageError, match="no more"):
        cold.attach(GPU)
    assert not cold.device_readable
    cold.state[:] = 3
    cold.reset()
    assert not cold.state.any()
    driver.room = 2
    cold.attach(GPU)
    assert cold.device_readable
    cold.close()
    assert not driver.pinned


def test_host_rows_that_kernels_would_not_reach_are_not_pinned(monkeypatch):
    driver, cold = _Driver(monkeypatch, room=2, reaches=False), open_rows(HostMemory())
    with pytest.raises(StorageError, match=r"use UnifiedMemory\(\)"):
        cold.attach(GPU)
    assert not driver.pinned
    cold.close()


def test_pinned_host_rows_are_zeroed_in_place(monkeypatch):
    _Driver(monkeypatch, room=2)
    cold = open_rows(HostMemory())
    cold.attach(GPU)
    cold.weight[:], cold.state[:], cold.metadata.batch = 1, 3, 5
    cold.reset()
    assert not cold.state.any()
    assert (cold.weight == 1).all()  # pages handed back would read as zeros, and leave the GPU with the old ones
    assert cold.metadata == Metadata()
    cold.close()
