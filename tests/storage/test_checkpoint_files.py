"""Checkpoints: what they keep, what they refuse, and that a save killed anywhere leaves one that loads."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import random
import resource
import signal
import threading
import time

import numpy as np
import pytest
import torch

from tieredemb.errors import CheckpointError, ConfigError, StorageError, StorageFullError
from tieredemb.storage.base import Metadata, RowLayout
from tieredemb.storage.checkpoint import directory as checkpoint
from tieredemb.storage.checkpoint import files as checkpoint_files
from tieredemb.storage.file.tier import File
from tieredemb.storage.host import HostMemory
from tieredemb.storage.system import system

LAYOUTS = {
    "32": RowLayout(rows=20_000, width=32, state_width=1),
    "odd": RowLayout(rows=501, width=7, dtype=torch.bfloat16, state_width=14),
    "none": RowLayout(rows=0, width=8),
    "narrow": RowLayout(rows=300, width=0),
}
IDENTITIES = {name: {"seed": 3, "tables": [name]} for name in LAYOUTS}


def open_spaces(layouts=LAYOUTS):
    return {name: HostMemory().open(layout, name=name, identity={}) for name, layout in layouts.items()}


def fill(spaces, version, share=0.3):
    """Writes random bits that depend on `version` alone to a share of the rows."""
    for cold in spaces.values():
        cold.reset()
        bits = np.random.default_rng(version)
        keys = np.flatnonzero(bits.random(cold.layout.rows) < share)
        cold.reserve(keys)
        cold.weight.reshape(-1).view(np.uint8)[:] = 0
        count = len(keys) * cold.layout.width
        cold.weight[keys] = (
            bits.integers(0, 2**31, count, np.uint32)
            .astype(f"u{cold.layout.carrier.itemsize}")
            .view(cold.layout.carrier)
            .reshape(len(keys), cold.layout.width)
        )
        cold.state[keys] = bits.integers(1, 2**32, (len(keys), cold.layout.state_width + 1), np.uint32)
        cold.metadata = Metadata(batch=np.int64(version), steps=[version, 2], policy="lfu")


def load(directory, spaces, **options):
    """Restores the checkpoint in `directory`; returns what was saved beside the rows."""
    with checkpoint.opened(directory, spaces, **options) as found:
        found.restore()
        return found.extra


def contents(spaces):
    """Everything that a checkpoint keeps, comparable."""
    kept = {}
    for name, cold in spaces.items():
        keys = np.flatnonzero(cold.state[:, -1])
        kept[name] = (keys.tobytes(), cold.weight[keys].tobytes(), cold.state[keys].tobytes(), cold.metadata)
    return kept


@pytest.fixture
def on_disk(monkeypatch):
    """The directory counts as one on a disk, whatever it is on."""
    monkeypatch.setattr(system, "statfs", lambda path: 0xEF53)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_CHUNK_BYTES", 3000)
    monkeypatch.setattr(checkpoint_files, "_SCAN_ROWS", 97)


@pytest.fixture
def saved(tmp_path, small_chunks):
    """A directory with a checkpoint, and what it holds."""
    spaces = open_spaces()
    fill(spaces, 1)
    checkpoint.save(tmp_path, spaces, identities=IDENTITIES, extra={"epoch": 1, "rate": 0.1})
    return tmp_path, contents(spaces)


def row_file(directory, space="32"):
    manifest = json.loads((directory / "manifest.json").read_text())
    return directory / manifest["body"]["spaces"][space]["file"]


def edit_manifest(directory, change):
    """Changes the body and makes its checksum right again."""
    path = directory / "manifest.json"
    outer = json.loads(path.read_text())
    change(outer)
    body = json.dumps(outer["body"], sort_keys=True, separators=(",", ":")).encode()
    outer["crc32"] = checkpoint_files.zlib.crc32(body)
    path.write_text(json.dumps(outer))


# --- what is kept ---------------------------------------------------------------------------------


def test_checkpoint_loads_bit_for_bit(saved):
    directory, kept = saved
    spaces = open_spaces()
    fill(spaces, 2)
    extra = load(directory, spaces, identities=IDENTITIES)
    assert contents(spaces) == kept
    assert extra == {"epoch": 1, "rate": 0.1}
    assert spaces["32"].metadata == Metadata(batch=1, steps=[1, 2], policy="lfu")


def test_checkpoint_moves_between_tiers(tmp_path):
    layout = {"": LAYOUTS["32"]}
    host = open_spaces(layout)
    fill(host, 5)
    checkpoint.save(tmp_path / "one", host)
    cold = File(tmp_path / "rows.bin").open(LAYOUTS["32"], name="", identity={})
    load(tmp_path / "one", {"": cold})
    assert contents({"": cold}) == contents(host)
    checkpoint.save(tmp_path / "two", {"": cold})
    cold.seal()
    cold.close()
    again = open_spaces(layout)
    load(tmp_path / "two", again)
    assert contents(again) == contents(host)


def test_checkpoint_holds_only_rows_that_were_used(tmp_path):
    cold = File(tmp_path / "rows.bin").open(RowLayout(rows=10**9, width=64), name="", identity={})
    keys = np.array([3, 10**8, 10**9 - 1])
    cold.reserve(keys)
    cold.weight[keys], cold.state[keys] = 5, 6
    checkpoint.save(tmp_path / "saved", {"": cold})
    size = row_file(tmp_path / "saved", "").stat().st_size
    assert size == 3 * (8 + cold.layout.row_bytes)
    cold.reset()
    load(tmp_path / "saved", {"": cold})
    assert (cold.weight[keys] == 5).all()
    cold.seal()
    cold.close()


@pytest.mark.parametrize("share", [0.0, 0.001, 1.0])
def test_any_share_of_rows_is_kept(tmp_path, small_chunks, share):
    spaces = open_spaces()
    fill(spaces, 3, share)
    checkpoint.save(tmp_path, spaces)
    loaded = open_spaces()
    fill(loaded, 4)
    load(tmp_path, loaded)
    assert contents(loaded) == contents(spaces)


def test_save_replaces_the_last_checkpoint_and_its_leftovers(saved):
    directory, _ = saved
    old = row_file(directory)
    for name in ("rows-0123456789abcdef-0.bin", "manifest.json.0123456789abcdef", "rows.bin", "notes.txt"):
        (directory / name).write_text("x")
    spaces = open_spaces()
    fill(spaces, 2)
    checkpoint.save(directory, spaces)
    assert not old.exists()
    assert len(os.listdir(directory)) == len(LAYOUTS) + 3  # row files, manifest, and two that are not ours
    loaded = open_spaces()
    load(directory, loaded)
    assert contents(loaded) == contents(spaces)


# --- what is refused ------------------------------------------------------------------------------


def assert_refused(directory, match, layouts=LAYOUTS, identities=None):
    """The load raises and changes nothing."""
    spaces = open_spaces(layouts)
    fill(spaces, 9)
    before = contents(spaces)
    with pytest.raises(CheckpointError, match=match):
        load(directory, spaces, identities=identities)
    assert contents(spaces) == before


@pytest.mark.parametrize("space", ["32", "narrow"])
@pytest.mark.parametrize("at", [0, 0.3, 0.99])
def test_damaged_rows_are_refused(saved, space, at):
    path = row_file(saved[0], space)
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 16
    path.write_bytes(data)
    assert_refused(saved[0], "is damaged")


def test_truncated_and_missing_row_files_are_refused(saved):
    path = row_file(saved[0])
    os.truncate(path, path.stat().st_size - 1)
    assert_refused(saved[0], "bytes and the manifest says")
    path.unlink()
    assert_refused(saved[0], "is missing")


def test_damaged_manifest_is_refused(saved):
    path = saved[0] / "manifest.json"
    text = path.read_text()
    for change, match in (
        (text.replace('"rate":0.1', '"rate":0.2'), "checksum"),
        (text[: len(text) // 2], "is damaged"),
        ("", "is damaged"),
        ("[1]", "no manifest"),
        ('{"format": "other"}', "no manifest"),
        (text.replace('"version":1', '"version":6', 1), "upgrade tieredemb"),
    ):
        assert change != text
        path.write_text(change)
        assert_refused(saved[0], match)


def test_keys_out_of_range_or_order_are_refused(saved):
    path = row_file(saved[0], "narrow")
    rows = path.stat().st_size // 12
    for keys in (np.arange(rows)[::-1] + 0, np.arange(rows) + 300, np.arange(rows) - 1, np.zeros(rows)):
        data = keys.astype(np.int64).tobytes() + np.ones(rows, np.uint32).tobytes()
        path.write_bytes(data)

        def one_chunk(outer, data=data):
            crc = checkpoint_files.zlib.crc32(data)
            outer["body"]["spaces"]["narrow"]["chunks"] = [[0, rows, crc]]

        edit_manifest(saved[0], one_chunk)
        assert_refused(saved[0], "out of order or range")


def test_other_models_are_refused_by_name(saved):
    directory = saved[0]
    fewer = {name: layout for name, layout in LAYOUTS.items() if name != "odd"}
    assert_refused(directory, "key spaces 32, narrow, none, odd", fewer)
    other = {**LAYOUTS, "32": RowLayout(rows=20_000, width=33, state_width=1)}
    assert_refused(directory, "layout.width is 32 in the checkpoint and 33 in this model", other)
    identities = {**IDENTITIES, "odd": {"seed": 4, "tables": ["odd"]}}
    assert_refused(directory, "identity.seed is 3 in the checkpoint and 4", identities=identities)


def test_directory_without_checkpoint_is_named(tmp_path):
    assert_refused(tmp_path, "has no manifest.json")
    assert_refused(tmp_path / "absent", "does not exist")


def test_extra_that_json_cannot_hold_is_refused(saved):
    directory, kept = saved
    with pytest.raises(ConfigError, match="extra"):
        checkpoint.save(directory, open_spaces(), extra={"model": object()})
    spaces = open_spaces()
    load(directory, spaces)
    assert contents(spaces) == kept


def test_two_saves_at_a_time_are_refused(saved, monkeypatch, on_disk):
    directory, _ = saved
    inside, go_on = threading.Event(), threading.Event()
    verify = checkpoint_files.RowFiles.verify

    def wait(*args):
        inside.set()
        go_on.wait(30)
        verify(*args)

    monkeypatch.setattr(checkpoint_files.RowFiles, "verify", wait)
    first = threading.Thread(target=checkpoint.save, args=(directory, open_spaces()))
    first.start()
    assert inside.wait(30)
    try:
        with pytest.raises(CheckpointError, match="in use by another save"):
            checkpoint.save(directory, open_spaces())
    finally:
        go_on.set()
        first.join()


# --- large key spaces, whose rows lie in several files ---------------------------------------------


@pytest.fixture
def large(monkeypatch, small_chunks):
    """Every key space counts as large."""
    monkeypatch.setattr(checkpoint_files, "_LARGE_BYTES", 1)
    monkeypatch.setattr(checkpoint_files, "_FILES", 3)


@pytest.mark.parametrize("share", [0.0, 0.0003, 0.3, 1.0])
@pytest.mark.parametrize("threads", [1, 4])
def test_large_spaces_load_bit_for_bit(tmp_path, large, share, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        spaces, loaded = open_spaces(), open_spaces()
        fill(spaces, 1, share)
        checkpoint.save(tmp_path, spaces)
        fill(loaded, 2)
        load(tmp_path, loaded)
    finally:
        torch.set_num_threads(before)
    assert contents(loaded) == contents(spaces)


def test_files_are_the_same_with_any_number_of_threads(tmp_path, large):
    spaces, found = open_spaces(), []
    fill(spaces, 1)
    before = torch.get_num_threads()
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        directory = tmp_path / str(threads)
        checkpoint.save(directory, spaces)
        entry = json.loads((directory / "manifest.json").read_text())["body"]["spaces"]["32"]
        found.append([entry["chunks"], [(directory / file).read_bytes() for file in entry["files"]]])
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
    assert len(found[0][1]) == 3


def test_several_files_are_another_version_and_one_is_the_first(tmp_path, saved, large):
    spaces = open_spaces()
    fill(spaces, 1)
    checkpoint.save(tmp_path / "large", spaces)
    assert json.loads((saved[0] / "manifest.json").read_text())["version"] == 1
    assert json.loads((tmp_path / "large" / "manifest.json").read_text())["version"] == 2


def test_save_replaces_several_files_and_leaves_nothing_else(saved, large):
    directory, _ = saved
    spaces = open_spaces()
    for version in (2, 3):
        fill(spaces, version)
        checkpoint.save(directory, spaces)
        assert_last_checkpoint_stands(directory, contents(spaces))


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync"])
def test_failed_save_of_several_files_leaves_the_last_checkpoint(saved, large, monkeypatch, call):
    directory, kept = saved
    spaces, real = open_spaces(), getattr(os, call)
    fill(spaces, 2)
    for skip in range(8):
        count = itertools.count()

        def later(*args, count=count, skip=skip):
            if next(count) >= skip and (call != "open" or args[1] & os.O_CREAT):
                raise OSError(errno.ENOSPC, "no")
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, later)
            with pytest.raises(StorageFullError, match="no space left while saving"):
                checkpoint.save(directory, spaces)
        assert_last_checkpoint_stands(directory, kept)


@pytest.mark.parametrize("damage", ["one byte", "cut", "swapped", "missing"])
def test_damage_to_any_of_several_files_is_refused_before_anything_changes(tmp_path, large, damage):
    spaces = open_spaces()
    fill(spaces, 1)
    checkpoint.save(tmp_path, spaces)
    entry = json.loads((tmp_path / "manifest.json").read_text())["body"]["spaces"]["32"]
    assert len(entry["files"]) == 3
    for number, file in enumerate(entry["files"]):
        path, other = tmp_path / file, tmp_path / entry["files"][number - 1]
        data, others = path.read_bytes(), other.read_bytes()
        if damage == "one byte":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif damage == "cut":
            path.write_bytes(data[:-1])
        elif damage == "swapped":
            path.write_bytes(others)
            other.write_bytes(data)
        else:
            path.unlink()
        assert_refused(tmp_path, "use another checkpoint")
        path.write_bytes(data)
        other.write_bytes(others)
    load(tmp_path, open_spaces())


def test_checkpoint_of_version_1_loads(tmp_path):
    """As libraries wrote it that knew of one file a key space, in chunks of their own size."""
    layout = RowLayout(rows=9, width=2, state_width=1)
    keys = [np.array([0, 2, 3]), np.array([7])]
    weight = [np.arange(6, dtype=np.float32).reshape(3, 2), np.array([[8, 9]], np.float32)]
    state = [np.array([[1, 5], [2, 6], [3, 7]], np.uint32), np.array([[4, 8]], np.uint32)]
    chunks, data = [], b""
    for parts in zip(keys, weight, state, strict=True):
        chunk = b"".join(part.tobytes() for part in parts)
        chunks.append([len(data), len(parts[0]), checkpoint_files.zlib.crc32(chunk)])
        data += chunk
    space = {
        "file": "rows-0123456789abcdef-0.bin",
        "layout": {"rows": 9, "width": 2, "state_width": 1, "dtype": "float32", "byteorder": "little"},
        "identity": {},
        "metadata": {"batch": 3, "steps": [4], "policy": "lfu"},
        "chunks": chunks,
    }
    (tmp_path / space["file"]).write_bytes(data)
    body = {"spaces": {"": space}, "extra": {"epoch": 1}}
    outer = {"format": "tieredemb checkpoint", "version": 1, "crc32": 0, "body": body}
    (tmp_path / "manifest.json").write_text(json.dumps(outer))
    edit_manifest(tmp_path, lambda outer: None)
    cold = HostMemory().open(layout, name="", identity={})
    assert load(tmp_path, {"": cold}) == {"epoch": 1}
    np.testing.assert_array_equal(np.flatnonzero(cold.state[:, -1]), np.concatenate(keys))
    np.testing.assert_array_equal(cold.weight[np.concatenate(keys)], np.concatenate(weight))
    np.testing.assert_array_equal(cold.state[np.concatenate(keys)], np.concatenate(state))
    assert cold.metadata == Metadata(batch=3, steps=[4], policy="lfu")


# --- failures -------------------------------------------------------------------------------------


def assert_last_checkpoint_stands(directory, kept):
    manifest = json.loads((directory / "manifest.json").read_text())
    named = {file for entry in manifest["body"]["spaces"].values() for file in entry.get("files", [entry.get("file")])}
    assert set(os.listdir(directory)) == {"manifest.json", *named}
    spaces = open_spaces()
    load(directory, spaces)
    assert contents(spaces) == kept


def test_save_syncs_everything_before_the_rename_and_deletes_after_it(saved, monkeypatch):
    directory, _ = saved
    events = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def note_fsync(fd):
        events.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def note_replace(*paths):
        events.append(("replace", os.path.basename(paths[0])))
        replace(*paths)

    def note_unlink(path):
        events.append(("unlink", os.path.basename(path)))
        unlink(path)

    old = {path.name for path in directory.iterdir()} - {"manifest.json"}
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "unlink", note_unlink)
    checkpoint.save(directory, open_spaces())
    new = {path.name for path in directory.iterdir()} - {"manifest.json"}
    renamed = [kind for kind, _ in events].index("replace")
    pending = events[renamed][1]
    assert {name for _, name in events[:renamed]} == {*new, pending, directory.name}
    assert events[renamed - 1] == ("fsync", directory.name)
    assert events[renamed + 1] == ("fsync", directory.name)
    assert {name for _, name in events[renamed + 2 :]} == old
    assert all(kind == "unlink" for kind, _ in events[renamed + 2 :])


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "posix_fadvise"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failed_save_leaves_the_last_checkpoint_and_nothing_else(saved, monkeypatch, call, code):
    directory, kept = saved
    spaces = open_spaces()
    fill(spaces, 2)

    def fail(*args):
        raise OSError(code, "no")

    for skip in (0, 1, 3):
        real, count = getattr(os, call), iter(range(10**9))

        def later(*args, real=real, count=count, skip=skip):
            return fail() if next(count) >= skip else real(*args)

        if skip and call == "replace":
            break
        with monkeypatch.context() as patched:
            patched.setattr(os, call, later)
            with pytest.raises(StorageFullError if code == errno.ENOSPC else CheckpointError):
                checkpoint.save(directory, spaces)
        assert_last_checkpoint_stands(directory, kept)


def test_rows_that_read_back_wrong_fail_the_save(saved, monkeypatch, on_disk):
    directory, kept = saved
    real = os.pwrite

    def corrupt(fd, data, offset):
        data = bytearray(data)
        data[-1] ^= 1
        return real(fd, data, offset)

    spaces = open_spaces()
    fill(spaces, 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", corrupt)
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.save(directory, spaces)
    assert_last_checkpoint_stands(directory, kept)


def test_only_what_a_disk_holds_is_read_back(monkeypatch, on_disk, tmp_path):
    spaces, verified = open_spaces(), []
    monkeypatch.setattr(checkpoint_files.RowFiles, "verify", lambda files: verified.append(files))
    checkpoint.save(tmp_path, spaces)
    assert len(verified) == len(spaces)
    monkeypatch.setattr(system, "statfs", lambda path: 0x01021994)
    checkpoint.save(tmp_path, spaces)
    assert len(verified) == len(spaces)


def test_rows_that_change_after_they_were_verified_are_not_loaded_from_a_disk(saved, on_disk):
    directory, _ = saved
    path = row_file(directory)
    with checkpoint.opened(directory, open_spaces()) as found:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(StorageError, match="after the checkpoint was verified"):
            found.restore()


def test_statfs_tells_tmpfs_and_says_what_is_missing(tmp_path):
    with open("/proc/mounts") as mounts:
        kind = next(line.split()[2] for line in mounts if line.split()[1] == "/dev/shm")
    assert (system.statfs("/dev/shm") == 0x01021994) == (kind == "tmpfs")
    with pytest.raises(FileNotFoundError):
        system.statfs(str(tmp_path / "none"))


def test_interrupt_after_the_rename_keeps_the_new_checkpoint(saved, monkeypatch):
    directory, _ = saved
    spaces = open_spaces()
    fill(spaces, 2)
    replace = os.replace

    def interrupted(*args):
        replace(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(directory, spaces)
    loaded = open_spaces()
    load(directory, loaded)
    assert contents(loaded) == contents(spaces)


def test_full_disk_fails_the_save_for_real(saved):
    directory, kept = saved
    spaces = open_spaces()
    fill(spaces, 2, share=1.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError):
            checkpoint.save(directory, spaces)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_last_checkpoint_stands(directory, kept)


def test_opened_checkpoint_survives_a_save_that_replaces_it(saved):
    directory, kept = saved
    spaces, newer = open_spaces(), open_spaces()
    fill(newer, 2)
    with checkpoint.opened(directory, spaces) as found:
        checkpoint.save(directory, newer)
        found.restore()
    assert contents(spaces) == kept
    load(directory, spaces)
    assert contents(spaces) == contents(newer)


def test_load_waits_for_nobody_who_has_locked_the_directory(saved):
    directory, kept = saved
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # any reader of the directory can
        spaces = open_spaces()
        load(directory, spaces)
        assert contents(spaces) == kept
        with pytest.raises(CheckpointError, match="somebody else has locked it"):
            checkpoint.save(directory, spaces)
    finally:
        os.close(fd)


def test_load_takes_the_files_of_a_save_that_came_in_between(saved, monkeypatch):
    directory, _ = saved
    newer, spaces = open_spaces(), open_spaces()
    fill(newer, 2)
    read, times = checkpoint.read_manifest, itertools.count()

    def read_and_replace(path):
        manifest = read(path)
        if next(times) == 0:
            checkpoint.save(directory, newer)
        return manifest

    monkeypatch.setattr(checkpoint, "read_manifest", read_and_replace)
    load(directory, spaces)
    assert contents(spaces) == contents(newer)


def test_checkpoint_of_a_broken_cache_is_refused_without_recover(tmp_path):
    spaces, loaded = open_spaces(), open_spaces()
    fill(spaces, 1)
    fill(loaded, 2)
    before = contents(loaded)
    checkpoint.save(tmp_path, spaces, broken="an update was interrupted")
    with pytest.raises(CheckpointError, match=r"an update was interrupted.*recover=True.*nothing was changed"):
        load(tmp_path, loaded)
    assert contents(loaded) == before
    load(tmp_path, loaded, recover=True)
    assert contents(loaded) == contents(spaces)


def save_until_killed(directory, report, call, at):
    """Saves version after version, naming each in `report`; dies in `call` number `at`."""
    real, count = getattr(os, call, None), itertools.count()

    def fatal(*args):
        if next(count) == at:
            if call == "pwrite":  # half of it arrives
                real(args[0], args[1][: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    spaces = open_spaces()
    if real:
        setattr(os, call, fatal)
    for version in itertools.count(2):
        fill(spaces, version)
        os.write(report, f"{version}\n".encode())
        checkpoint.save(directory, spaces)


def killed_save(directory, call="", at=0, seconds=0.0):
    """Versions of which the checkpoint may be after a process that saves was killed."""
    heard, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_until_killed(directory, report, call, at)
        finally:
            os._exit(1)
    os.close(report)
    with open(heard) as lines:
        versions = [int(lines.readline())]
        if not call:
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        versions.extend(map(int, lines))
    return {versions[-1] - 1, versions[-1]}


def assert_loads_one_of(directory, versions):
    loaded, expected = open_spaces(), open_spaces()
    load(directory, loaded)
    fill(expected, loaded["32"].metadata.batch)
    assert contents(loaded) == contents(expected)
    assert loaded["32"].metadata.batch in versions
    checkpoint.save(directory, loaded)
    assert len(os.listdir(directory)) == len(LAYOUTS) + 1


@pytest.mark.parametrize(
    ("call", "at"),
    [
        ("pwrite", 0),
        ("pwrite", 20),
        ("fsync", 0),
        ("fsync", 4),  # the manifest beside the last one
        ("fsync", 5),  # the directory, before the rename
        ("replace", 0),
        ("fsync", 6),  # the directory, after the rename
        ("unlink", 0),
        ("unlink", 2),
    ],
)
def test_save_killed_at_any_step_leaves_a_whole_checkpoint(saved, call, at):
    versions = killed_save(saved[0], call, at)
    assert_loads_one_of(saved[0], versions)


def test_save_killed_at_random_leaves_a_whole_checkpoint(saved):
    times = random.Random(0)
    for _ in range(25):
        versions = killed_save(saved[0], seconds=times.uniform(0.0, 0.05))
        assert_loads_one_of(saved[0], versions)
        spaces = open_spaces()
        fill(spaces, 1)
        checkpoint.save(saved[0], spaces)


def test_save_of_several_files_killed_at_random_leaves_a_whole_checkpoint(saved, large):
    times = random.Random(1)
    for _ in range(15):
        versions = killed_save(saved[0], seconds=times.uniform(0.0, 0.1))
        loaded, expected = open_spaces(), open_spaces()
        load(saved[0], loaded)
        fill(expected, loaded["32"].metadata.batch)
        assert contents(loaded) == contents(expected)
        assert loaded["32"].metadata.batch in versions
        fill(loaded, 1)  # what the next process begins with
        checkpoint.save(saved[0], loaded)
        assert_last_checkpoint_stands(saved[0], contents(loaded))
