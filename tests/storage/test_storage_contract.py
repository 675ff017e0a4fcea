"""What every cold storage does, on every cold storage. A new tier adds one line to `TIERS`."""

from __future__ import annotations

import os
import pickle
import tempfile
from itertools import pairwise
from types import SimpleNamespace

import forks
import numpy as np
import pytest
import torch

from tieredemb.cache.device.row_copies import RowCopies
from tieredemb.errors import ConfigError, MissingDependencyError, StorageFullError
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.storage import range_copies
from tieredemb.storage.base import CARRIERS, ColdRows, Metadata, RowLayout
from tieredemb.storage.file import rows as file_rows
from tieredemb.storage.file.tier import File
from tieredemb.storage.host import HostMemory
from tieredemb.storage.pmem import Pmem
from tieredemb.storage.system import system
from tieredemb.storage.unified import UnifiedMemory

TIERS = {
    "host": lambda directory: HostMemory(),
    "file": lambda directory: File(directory / "rows.bin"),
    "pmem": lambda directory: Pmem(directory),
}
if torch.cuda.is_available():  # what it answers elsewhere is in test_unified.py
    TIERS["unified"] = lambda directory: UnifiedMemory()
WORDS = {2: np.int16, 4: np.int32}  # of the size of an element
LAYOUTS = [
    RowLayout(rows=0, width=0),
    RowLayout(rows=0, width=8, state_width=1),
    RowLayout(rows=1, width=1),
    RowLayout(rows=9, width=0, state_width=2),
    RowLayout(rows=1001, width=7, dtype=torch.bfloat16, state_width=3),
    RowLayout(rows=1000, width=64, dtype=torch.float16, state_width=1),
    RowLayout(rows=333, width=1025, state_width=1025),
]


@pytest.fixture(params=TIERS)
def storage(request, tmp_path):
    return TIERS[request.param](tmp_path)


@pytest.fixture
def opened(storage):
    cold = open_rows(storage, RowLayout(rows=5000, width=12, state_width=2))
    yield cold
    cold.close()


def open_rows(storage, layout: RowLayout) -> ColdRows:
    try:
        return storage.open(layout, name="", identity={"seed": 1})
    except MissingDependencyError as error:
        pytest.skip(str(error))


def hot_rows(layout: RowLayout, slots: int, seed: int = 0) -> SimpleNamespace:
    """A hot cache of random bits, NaNs among them: moving must keep every bit."""
    random = np.random.default_rng(seed)
    weight = random.integers(0, 256, (slots, layout.width * layout.carrier.itemsize), np.uint8)
    return SimpleNamespace(
        weight=weight.view(layout.carrier) if layout.width else np.empty((slots, 0), layout.carrier),
        state=random.integers(0, 2**32, (slots, layout.state_width), np.uint32),
        score=random.integers(1, 2**32, slots, np.uint32),
        dirty=np.ones(slots, np.uint8),
    )


