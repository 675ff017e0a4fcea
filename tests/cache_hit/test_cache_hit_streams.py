"""Compressed trace files: decoded no further than they are read, and never cut short in silence."""

from __future__ import annotations

import gzip
import lzma
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tieredemb.cache_hit import streams, traces
from tieredemb.cache_hit.traces import Trace, read_trace
from tieredemb.errors import InvalidInputError

MIB = 1 << 20
BOMB_BYTES = 64 * MIB
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
KEYS = np.array([7, 300, 7, 0, 256, 2**40], ">u8")
IDS = [1, 3, 1, 0, 2, 4]


@cache
def _bomb(name: str, suffix: str) -> bytes:
    """64 MiB that repeat one access, in four frames, after the head that the format needs."""
    head, access = b"", b"\0" * 8
    if name == "t.arc":
        access = b"0 1 0 0\n"
    if name == "t.npy":
        header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({BOMB_BYTES // 8},), }}\n".encode()
        head = COMPRESS[suffix](b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    return head + 4 * COMPRESS[suffix](access * (BOMB_BYTES // 4 // 8))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what the decoders gave out."""
    sizes: list[int] = []
    decode = streams._Frames._decode

    def counted(frames: streams._Frames, piece: bytes) -> bytes:
        content = decode(frames, piece)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(streams._Frames, "_decode", counted)
    return sizes


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["t.be64", "t.be32", "t.arc", "t.npy"])
def test_stream_is_decoded_no_further_than_the_limit(
    tmp_path: Path, decoded: list[int], name: str, suffix: str
) -> None:
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(_bomb(name, suffix))
    tracemalloc.start()
    try:
        trace = read_trace(path, limit=1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trace.ids.tolist() == [0] * 1000
    assert sum(decoded) <= 9 * MIB  # a piece becomes 8 MiB at most
    assert peak < 20 * MIB  # of which a decoder may hold two copies for a moment


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["t.be64", "t.be32", "t.arc", "t.npy"])
def test_stream_beyond_the_memory_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[int], name: str, suffix: str
) -> None:
    monkeypatch.setattr(traces, "available_memory_bytes", lambda: 1 * MIB)
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(_bomb(name, suffix))
    for limit in (None, 10**9):
        decoded.clear()
        with pytest.raises(InvalidInputError, match=r"GiB of memory, and 0\.0 GiB are available; pass --limit N"):
            read_trace(path, limit=limit)
        assert sum(decoded) <= 9 * MIB


@pytest.mark.parametrize("suffix", COMPRESS)
def test_stream_truncated_anywhere_is_refused(tmp_path: Path, suffix: str) -> None:
    """At the end of a frame alone nothing tells that another one followed."""
    first, second = COMPRESS[suffix](KEYS[:2].tobytes()), COMPRESS[suffix](KEYS[2:].tobytes())
    path = tmp_path / f"t.be64{suffix}"
    for length in range(1, len(first + second)):
        path.write_bytes((first + second)[:length])
        if length == len(first):
            assert read_trace(path).ids.tolist() == [0, 1]
        else:
            with pytest.raises(InvalidInputError, match=rf"no intact \{suffix} file"):
                read_trace(path)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_stream_truncated_beyond_the_limit_is_read(tmp_path: Path, suffix: str) -> None:
    keys = np.random.default_rng(0).integers(0, 2**60, 16_384).astype(">u8")
    whole = COMPRESS[suffix](keys.tobytes())
    path = tmp_path / f"t.be64{suffix}"
    path.write_bytes(whole[: len(whole) // 2])
    for limit in (1, 1000):
        expected = Trace.from_keys("t", keys[:limit]).ids
        np.testing.assert_array_equal(read_trace(path, limit=limit).ids, expected)
    for limit in (12_000, 16_384, None):
        with pytest.raises(InvalidInputError, match=rf"no intact \{suffix} file"):
            read_trace(path, limit=limit)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_stream_damaged_anywhere_is_refused_or_read_right(tmp_path: Path, suffix: str) -> None:
    """Some bytes mean nothing, such as gzip's time. Damage to a frame's first bytes must not end the trace before."""
    whole = COMPRESS[suffix](KEYS[:2].tobytes()) + COMPRESS[suffix](KEYS[2:].tobytes())
    path = tmp_path / f"t.be64{suffix}"
    refused = 0
    for position in range(len(whole)):
        for flipped in (0x01, 0x10, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[position] ^= flipped
            path.write_bytes(damaged)
            try:
                ids = read_trace(path).ids.tolist()
            except InvalidInputError:
                refused += 1
                continue
            assert ids == IDS, (position, flipped)
    assert refused > 2 * len(whole)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_stream_frames_are_read_to_the_last(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.be64{suffix}"
    path.write_bytes(b"".join(COMPRESS[suffix](key.tobytes()) for key in np.split(KEYS, 6)) + COMPRESS[suffix](b""))
    assert read_trace(path).ids.tolist() == IDS


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_stream_padding_between_frames_is_skipped(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.be64{suffix}"
    frames = [COMPRESS[suffix](part.tobytes()) for part in (KEYS[:2], KEYS[2:])]
    path.write_bytes(frames[0] + b"\0" * 2048 + frames[1] + b"\0" * 8)
    assert read_trace(path).ids.tolist() == IDS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_stream_followed_by_something_else_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.be64{suffix}"
    path.write_bytes(COMPRESS[suffix](KEYS.tobytes()) + b"something else")
    with pytest.raises(InvalidInputError, match=rf"no intact \{suffix} file"):
        read_trace(path)


def test_stream_that_the_system_fails_to_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "t.be64.xz"
    path.write_bytes(COMPRESS[".xz"](KEYS.tobytes()))
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(InvalidInputError, match=r"t\.be64\.xz' cannot be read: .*Permission denied"):
        read_trace(path)


def test_stream_of_the_old_lzma_format_is_refused(tmp_path: Path) -> None:
    """It has no checksum: damage would go unnoticed."""
    path = tmp_path / "t.be64.xz"
    path.write_bytes(lzma.compress(KEYS.tobytes(), lzma.FORMAT_ALONE))
    with pytest.raises(InvalidInputError, match=r"no intact \.xz file"):
        read_trace(path)
