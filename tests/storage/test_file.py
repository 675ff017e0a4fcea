"""The file tier: what it keeps, what it refuses, who holds it, and what a full disk does."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace  # noqa: F401 - for the code that runs in subprocesses

import numpy as np
import pytest
import torch
from forks import Script

import tieredemb as te
from tieredemb.errors import (
    ConfigError,
    ForkedError,
    StorageError,
    StorageFormatError,
    StorageFullError,
    StorageLockedError,
    UncleanFileError,
)
from tieredemb.storage.base import Metadata, RowLayout
from tieredemb.storage.file import pages as file_pages
from tieredemb.storage.file import rows as file_rows
from tieredemb.storage.file import slots as file_header
from tieredemb.storage.file.tier import File
from tieredemb.storage.system import system

LAYOUT = RowLayout(rows=3000, width=16, state_width=1)
IDENTITY = {"seed": 7, "tables": [{"name": "user", "rows": 3000}]}
SLOT_BYTES = file_header.REGION_BYTES // 2


def open_file(path, layout=LAYOUT, identity=IDENTITY, name="", **flags):
    return File(path, **flags).open(layout, name=name, identity=identity)


def fill(cold, keys):
    """Writes rows whose words are their key."""
    cold.reserve(keys)
    cold.weight[keys] = keys[:, None]
    cold.state[keys] = keys[:, None] + 1


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.bin"


@pytest.fixture
def closed(path):
    """A file with all rows written, closed."""
    cold = open_file(path)
    fill(cold, np.arange(3000))
    cold.metadata = Metadata(batch=12, steps=[3, np.int64(4)], policy="lfu")
    cold.seal()
    cold.close()
    return path


def python(code, *args):
    """A Python process that runs `code`; killed in the end if it still runs."""
    prelude = "import os, sys, time\nfrom tests.storage.test_file import *\n"
    return Script(prelude + textwrap.dedent(code), *args, cwd=Path(__file__).parents[2])


def finish(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, f"rc {process.returncode}: {err[-2000:]}"
    return out


# --- contents -------------------------------------------------------------------------------------


def test_file_reopens_with_rows_and_metadata(closed):
    cold = open_file(closed)
    assert np.array_equal(cold.weight[:, 3], np.arange(3000))
    assert np.array_equal(cold.state[:, 1], np.arange(3000) + 1)
    assert cold.metadata == Metadata(batch=12, steps=[3, 4], policy="lfu")
    cold.seal()
    cold.close()


def test_file_keeps_reset_rows_reset(closed):
    cold = open_file(closed)
    size = os.stat(closed).st_blocks
    cold.reset()
    fill(cold, np.array([5]))
    cold.seal()
    cold.close()
    assert os.stat(closed).st_blocks < size
    cold = open_file(closed)
    assert np.flatnonzero(cold.state[:, -1]).tolist() == [5]
    assert cold.weight.sum() == 5 * 16
    assert cold.metadata == Metadata(steps=[0] * len(cold.metadata.steps))
    cold.seal()
    cold.close()


def test_reset_works_where_holes_cannot_be_punched(closed, monkeypatch):
    class Region:
        def __init__(self, region):
            self.region = region

        def __len__(self):
            return len(self.region)

        def __getattr__(self, name):
            return getattr(self.region, name)

        def madvise(self, *args):
            raise OSError(errno.EOPNOTSUPP, "no holes")

    cold = open_file(closed)
    monkeypatch.setattr(cold, "_map", Region(cold._map))
    cold.reset()
    assert not cold.state.any()
    assert not cold.weight.any()
    monkeypatch.undo()
    cold.seal()
    cold.close()
    open_file(closed).close()


def test_key_spaces_of_one_collection_get_files_of_their_own(path):
    members = ("", "width 32", "width/32", "width%2F32")
    with contextlib.ExitStack() as stack:
        opener = stack.enter_context(File(path).opening(members))
        for name in members:
            stack.callback(opener.open(LAYOUT, name=name, identity={}).close)
    names = sorted(entry.name for entry in path.parent.iterdir())
    assert names == ["rows.bin", "rows.bin.width%2032", "rows.bin.width%252F32", "rows.bin.width%2F32"]


def test_billion_rows_open_at_once_and_stay_sparse(path):
    layout = RowLayout(rows=10**9, width=64, state_width=1)
    start = time.monotonic()
    cold = open_file(path, layout)
    assert time.monotonic() - start < 0.5
    keys = np.array([0, 7, 123_456_789, 10**9 - 1])
    fill(cold, keys)
    start = time.monotonic()
    ranges = list(cold.used_ranges())
    assert time.monotonic() - start < 0.5
    assert sum(stop - first for first, stop in ranges) < 100_000
    assert all(any(first <= key < stop for first, stop in ranges) for key in keys)
    cold.seal()
    cold.close()
    assert os.stat(path).st_blocks * 512 < 1 << 20
    start = time.monotonic()
    cold = open_file(path, layout)
    assert time.monotonic() - start < 0.5
    assert cold.state[123_456_789, 0] == 123_456_790
    cold.seal()
    cold.close()


def test_used_ranges_of_a_filesystem_without_holes_are_all_rows(path, monkeypatch):
    cold = open_file(path)

    def no_holes(fd, position, how):
        raise OSError(errno.EINVAL, "SEEK_DATA")

    monkeypatch.setattr(os, "lseek", no_holes)
    assert list(cold.used_ranges()) == [(0, 3000)]
    monkeypatch.undo()
    cold.seal()
    cold.close()


# --- files that are refused -----------------------------------------------------------------------


def test_foreign_file_is_refused_and_kept_even_with_fresh(path):
    path.write_bytes(b"PNG something else" * 10_000)
    before = path.read_bytes()
    for flags in ({}, {"fresh": True}, {"recover": True}):
        with pytest.raises(StorageFormatError, match="no row file"):
            open_file(path, **flags)
    assert path.read_bytes() == before


def test_file_without_header_is_refused_and_kept(path):
    path.write_bytes(bytes(200_000))
    for flags in ({}, {"fresh": True}):
        with pytest.raises(StorageFormatError, match="delete it"):
            open_file(path, **flags)
    assert path.stat().st_size == 200_000


def test_directory_and_device_are_refused(tmp_path):
    with pytest.raises(StorageError):
        open_file(tmp_path)
    with pytest.raises(StorageFormatError, match="no regular file"):
        open_file("/dev/null")


def test_missing_directory_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"absent/rows.bin") as caught:
        open_file(tmp_path / "absent" / "rows.bin")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_newer_version_is_refused(closed):
    with closed.open("r+b") as file:
        for slot in (0, SLOT_BYTES):
            file.seek(slot + 8)
            file.write(struct.pack("<I", file_header.VERSION + 1))
    with pytest.raises(StorageFormatError, match="upgrade tieredemb"):
        open_file(closed)


@pytest.mark.parametrize("size", [SLOT_BYTES * 2, SLOT_BYTES * 2 + 4096, 10**7])
def test_truncated_or_extended_file_is_refused(closed, size):
    os.truncate(closed, size)
    with pytest.raises(StorageFormatError, match=f"{size} bytes"):
        open_file(closed)


@pytest.mark.parametrize("size", [1, 8, 40, 100, 5000])
def test_file_cut_inside_its_header_is_refused(closed, size):
    os.truncate(closed, size)
    with pytest.raises(StorageFormatError):
        open_file(closed)


def newest_slot(path):
    data = path.read_bytes()
    return max((0, SLOT_BYTES), key=lambda at: struct.unpack_from("<8sIIQQ", data, at)[-1])


def damage(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("offset", [0, 8, 20, 24, 32, 36, 60, 200])
def test_damaged_header_is_refused(closed, offset):
    damage(closed, offset)
    damage(closed, SLOT_BYTES + offset)
    with pytest.raises(StorageFormatError):
        open_file(closed)


@pytest.mark.parametrize("offset", [0, 20, 24, 36, 60, 200])
def test_torn_write_of_the_header_leaves_the_one_before(closed, offset):
    cold = open_file(closed)
    cold.begin_changes()
    cold.metadata.batch = 13
    cold.flush()
    cold.seal()
    cold.close()
    torn = newest_slot(closed)
    damage(closed, torn + offset)
    with pytest.raises(UncleanFileError):  # the copy before says that the file is open, and it was
        open_file(closed)
    cold = open_file(closed, recover=True)
    assert cold.metadata.batch == 13
    assert np.array_equal(cold.weight[:, 3], np.arange(3000))
    cold.seal()
    cold.close()


def test_damage_to_either_copy_never_brings_a_clean_mark_back(closed):
    cold = open_file(closed)
    cold.reserve(np.array([1]))
    image = closed.parent / "image.bin"
    for slot in (0, SLOT_BYTES):
        shutil.copy(closed, image)
        damage(image, slot + 60)
        with pytest.raises(UncleanFileError):
            open_file(image)
    cold.seal()
    cold.close()


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (RowLayout(rows=3001, width=16, state_width=1), "layout.rows is 3000"),
        (RowLayout(rows=3000, width=17, state_width=1), "layout.width is 16"),
        (RowLayout(rows=3000, width=16, state_width=2), "layout.state_width is 1"),
        (RowLayout(rows=3000, width=16, state_width=1, dtype=torch.float16), "layout.dtype is 'float32'"),
    ],
)
def test_other_layout_is_refused_by_name(closed, layout, field):
    with pytest.raises(StorageFormatError, match=field):
        open_file(closed, layout)
    open_file(closed).close()


@pytest.mark.parametrize(
    ("identity", "field"),
    [
        ({**IDENTITY, "seed": 8}, "identity.seed is 7 in the file and 8 in this model"),
        ({**IDENTITY, "seed": 7.0}, "identity.seed"),
        ({"seed": 7, "tables": [{"name": "item", "rows": 3000}]}, r"identity.tables\[0\].name is 'user'"),
        ({"seed": 7, "tables": []}, "identity.tables"),
        ({"seed": 7}, "the file has identity.tables"),
        ({**IDENTITY, "more": 1}, "this model has identity.more"),
    ],
)
def test_other_identity_is_refused_by_field(closed, identity, field):
    with pytest.raises(StorageFormatError, match=field):
        open_file(closed, identity=identity)
    open_file(closed, identity=json.loads(json.dumps(IDENTITY))).close()


def test_tuples_in_an_identity_are_as_lists(path):
    open_file(path, identity={"betas": (0.9, 0.999)}).close()
    open_file(path, identity={"betas": (0.9, 0.999)}).close()


def test_identity_that_json_cannot_hold_is_refused(path):
    with pytest.raises(ConfigError, match="identity"):
        open_file(path, identity={"what": object()})
    assert not path.exists()


def test_large_identity_gets_a_large_header(path):
    identity = {"tables": [f"table {i}" for i in range(20_000)]}
    cold = open_file(path, identity=identity)
    fill(cold, np.array([0, 2999]))
    cold.seal()
    cold.close()
    cold = open_file(path, identity=identity)
    assert cold.size_bytes()["header"] > 10 * file_header.REGION_BYTES
    assert cold.state[:, 0].sum() == 1 + 3000
    cold.seal()
    cold.close()


def test_header_that_outgrows_its_slot_is_an_error(path):
    cold = open_file(path)
    cold.metadata.steps = [10**18] * 10_000
    cold.begin_changes()
    with pytest.raises(StorageError, match="new file"):
        cold.flush()
    with pytest.raises(StorageError, match="new file"):
        cold.seal()
    cold.close()
    with pytest.raises(UncleanFileError):
        open_file(path)


@pytest.mark.parametrize("point", ["ftruncate", "fsync"])
def test_creation_that_was_killed_begins_anew(path, point):
    code = """
        def kill(*args):
            os.kill(os.getpid(), 9)
        point, real = sys.argv[2], os.ftruncate
        if point == "fsync":
            os.fsync = kill
        else:
            os.ftruncate = lambda fd, size: kill() if size else real(fd, size)
        open_file(sys.argv[1])
    """
    with python(code, path, point) as process:
        process.wait(30)
        assert process.returncode == -signal.SIGKILL
    cold = open_file(path)
    assert not cold.state.any()
    cold.seal()
    cold.close()


def test_failed_creation_leaves_no_file(path, monkeypatch):
    def refuse(fd, size):
        if size:
            raise OSError(errno.EFBIG, "too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(StorageError, match="allows no file of"):
        open_file(path)
    assert not path.exists()


# --- owners ---------------------------------------------------------------------------------------


def test_second_open_in_this_process_is_refused(path):
    cold = open_file(path)
    for flags in ({}, {"recover": True}, {"fresh": True}):
        with pytest.raises(StorageLockedError, match=rf"this process \(pid {os.getpid()}\)"):
            open_file(path, **flags)
    fill(cold, np.array([1]))
    cold.seal()
    cold.close()
    open_file(path).close()


HOLD = """
    cold = open_file(sys.argv[1])
    fill(cold, np.arange(100))
    cold.metadata.batch = 3
    cold.flush()
    print("held", flush=True)
    sys.stdin.readline()
    cold.seal()
    cold.close()
