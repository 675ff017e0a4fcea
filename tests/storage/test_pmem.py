"""Persistent memory through memkind, in an ordinary directory: what the C library needs and how it fails."""

from __future__ import annotations

import ctypes
import gc
import os
import time

import numpy as np
import pytest

from tieredemb.errors import ConfigError, MissingDependencyError, StorageError, StorageFullError
from tieredemb.storage import pmem
from tieredemb.storage.base import RowLayout
from tieredemb.storage.pmem import Pmem

LAYOUT = RowLayout(rows=1000, width=16, state_width=1)


@pytest.fixture
def memkind():
    try:
        pmem._memkind()
    except MissingDependencyError as error:
        pytest.skip(str(error))


def heaps() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/memkind." in line for line in maps)


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_missing_library_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(pmem, "_LIBRARY", "libno-such-thing.so.0")
    pmem._memkind.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match="apt-get install libmemkind0"):
            Pmem(tmp_path).open(LAYOUT, name="", identity={})
    finally:
        pmem._memkind.cache_clear()


@pytest.mark.parametrize("max_bytes", [-1, 1, 2**24 - 1, 1.5, True, "12", "1MiB"])
def test_max_bytes_is_checked(max_bytes):
    with pytest.raises(ConfigError):
        Pmem("/mnt/pmem", max_bytes=max_bytes)


def test_max_bytes_may_be_a_size():
    assert Pmem("/mnt/pmem", max_bytes="64MiB") == Pmem("/mnt/pmem", max_bytes=2**26)


def test_missing_directory_is_named(memkind, tmp_path):
    with pytest.raises(StorageError, match="does not exist"):
        Pmem(tmp_path / "absent").open(LAYOUT, name="", identity={})


def test_directory_that_takes_no_files_is_an_error(memkind):
    with pytest.raises(StorageError, match=r"memkind could not make a heap in '/proc'|not writable"):
        Pmem("/proc").open(LAYOUT, name="", identity={})


def test_table_beyond_max_bytes_is_refused_and_leaves_nothing(memkind, tmp_path):
    before = heaps()
    with pytest.raises(StorageFullError, match="raise max_bytes"):
        Pmem(tmp_path, max_bytes=2**24).open(RowLayout(rows=10**6, width=16), name="", identity={})
    gc.collect()
    assert heaps() == before


def test_opening_touches_no_row(memkind, tmp_path):
    layout = RowLayout(rows=2**22, width=16, state_width=7)
    pmem._memkind()
    before, start = rss_bytes(), time.monotonic()
    cold = Pmem(tmp_path).open(layout, name="", identity={})
    assert time.monotonic() - start < 5
    assert rss_bytes() - before < 32 << 20
    assert layout.state_bytes == 128 << 20
    assert not cold.state[:: 2**10].any()
    cold.close()


def test_state_is_zero_even_in_memory_used_before(memkind, tmp_path):
    heap = pmem._Heap(str(tmp_path), 2**26)
    library = pmem._memkind()
    library.memkind_free.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    for size in (100, 50_000, 2**23):
        address = ctypes.c_void_p()
        assert library.memkind_posix_memalign(heap._kind, ctypes.byref(address), 4096, size + 4096) == 0
        ctypes.memset(address, 255, size + 4096)
        library.memkind_free(heap._kind, address)
        assert not heap.zeros(size).any()


def test_heap_lives_as_long_as_an_array_of_it(memkind, tmp_path):
    before = heaps()
    cold = Pmem(tmp_path).open(LAYOUT, name="", identity={})
    state = cold.state[5]
    cold.close()
    del cold
    gc.collect()
    assert heaps() > before
    state[:] = 3
    assert state.tolist() == [3, 3]
    del state
    gc.collect()
    assert heaps() == before
    assert os.listdir(tmp_path) == []


def test_forked_child_leaves_the_rows_alone(memkind, tmp_path):
    cold = Pmem(tmp_path).open(LAYOUT, name="", identity={})
    cold.state[:] = 7
    pid = os.fork()
    if pid == 0:
        cold.close()
        del cold
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert np.all(cold.state == 7)
    cold.close()
