"""Trace files: every format, every compression, and what is said about a file that is not what it claims."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tieredemb.cache_hit.traces import Trace, read_trace
from tieredemb.errors import ConfigError, InvalidInputError, MissingDependencyError

KEYS = [7, 2**32 - 1, 7, 0, 256, 2**32 - 1]  # with the bytes swapped, 256 lies below 7
IDS = [1, 3, 1, 0, 2, 3]
COMPRESS = {
    "": bytes,
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def _npy(path: Path, keys: object) -> bytes:
    np.save(path, keys)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["t.be64", "scarab-t.trace", "t.be32", "orm-t.trace", "T.LIS", "t.arc", "t.npy"])
def test_trace_reads_every_format_and_compression(tmp_path: Path, name: str, suffix: str) -> None:
    if name.endswith(("be64", "scarab-t.trace")):
        content = np.array(KEYS, ">u8").tobytes()
    elif name.endswith(("be32", "orm-t.trace")):
        content = np.array(KEYS, ">u4").tobytes()
    elif name.endswith("npy"):
        content = _npy(tmp_path / "source.npy", np.array(KEYS, np.uint64))
    else:
        content = "".join(f"{key} 1 0 {n}\n" for n, key in enumerate(KEYS)).encode()
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESS[suffix](content))
    trace = read_trace(path)
    assert trace.ids.tolist() == IDS
    assert trace.ids.dtype == np.int64
    assert trace.rows == 4
    assert trace.name == name.rsplit(".", 1)[0]


def test_trace_format_overrides_the_name(tmp_path: Path) -> None:
    path = tmp_path / "requests.trace"
    path.write_bytes(np.array([1, 2, 1, 2], ">u4").tobytes())
    assert read_trace(path, format="be32").ids.tolist() == [0, 1, 0, 1]
    assert read_trace(path, format="be64").ids.tolist() == [0, 0]


def test_trace_keys_of_64_bits_stay_distinct(tmp_path: Path) -> None:
    path = tmp_path / "t.be64"
    path.write_bytes(np.array([2**64 - 1, 2**63, 2**64 - 2], ">u8").tobytes())
    assert read_trace(path).ids.tolist() == [2, 0, 1]


def test_trace_arc_line_expands_to_count_accesses(tmp_path: Path) -> None:
    path = tmp_path / "t.lis"
    path.write_text("10 3 0 0\n\n5 1 0 1\n11 2 0 2\n")
    trace = read_trace(path)
    assert trace.ids.tolist() == [1, 2, 3, 0, 2, 3]  # 10 11 12, 5, 11 12
    assert read_trace(path, limit=2).ids.tolist() == [0, 1]
    assert read_trace(path, limit=5).ids.tolist() == [1, 2, 3, 0, 2]


def test_trace_limit_takes_the_first_accesses(tmp_path: Path) -> None:
    path = tmp_path / "t.be32"
    path.write_bytes(np.array(KEYS, ">u4").tobytes())
    trace = read_trace(path, limit=3)
    assert trace.ids.tolist() == [0, 1, 0]
    assert trace.rows == 2
    assert read_trace(path, limit=100).ids.tolist() == IDS


def test_trace_zst_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "t.be32.zst"
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(b"".join(compress(np.array([key], ">u4").tobytes()) for key in KEYS))
    assert read_trace(path).ids.tolist() == IDS


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".zst"])
def test_trace_truncated_compression_is_refused(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    whole = COMPRESS[suffix](rng.integers(0, 2**60, 4096).astype(">u8").tobytes())
    path = tmp_path / f"t.be64{suffix}"
    for content in (whole[: len(whole) // 2], b"no such format" * 10):
        path.write_bytes(content)
        with pytest.raises(InvalidInputError, match=rf"no intact \{suffix} file"):
            read_trace(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.be64", b"\0" * 12, r"12 bytes, no multiple of 8.*--format"),
        ("t.be32", b"\0" * 6, r"6 bytes, no multiple of 4"),
        ("t.be64", b"", r"empty"),
        ("t.lis", b"", r"empty"),
        ("t.lis", b"1 1 0 0\n2 1 0\n", r"line 2 .*'2 1 0'.*four integers"),
        ("t.lis", b"1 1 0 0\n\n2 one 0 0\n", r"line 3 .*'2 one 0 0'"),
        ("t.lis", b"1 0 0 0\n", r"line 1 .*count at least 1"),
        ("t.lis", b"-1 1 0 0\n", r"line 1 .*start at least 0"),
        ("t.lis", b"1 1000000000000 0 0\n", r"line 1 .*1000000000000 accesses.*--limit"),
        ("t.lis", b"99999999999999999999 1 0 0\n", r"line 1 "),
        ("t.npy", b"\x93NUMPY", r"no intact \.npy"),
        ("t.npy", b"", r"no intact \.npy"),
    ],
)
def test_trace_malformed_content_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        read_trace(path)


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 2), np.int64), np.array(["a"]), np.int64(3)])
def test_trace_npy_of_no_integer_vector_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    _npy(tmp_path / "t.npy", array)
    with pytest.raises(InvalidInputError, match=r"array of integers of shape \(N,\)"):
        read_trace(tmp_path / "t.npy")


def test_trace_unknown_name_missing_file_and_bad_limit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "web.trace").write_bytes(b"\0" * 8)
    with pytest.raises(ConfigError, match=r"cannot be told from its name; pass --format"):
        read_trace(tmp_path / "web.trace")
    with pytest.raises(ConfigError, match="does not exist"):
        read_trace(tmp_path / "none.be64")
    with pytest.raises(ConfigError, match="one of auto, be64"):
        read_trace(tmp_path / "web.trace", format="le64")
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        read_trace(tmp_path / "web.trace", format="be64", limit=0)


def test_trace_zst_without_zstandard_names_the_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.be64.zst"
    path.write_bytes(COMPRESS[".zst"](b"\0" * 8))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tieredemb\[bench\]'"):
        read_trace(path)


def test_trace_without_accesses_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="'nothing' is empty"):
        Trace.from_keys("nothing", np.empty(0, np.int64))