"""


def test_second_process_is_refused_with_the_owners_pid(path):
    with python(HOLD, path) as owner:
        assert owner.readline() == "held\n"
        with pytest.raises(StorageLockedError, match=f"process {owner.pid}"):
            open_file(path)
        finish(owner)
    cold = open_file(path)
    assert cold.state[:, 0].sum() == 5050
    cold.seal()
    cold.close()


def test_killed_owner_leaves_a_file_that_only_recover_or_fresh_opens(path):
    with python(HOLD, path) as owner:
        owner.readline()
        owner.kill()
        owner.wait()
        with pytest.raises(UncleanFileError, match=rf"pid {owner.pid}.*recover=True.*fresh=True"):
            open_file(path)
    cold = open_file(path, recover=True)
    assert cold.state[:, 0].sum() == 5050
    assert cold.metadata.batch == 3
    cold.seal()
    cold.close()
    open_file(path).close()
    cold = open_file(path, fresh=True)
    assert not cold.state.any()
    assert cold.metadata.batch == 0
    cold.seal()
    cold.close()


def test_fresh_takes_another_layout_and_damaged_files(closed):
    layout = RowLayout(rows=10, width=2)
    open_file(closed, layout, {"other": 1}, fresh=True).close()
    damage(closed, 60)
    damage(closed, SLOT_BYTES + 60)
    open_file(closed, fresh=True).close()


@pytest.mark.parametrize("start", ["os.fork()", "subprocess.Popen(['sleep', '60'], close_fds=False).pid"])
def test_child_that_outlives_the_owner_does_not_keep_the_lock(path, start):
    code = f"""
        cold = open_file(sys.argv[1])
        child = {start}
        if child == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.1)
        print(child, flush=True)
        time.sleep(60)
    """
    with python(code, path) as owner:
        child = int(owner.readline())
        try:
            with pytest.raises(StorageLockedError):
                open_file(path)
            owner.kill()
            owner.wait()
            os.kill(child, 0)
            open_file(path, recover=True).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_forked_child_cannot_use_the_file_and_its_exit_changes_nothing(path):
    cold = open_file(path)
    fill(cold, np.array([1]))
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            for call in (cold.flush, cold.reset, lambda: cold.reserve(np.array([1]))):
                with pytest.raises(ForkedError):
                    call()
            cold.close()
            code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(StorageLockedError):
        open_file(path)
    image = path.parent / "image.bin"
    shutil.copy(path, image)
    with pytest.raises(UncleanFileError):
        open_file(image)
    cold.flush()
    cold.seal()
    cold.close()


def test_closed_file_cannot_be_used(closed):
    cold = open_file(closed)
    cold.seal()
    cold.close()
    for call in (cold.flush, cold.reset, lambda: list(cold.used_ranges()), lambda: cold.reserve_range(0, 1)):
        with pytest.raises(StorageError, match="is closed"):
            call()


def test_forgotten_file_is_unlocked_and_unclean_once_it_was_used(path):
    cold = open_file(path)
    del cold
    cold = open_file(path)
    cold.reserve(np.array([1]))
    del cold
    with pytest.raises(UncleanFileError):
        open_file(path)


@pytest.mark.parametrize("flags", [{"recover": 1}, {"fresh": "yes"}, {"recover": True, "fresh": True}])
def test_flags_are_checked(flags):
    with pytest.raises(ConfigError):
        File("rows.bin", **flags)


def test_file_that_was_sealed_and_is_used_again_is_unclean(path, tmp_path):
    """As where another file of the same tables could not be flushed: updates in the hot cache are newer at once."""
    bag = te.TieredEmbeddingBag(40, 4, capacity=5, storage=File(path), optimizer=te.SGD(lr=1.0))
    bag(torch.arange(3)[None]).sum().backward()
    cache = bag.tables.groups[0].cache
    cache.seal()
    identity = bag.tables.groups[0].identity
    image = tmp_path / "image"
    shutil.copy(path, image)
    File(image).open(cache.cold.layout, name="", identity=identity).close()
    bag(torch.arange(3)[None]).sum().backward()  # hits alone
    shutil.copy(path, image)
    with pytest.raises(UncleanFileError):
        File(image).open(cache.cold.layout, name="", identity=identity)
    bag.close()


def test_file_deleted_while_it_was_open_does_not_close_in_silence(path, tmp_path):
    bag = te.TieredEmbeddingBag(40, 4, capacity=5, storage=File(path), optimizer=te.SGD(lr=1.0))
    bag(torch.arange(9)[None]).sum().backward()
    path.unlink()
    for call in (bag.flush, bag.close, bag.close):
        with pytest.raises(StorageError, match=r"rows.bin' was deleted while it was open.*save_checkpoint"):
            call()
    bag.save_checkpoint(tmp_path / "kept")
    bag(torch.arange(9)[None]).sum().backward()
    with pytest.raises(StorageError, match="was deleted"):  # rows are newer than what was saved
        bag.close()
    bag.save_checkpoint(tmp_path / "kept")
    expected = bag.state_dict()["weight"]
    bag.close()
    again = te.TieredEmbeddingBag(40, 4, capacity=5, storage=File(path), optimizer=te.SGD(lr=1.0))
    again.load_checkpoint(tmp_path / "kept")
    assert torch.equal(again.state_dict()["weight"], expected)


# --- durability -----------------------------------------------------------------------------------


def test_failed_fsync_is_an_error_and_the_file_stays_unclean(path, monkeypatch):
    cold = open_file(path)
    fill(cold, np.array([1]))

    def fail(fd):
        raise OSError(errno.EIO, "disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="flushing") as caught:
        cold.flush()
    assert caught.value.__cause__.errno == errno.EIO
    monkeypatch.undo()
    for call in (cold.flush, cold.seal):  # a retry looks like success: the kernel reports a failed write once
        with pytest.raises(StorageError, match=r"may be lost there, of rows 0–511 .*save_checkpoint\(directory\)"):
            call()
    cold.close()
    with pytest.raises(UncleanFileError):
        open_file(path)


def test_unclean_mark_is_durable_before_the_rows_can_be_written(closed, monkeypatch):
    synced = []
    fsync = os.fsync

    def note(fd):
        fsync(fd)
        if os.path.samestat(os.fstat(fd), closed.stat()):
            synced.append(os.pread(fd, SLOT_BYTES, newest_slot(closed)))
        elif os.path.samestat(os.fstat(fd), closed.parent.stat()):  # and not what another test has left to be closed
            synced.append(b"directory")

    monkeypatch.setattr(os, "fsync", note)
    cold = open_file(closed)
    assert b'"clean": true' in synced[0]
    assert synced[1:] == [b"directory"]
    synced.clear()
    cold.reserve(np.array([1]))
    assert len(synced) == 2
    assert all(b'"clean": false' in data for data in synced)
    synced.clear()
    cold.seal()
    cold.close()
    assert b'"clean": true' in synced[-1]


# --- space ----------------------------------------------------------------------------------------


def taken_pages(monkeypatch):
    calls = []
    real = os.posix_fallocate

    def take(fd, offset, size):
        calls.append((offset, size))
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", take)
    return calls


@pytest.mark.parametrize("row", [(16, 1), (7, 0), (1025, 3), (3000, 2)])
def test_reserve_takes_each_page_of_its_rows_once(path, monkeypatch, row):
    layout = RowLayout(rows=500, width=row[0], state_width=row[1])
    cold = open_file(path, layout)
    calls = taken_pages(monkeypatch)
    keys = np.random.default_rng(0).integers(0, 500, 60)
    cold.reserve(keys)
    page, header = file_pages.PAGE_BYTES, cold.size_bytes()["header"]
    state_at = file_rows.regions(layout, header)[1]
    wanted = set()
    for at, row_bytes in ((header, row[0] * 4), (state_at, (row[1] + 1) * 4)):
        for key in keys.tolist():
            wanted |= {(at + byte) // page for byte in range(key * row_bytes, (key + 1) * row_bytes)}
    taken = [at // page + i for at, size in calls for i in range(size // page)]
    assert sorted(taken) == sorted(wanted)
    calls.clear()
    cold.reserve(keys[::-1].copy())
    assert calls == []
    cold.reserve_range(0, 500)
    rest = [at // page + i for at, size in calls for i in range(size // page)]
    assert not set(rest) & wanted
    assert len(rest) + len(wanted) == -(-layout.weight_bytes // page) + -(-layout.state_bytes // page)
    calls.clear()
    cold.reserve_range(3, 499)
    cold.reserve_range(7, 7)
    assert calls == []
    cold.seal()
    cold.close()


def test_reset_rows_take_their_pages_again(path, monkeypatch):
    cold = open_file(path)
    calls = taken_pages(monkeypatch)
    for _ in range(2):
        cold.reserve(np.array([5]))
        assert len(calls) == 2
        cold.reserve_range(0, 3000)
        calls.clear()
        cold.reset()
    cold.seal()
    cold.close()


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (201, 203), (488, 500), (37, 411)])
def test_reserve_range_takes_the_pages_of_its_rows_only(path, monkeypatch, start, stop):
    layout = RowLayout(rows=500, width=1500)
    cold = open_file(path, layout)
    calls = taken_pages(monkeypatch)
    cold.reserve_range(start, stop)
    page, at = file_pages.PAGE_BYTES, cold.size_bytes()["header"]
    first, end = start * 6000 // page, -(-stop * 6000 // page)
    assert calls == [(at + first * page, (end - first) * page), calls[1]]
    assert calls[1][1] == page
    cold.seal()
    cold.close()


def test_neighbouring_pages_share_one_call(path, monkeypatch):
    cold = open_file(path)
    calls = taken_pages(monkeypatch)
    cold.reserve(np.arange(3000))
    assert len(calls) == 2
    cold.seal()
    cold.close()


def test_pages_that_were_refused_are_asked_for_again(path, monkeypatch):
    cold = open_file(path)

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "full")

    keys = np.array([0, 1, 1500, 2999])
    for attempt in (lambda _: cold.reserve_range(0, 3000), cold.reserve):
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageFullError, match=r"rows\.bin"):
                attempt(keys)
    calls = taken_pages(monkeypatch)
    cold.reserve(keys)
    assert sum(size for _, size in calls) == (3 + 3) * file_pages.PAGE_BYTES
    cold.seal()
    cold.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_without_fallocate_holes_are_written_and_data_is_kept(closed, monkeypatch, code):
    def unsupported(fd, offset, size):
        raise OSError(code, "fallocate")

    cold = open_file(closed)
    cold.reset()
    fill(cold, np.array([100]))
    cold.flush()
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    before = os.stat(closed).st_blocks
    cold._weight_pages.clear()
    cold._state_pages.clear()
    cold.reserve_range(0, 3000)
    os.fsync(cold._file.fd)
    assert os.stat(closed).st_blocks * 512 - before * 512 >= 3000 * 16 * 4 - 4096
    assert np.flatnonzero(cold.state[:, -1]).tolist() == [100]
    assert (cold.weight[100] == 100).all()
    cold.seal()
    cold.close()


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request, tmp_path):
    """A filesystem of 8 MiB."""
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk]
    if request.param == "ext4":
        image.write_bytes(b"")
        os.truncate(image, 8 << 20)
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("needs mkfs.ext4")
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        command = ["mount", "-o", "loop", image, disk]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount ({mounted.stderr.strip()})")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def dirty_bytes(cold):
    """Bytes of the rows' mapping that the next msync has to write."""
    address, found = cold.weight.ctypes.data, 0
    with open("/proc/self/smaps") as lines:
        inside = False
        for line in lines:
            first = line.split()[0]
            if "-" in first and ":" not in first:
                start, stop = (int(word, 16) for word in first.split("-"))
                inside = start <= address < stop
            elif inside and first in ("Shared_Dirty:", "Private_Dirty:"):
                found += int(line.split()[1]) << 10
    return found