def bits(array):
    return array.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_start_untouched_with_the_shape_of_their_layout(storage, layout):
    cold = open_rows(storage, layout)
    assert cold.weight.shape == (layout.rows, layout.width)
    assert cold.weight.dtype == CARRIERS[layout.dtype]
    assert cold.state.shape == (layout.rows, layout.state_width + 1)
    assert cold.state.dtype == np.uint32
    assert not cold.state.any()
    if layout.weight_bytes:
        assert cold.weight.ctypes.data % 4096 == 0
    assert cold.metadata == Metadata()
    cold.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_ranges_are_put_and_copied_bit_for_bit(storage, layout, chunk_bytes, monkeypatch):
    monkeypatch.setattr(range_copies, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(file_rows, "_READ_BYTES", 300)
    cold = open_rows(storage, layout)
    source, start = hot_rows(layout, layout.rows), layout.rows // 3
    begun = np.arange(5, 5 + layout.state_width, dtype=np.uint32)
    cold.reserve_range(0, layout.rows)
    written = np.arange(0, layout.rows, 2)
    cold.weight[written], cold.state[written] = source.weight[written], 9
    cold.state[1::4, :-1] = 7  # as a process that was killed amid its first write leaves a row
    cold.put_range(start, source.weight[start:], None, begun)
    expected = np.empty((layout.rows, layout.state_width + 1), np.uint32)
    expected[:] = [*begun, MIN_SCORE]
    expected[written] = 9
    weight = np.empty((layout.rows - start, layout.width), layout.carrier)
    state = np.empty((layout.rows - start, layout.state_width), np.uint32)
    scores = cold.copy_range(start, layout.rows, weight, state)
    assert bits(weight) == bits(source.weight[start:])
    assert bits(state) == bits(expected[start:, :-1])
    assert bits(scores) == bits(expected[start:, -1])
    assert not cold.state[1:start:4, -1].any()  # rows before the range stay as they were
    cold.put_range(0, None, source.state, begun)
    no_weight = np.empty((layout.rows, 0), layout.carrier)
    state = np.empty((layout.rows, layout.state_width), np.uint32)
    assert (cold.copy_range(0, layout.rows, no_weight, state) != 0).all()
    assert bits(state) == bits(source.state)
    cold.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_come_back_bit_for_bit(storage, layout):
    cold = open_rows(storage, layout)
    keys = np.random.default_rng(1).permutation(layout.rows)[: layout.rows * 2 // 3 + 1].astype(np.int64)
    slots = np.random.default_rng(2).permutation(len(keys) + 3)[: len(keys)].astype(np.int32)
    source, target = hot_rows(layout, len(keys) + 3), hot_rows(layout, len(keys) + 3, seed=9)
    cold.write(keys, slots, source)
    untouched = cold.read(keys[::-1].copy(), slots[::-1].copy(), target)
    assert untouched.dtype == np.bool_
    assert not untouched.any()
    for name in ("weight", "state", "score"):
        assert bits(getattr(source, name)[slots]) == bits(getattr(target, name)[slots])
    others = np.setdiff1d(np.arange(layout.rows), keys)
    assert not cold.state[others].any()
    cold.close()


def test_read_marks_rows_that_were_never_written_and_leaves_their_slots(opened):
    hot = hot_rows(opened.layout, 8)
    opened.write(np.array([3, 4999]), np.array([0, 1], np.int32), hot)
    before = hot.weight.copy()
    untouched = opened.read(np.array([4, 3, 5, 4999]), np.array([2, 3, 4, 5], np.int32), hot)
    assert untouched.tolist() == [True, False, True, False]
    assert bits(hot.weight[[2, 4]]) == bits(before[[2, 4]])
    assert hot.score[[2, 4]].tolist() == [0, 0]


def test_write_moves_only_the_score_of_a_clean_row(opened):
    hot = hot_rows(opened.layout, 2)
    keys, slots = np.array([7, 8]), np.array([0, 1], np.int32)
    opened.write(keys, slots, hot)
    weight, state = opened.weight[keys].copy(), opened.state[keys].copy()
    hot.weight[:], hot.state[:], hot.score[:], hot.dirty[:] = 1, 2, [33, 44], [0, 1]
    opened.write(keys, slots, hot)
    assert bits(opened.weight[7]) == bits(weight[0])
    assert opened.state[7].tolist() == [*state[0, :-1], 33]
    assert (opened.weight[8] == 1).all()
    assert opened.state[8].tolist() == [2, 2, 44]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_move_alike_on_any_number_of_threads(opened, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        hot, back = hot_rows(opened.layout, 5000), hot_rows(opened.layout, 5000, seed=3)
        keys = np.random.default_rng(0).permutation(5000).astype(np.int64)
        slots = np.arange(5000, dtype=np.int32)
        opened.write(keys, slots, hot)
        opened.read(keys, slots, back)
    finally:
        torch.set_num_threads(before)
    assert bits(opened.weight[keys]) == bits(hot.weight) == bits(back.weight)
    assert bits(opened.state[keys, -1]) == bits(hot.score) == bits(back.score)


def test_write_that_finds_no_space_changes_no_row(opened, monkeypatch):
    def full(keys):
        raise StorageFullError("full")

    hot = hot_rows(opened.layout, 3)
    monkeypatch.setattr(opened, "reserve", full)
    with pytest.raises(StorageFullError):
        opened.write(np.array([1, 2, 3]), np.arange(3, dtype=np.int32), hot)
    assert not opened.state.any()


def buffers(layout: RowLayout, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bits as rows lie in a GPU's buffers: weights, and states with a score that is not zero at their end."""
    random, words = np.random.default_rng(seed), WORDS[layout.dtype.itemsize]
    weight = random.integers(np.iinfo(words).min, np.iinfo(words).max, (rows, layout.width), words, endpoint=True)
    state = random.integers(1, 2**31, (rows, layout.state_width + 1), np.int64).astype(np.int32)
    return torch.from_numpy(weight).view(layout.dtype), torch.from_numpy(state)


def write(cold, keys, weight, state, dirty=None):
    flags = torch.ones(len(keys), dtype=torch.uint8) if dirty is None else torch.tensor(dirty, dtype=torch.uint8)
    copies = RowCopies(cold)
    copies.reserve(keys, flags)
    copies.scatter(keys, weight, state, flags)
    copies.finish()


def words_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32).numpy()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_buffers_come_back_bit_for_bit(storage, layout):
    cold = open_rows(storage, layout)
    keys = torch.from_numpy(np.random.default_rng(1).permutation(layout.rows)[: layout.rows * 2 // 3 + 1])
    source, target = buffers(layout, len(keys)), buffers(layout, len(keys), seed=9)
    write(cold, keys, *source)
    others = np.setdiff1d(np.arange(layout.rows), keys)
    assert not cold.state[others].any()
    assert not cold.weight[others].any()
    RowCopies(cold).gather(keys.flip(0), *target)
    for given, found in zip(source, target, strict=True):
        assert bits(words_of(given)) == bits(words_of(found.flip(0)))
    hot = hot_rows(layout, len(keys))
    cold.read(keys.numpy(), np.arange(len(keys), dtype=np.int32), hot)
    assert bits(hot.weight) == bits(words_of(source[0]))
    assert hot.state.tolist() == source[1][:, :-1].numpy().view(np.uint32).tolist()
    assert hot.score.tolist() == source[1][:, -1].tolist()
    cold.close()


def test_gather_knows_rows_that_were_never_written_by_their_score(opened):
    written = buffers(opened.layout, 2)
    write(opened, torch.tensor([3, 4999]), *written)
    weight, state = buffers(opened.layout, 4, seed=1)
    RowCopies(opened).gather(torch.tensor([4, 3, 5, 4999]), weight, state)
    assert (state[:, -1] != 0).tolist() == [False, True, False, True]
    assert weight[1::2].view(torch.int32).tolist() == written[0].view(torch.int32).tolist()
    RowCopies(opened).gather(torch.tensor([6, 7]), weight[:2], state[:2])
    assert state[:2, -1].tolist() == [0, 0]


def test_gather_does_not_read_what_was_never_written(tmp_path):
    if not os.path.isdir("/dev/shm"):
        pytest.skip("needs a filesystem in memory at /dev/shm, where what is read takes space")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        layout = RowLayout(rows=4000, width=1024)
        cold = File(os.path.join(directory, "rows")).open(layout, name="", identity={})
        write(cold, torch.tensor([7]), *buffers(layout, 1))
        before = os.stat(cold.path).st_blocks
        RowCopies(cold).gather(torch.arange(4000), *buffers(layout, 4000))
        taken = (os.stat(cold.path).st_blocks - before) * 512
        cold.close()
    assert taken <= layout.state_bytes + 4096


def test_scatter_moves_only_the_score_of_a_clean_row(opened):
    keys = torch.tensor([7, 8, 9])
    write(opened, keys, *buffers(opened.layout, 3))
    weight, state = opened.weight[7:10].copy(), opened.state[7:10].copy()
    new_weight, new_state = buffers(opened.layout, 3, seed=1)
    write(opened, keys, new_weight, new_state, dirty=[0, 255, 0])
    assert bits(opened.weight[[7, 9]]) == bits(weight[::2])
    assert bits(opened.state[[7, 9], :-1]) == bits(state[::2, :-1])
    assert bits(opened.weight[8]) == bits(new_weight[1].numpy())
    assert opened.state[8].tolist() == new_state[1].tolist()
    assert opened.state[7:10, -1].tolist() == new_state[:, -1].tolist()


@pytest.mark.parametrize("call", ["reset", "close"])
def test_storage_may_be_used_otherwise_once_copies_are_finished(tmp_path, call):
    """That a cache finishes them first is in test_prefetch.py."""
    for tier in ("file", "pmem"):
        cold = open_rows(TIERS[tier](tmp_path), RowLayout(rows=5000, width=12))
        keys, dirty, copies = torch.arange(5000), torch.ones(5000, dtype=torch.uint8), RowCopies(cold)
        copies.reserve(keys, dirty)
        copies.scatter(keys, *buffers(cold.layout, 5000), dirty)
        copies.finish()
        assert cold.state.all()
        getattr(cold, call)()
        assert call == "close" or not cold.state.any()
        cold.close()


def test_scores_that_are_reserved_need_no_more_space(opened, monkeypatch):
    """Rows may then be read before it is known which."""
    opened.reserve_scores(np.arange(5000))
    assert opened.has_all_scores_reserved
    monkeypatch.setattr(system, "fallocate", pytest.fail)
    opened.read(np.array([3, 4999]), np.array([0, 1], np.int32), hot_rows(opened.layout, 2))


def test_rows_that_are_all_reserved_need_no_more_space(opened, monkeypatch):
    """Which rows are dirty is then not asked."""
    if opened.kind == "file":
        assert not opened.has_all_reserved
        opened.reserve_scores(np.arange(5000))
        assert not opened.has_all_reserved
    opened.reserve(np.arange(5000))
    assert opened.has_all_reserved
    monkeypatch.setattr(system, "fallocate", pytest.fail)
    RowCopies(opened).reserve(torch.tensor([3, 4999]), torch.tensor([0, 1], dtype=torch.uint8))


def test_space_is_reserved_for_dirty_rows_alone(opened, monkeypatch):
    asked = []
    monkeypatch.setattr(type(opened), "has_all_reserved", False)
    monkeypatch.setattr(opened, "reserve", lambda keys: asked.append(keys.tolist()))
    for dirty in ([1, 1, 1], [0, 1, 255], [0, 0, 0]):
        RowCopies(opened).reserve(torch.tensor([1, 2, 3]), torch.tensor(dirty, dtype=torch.uint8))
    assert asked == [[1, 2, 3], [2, 3], []]


def test_used_ranges_cover_every_written_row_once(opened):
    keys = np.array([0, 1, 17, 2500, 4999])
    opened.write(keys, np.arange(5, dtype=np.int32), hot_rows(opened.layout, 5))
    ranges = list(opened.used_ranges())
    assert all(0 <= start < stop <= 5000 for start, stop in ranges)
    assert all(one[1] <= other[0] for one, other in pairwise(ranges))
    assert all(any(start <= key < stop for start, stop in ranges) for key in keys)


def test_reset_makes_rows_untouched_in_the_same_arrays(opened):
    weight, state = opened.weight, opened.state
    opened.write(np.arange(5000), np.arange(5000, dtype=np.int32), hot_rows(opened.layout, 5000))
    opened.metadata.batch = 5
    opened.reset()
    assert opened.weight is weight
    assert opened.state is state
    assert not state.any()
    assert opened.metadata == Metadata()
    opened.write(np.array([9]), np.array([0], np.int32), hot_rows(opened.layout, 1))
    assert np.flatnonzero(state[:, -1]).tolist() == [9]


def test_close_works_twice_and_spares_arrays_that_are_still_held(storage):
    cold = open_rows(storage, RowLayout(rows=10, width=4))
    cold.flush()
    row = cold.state[3:4]
    cold.close()
    cold.close()
    assert not row.any()


def test_size_bytes_names_weights_and_state(opened):
    sizes = opened.size_bytes()
    assert sizes["weight"] == 5000 * 12 * 4
    assert sizes["state"] == 5000 * 3 * 4


def test_config_is_frozen_picklable_and_comparable(storage):
    assert pickle.loads(pickle.dumps(storage)) == storage
    with pytest.raises(AttributeError):
        storage.path = "x"


def test_host_memory_refuses_a_table_beyond_physical_memory():
    with pytest.raises(StorageFullError, match=r"use File\(path\)"):
        HostMemory().open(RowLayout(rows=2**40, width=64), name="", identity={})


@pytest.mark.parametrize("path", ["", 3, None, b"x", "a\0b"])
def test_paths_are_checked(path):
    with pytest.raises(ConfigError, match="path"):
        File(path)
    with pytest.raises(ConfigError, match="directory of Pmem"):
        Pmem(path)


def test_importing_storages_compiles_nothing():
    code = (
        "import sys\nfrom tieredemb.storage import base, host, unified, pmem\n"
        "from tieredemb.storage.file import tier\n"
        "from tieredemb.storage.checkpoint import directory\n"
        "sys.exit('numba' in sys.modules)"
    )
    assert forks.run(code, base=forks.TORCH).returncode == 0