@pytest.mark.parametrize("small_disk", ["ext4"], indirect=True)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failed_flush_writes_again_what_the_kernel_may_have_dropped(small_disk, monkeypatch, code):
    cold = open_file(small_disk / "rows")
    fill(cold, np.arange(0, 3000, 100))
    cold.flush()
    assert dirty_bytes(cold) == 0

    def fails(region):
        raise OSError(code, "planted")

    with monkeypatch.context() as patched:
        patched.setattr(system, "msync", fails)
        with pytest.raises(StorageError):
            cold.flush()
    cold.kept()
    msync, dirty = system.msync, []
    monkeypatch.setattr(system, "msync", lambda region: (dirty.append(dirty_bytes(cold)), msync(region)))
    cold.flush()
    cold.flush()
    # pages of 30 rows of 64 bytes, and of their states, of 8; and none once that has succeeded
    assert dirty == [(30 + 6) * file_pages.PAGE_BYTES, 0]
    cold.seal()
    cold.close()
    assert open_file(small_disk / "rows").weight[::100, 0].tolist() == list(range(0, 3000, 100))


@pytest.mark.parametrize("small_disk", ["tmpfs"], indirect=True)
def test_state_dict_of_a_file_on_a_full_disk_reads_and_takes_no_space(small_disk):
    """Through the mapping tmpfs gives each hole that is read a page, or a signal."""
    code = """
        import tieredemb as te
        directory = sys.argv[1]
        bag = te.TieredEmbeddingBag(200_000, 32, capacity=100, storage=te.File(directory + "/rows"),
                                    optimizer=te.SparseAdam(lr=0.1))
        twin = te.TieredEmbeddingBag(200_000, 32, capacity=1.0, optimizer=te.SparseAdam(lr=0.1))
        for module in (bag, twin):
            for start in range(3):
                module(torch.arange(start, 200_000, 20_011)[None]).square().sum().backward()
        with contextlib.suppress(OSError), open(directory + "/filler", "wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        blocks = os.stat(directory + "/rows").st_blocks
        assert os.statvfs(directory).f_bavail == 0
        assert torch.equal(bag.state_dict()["weight"], twin.state_dict()["weight"])
        states = [module.fused_optimizer.state_dict()["state"][0]["exp_avg"] for module in (bag, twin)]
        assert torch.equal(*states)
        assert os.stat(directory + "/rows").st_blocks == blocks
        os.unlink(directory + "/filler")
        print("read")
    """
    with python(code, small_disk) as process:
        assert finish(process) == "read\n"


FILL_DISK = """
    layout = RowLayout(rows=10**6, width=64, state_width=1)
    cold = open_file(sys.argv[1] + "/rows.bin", layout)
    hot = SimpleNamespace(weight=np.ones((64, 64), np.float32), state=np.ones((64, 1), np.uint32),
                          score=np.ones(64, np.uint32), dirty=np.ones(64, np.uint8))
    slots, random, written = np.arange(64, dtype=np.int32), np.random.default_rng(0), []
    for _ in range(10**5):
        keys = random.integers(0, 10**6, 64)
        keys = np.unique(keys)
        try:
            cold.write(keys, slots[: len(keys)], hot)
        except StorageFullError as error:
            assert isinstance(error.__cause__, OSError)
            break
        written.extend(keys.tolist())
    else:
        sys.exit("the disk did not run full")
    try:
        for _ in range(2000):
            cold.read(random.integers(0, 10**6, 64), slots, hot)
        sys.exit("reading never needed space")
    except StorageFullError:
        pass
    untouched = cold.read(np.unique(written)[:64], slots, hot)  # rows that have their space are still served
    assert not untouched.any() and (hot.weight == 1).all()
    assert len(written) > 300
    hot.weight[:] = 2
    cold.write(np.unique(written)[:64], slots, hot)
    cold.seal()
    cold.close()
    cold = open_file(sys.argv[1] + "/rows.bin", layout)
    found = []
    for start, stop in cold.used_ranges():
        found.extend((start + np.flatnonzero(cold.state[start:stop, -1])).tolist())
    assert found == sorted(set(written))
    print("served")
"""


def test_full_disk_is_an_error_and_no_signal(small_disk):
    with python(FILL_DISK, small_disk) as process:
        assert finish(process) == "served\n"


def test_full_disk_at_creation_leaves_no_file(small_disk):
    with contextlib.suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
    with pytest.raises(StorageFullError):
        open_file(small_disk / "rows.bin")
    assert not (small_disk / "rows.bin").exists()
