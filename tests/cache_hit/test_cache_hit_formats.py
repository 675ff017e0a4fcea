"""Formats of traces under damage and excess: only `InvalidInputError` comes out, before memory is taken, or what the
content says."""

from __future__ import annotations

import os
import re
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest

from tieredemb.cache_hit import formats, traces
from tieredemb.cache_hit.traces import Trace, read_trace
from tieredemb.errors import InvalidInputError

GIB = 1 << 30
ARC = b"10 3 0 0\n\n5 1 0 1\r\n11 2 0 2\n"
REPLACEMENTS = b"\0 \n\r09-+_.xL'\"\\(),:<>{}#\x80\xff"
NPY_SOURCE = np.array([7, 300, 7, 0, 256, 2**40])


@pytest.fixture(autouse=True)
def _one_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a damaged length asks for must not depend on the machine: 14,913,080 accesses fit."""
    monkeypatch.setattr(traces, "available_memory_bytes", lambda: GIB)


@pytest.fixture
def npy(tmp_path: Path) -> bytes:
    np.save(tmp_path / "source.npy", NPY_SOURCE)
    return (tmp_path / "source.npy").read_bytes()


def _read(path: Path, content: bytes, limit: int | None = None) -> list[int] | None:
    """The ids; None where the content is refused, in a message that names the file and stays a message."""
    path.write_bytes(content)
    try:
        return read_trace(path, limit=limit).ids.tolist()
    except InvalidInputError as error:
        message = str(error)
    assert str(path) in message
    assert len(message) < 1000 + len(str(path))
    return None


def _ids(keys: object) -> list[int]:
    return Trace.from_keys("t", np.asarray(keys)).ids.tolist()


def _replaced(content: bytes, position: int) -> list[bytes]:
    return [content[:position] + bytes([byte]) + content[position + 1 :] for byte in REPLACEMENTS]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_trace_larger_than_memory_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "t.be64"
    path.touch()
    os.truncate(path, 16 * GIB)  # a hole: it takes no space
    message = (
        "holds at least 2147483648 accesses; to take 2147483648 of them needs 144.0 GiB of memory, and 1.0 GiB are "
        "available; pass --limit N to take the first N, at most 14913080"
    )
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=message):
            read_trace(path)
        with pytest.raises(InvalidInputError, match="to take 14913081 of them"):
            read_trace(path, limit=14_913_081)
        assert read_trace(path, limit=3).ids.tolist() == [0, 0, 0]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_trace_arc_count_larger_than_memory_is_refused_unallocated(tmp_path: Path) -> None:
    path = tmp_path / "t.arc"
    path.write_bytes(b"7 1 0 0\n0 4294967295 0 1\n")
    message = r"line 2 of trace file '.*' brings it to 4294967296 accesses; .* needs 288\.0 GiB .*--limit"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=message):
            read_trace(path)
        with pytest.raises(InvalidInputError, match="to take 4000000000 of them needs"):
            read_trace(path, limit=4_000_000_000)
        assert read_trace(path, limit=5).ids.tolist() == [4, 0, 1, 2, 3]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_trace_accesses_are_bounded_however_much_memory_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "available_memory_bytes", lambda: 2**60)
    assert _read(tmp_path / "t.arc", b"0 4294967297 0 0\n") is None
    monkeypatch.setattr(formats, "MAX_ACCESSES", 3)
    assert _read(tmp_path / "t.arc", b"0 3 0 0\n") == [0, 1, 2]
    assert _read(tmp_path / "t.arc", b"0 3 0 0\n9 1 0 0\n") is None
    assert _read(tmp_path / "t.be32", b"\0" * 16) is None
    assert _read(tmp_path / "t.be32", b"\0" * 16, limit=3) == [0, 0, 0]


@pytest.mark.parametrize("keys", [np.arange(100_000) % 1000, np.arange(100_000)[::-1]])
def test_trace_takes_no_more_memory_than_an_access_is_counted_for(tmp_path: Path, keys: np.ndarray) -> None:
    contents = {
        "t.be64": keys.astype(">u8").tobytes(),
        "t.arc": "".join(f"{key} 1 0 0\n" for key in keys).encode(),
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        tracemalloc.start()
        try:
            read_trace(path)
            assert tracemalloc.get_traced_memory()[1] < formats.BYTES_PER_ACCESS * keys.size
        finally:
            tracemalloc.stop()


# --- arc --------------------------------------------------------------------------------------------------------------


def _arc_keys(content: bytes) -> list[int] | None:
    """The format said plainly; None for what it does not allow."""
    keys: list[int] = []
    for line in re.split(r"\r\n|\r|\n", content.decode("ascii", "backslashreplace")):
        if not line or line.isspace():
            continue
        try:
            start, count, *rest = map(int, line.split())
        except ValueError:
            return None
        if start < 0 or count < 1 or len(rest) != 2:
            return None
        keys += range(start, start + count)
    return keys or None


def test_trace_arc_damaged_anywhere_is_refused_or_read_as_it_stands(tmp_path: Path) -> None:
    outcomes = set()
    for position in range(len(ARC)):
        for content in [ARC[:position], ARC[:position] + ARC[position + 1 :], *_replaced(ARC, position)]:
            keys = _arc_keys(content)
            assert _read(tmp_path / "t.arc", content) == (None if keys is None else _ids(keys)), content
            outcomes.add(keys is None)
    assert outcomes == {False, True}


def test_trace_arc_line_is_one_however_long(tmp_path: Path) -> None:
    assert _read(tmp_path / "t.arc", b"1 1 0 0" + b" " * 1017 + b"2 1 0 0\n") is None


def test_trace_arc_blank_lines_between_accesses_are_skipped(tmp_path: Path) -> None:
    assert _read(tmp_path / "t.arc", b"1 1 0 0\n".join([b"\n" * 700] * 3)) == [0, 0]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_trace_arc_lines_end_as_on_any_system(tmp_path: Path, end: bytes) -> None:
    assert _read(tmp_path / "t.arc", end.join([b"10 3 0 0", b"", b"5 1 0 1"])) == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"1 1 0 0\n" + b"\n" * (1 << 24), 1002),  # blank lines are no accesses, so --limit does not end them
        (b"1 1 0 0\n" + b" " * (1 << 24), 1002),
        (b"1 1 0 0\n" + b"1" * (1 << 24), 2),
        (b"1 1 0 0\n" + b"\0" * (1 << 24), 2),
    ],
)
def test_trace_arc_without_an_end_is_refused_early(tmp_path: Path, content: bytes, line: int) -> None:
    path = tmp_path / "t.arc"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=f"line {line} of trace file"):
            read_trace(path, limit=2)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- be64, be32 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "width"), [("t.be64", 8), ("t.be32", 4)])
def test_trace_big_endian_truncated_within_a_key_is_refused(tmp_path: Path, name: str, width: int) -> None:
    keys = np.array([7, 300, 7, 0], f">u{width}")
    for length in range(1, keys.nbytes):
        expected = None if length % width else _ids(keys[: length // width])
        assert _read(tmp_path / name, keys.tobytes()[:length]) == expected
        if length > width:
            assert _read(tmp_path / name, keys.tobytes()[:length], limit=1) == [0]


# --- npy --------------------------------------------------------------------------------------------------------------


def _loaded(path: Path) -> list[int] | None:
    """What numpy reads, as ids. It warns, and raises whatever its parsers raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _ids(np.load(path))
        except Exception:
            return None


@pytest.mark.filterwarnings("always")
def test_trace_npy_damaged_anywhere_is_refused_or_read_as_numpy_does(
    tmp_path: Path, npy: bytes, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "t.npy"
    outcomes = set()
    for position in range(len(npy) - NPY_SOURCE.nbytes):
        for content in [npy[:position] + npy[position + 1 :], *_replaced(npy, position)]:
            ids = _read(path, content)
            assert ids in (None, _loaded(path)), content
            outcomes.add(ids is None)
    assert outcomes == {False, True}
    assert [str(warning.message) for warning in recwarn] == []


def test_trace_npy_of_another_length_is_refused(tmp_path: Path, npy: bytes) -> None:
    path = tmp_path / "t.npy"
    for length in range(len(npy)):
        assert _read(path, npy[:length]) is None, length
    assert _read(path, npy + b"\0") is None
    assert _read(path, npy) == _ids(NPY_SOURCE)
    assert _read(path, npy[:-1], limit=5) == _ids(NPY_SOURCE[:5])  # what comes after the limit is not looked at
    assert _read(path, npy + b"\0", limit=6) == _ids(NPY_SOURCE)


def _with_header(header: str, data: bytes = NPY_SOURCE.tobytes(), version: int = 1) -> bytes:
    encoded = header.encode("utf-8" if version == 3 else "latin-1")
    return (
        b"\x93NUMPY" + bytes([version, 0]) + len(encoded).to_bytes(2 if version == 1 else 4, "little") + encoded + data
    )


def _header(descr: str = "'<i8'", fortran: str = "False", shape: str = "(6,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_with_header(_header()[:-1]), r"cannot be parsed"),  # SyntaxError, which numpy turns into TokenError
        (_with_header("(" * 5000), r"cannot be parsed"),
        (_with_header("-" * 9000 + "1"), r"cannot be parsed"),
        (_with_header("\0" * 20), r"cannot be parsed"),
        (_with_header("{[]: 1}"), r"cannot be parsed"),
        (_with_header(_header())[:40], r"ends within its header"),
        (_with_header("")[:9], r"ends within its header"),
        (_with_header("[" + _header() + "][0]"), r"cannot be parsed"),
        (_with_header(_header("__import__('os')")), r"cannot be parsed"),
        (_with_header(_header() + " " * 20_000), r"20057 bytes, more than 10000"),
        (_with_header(_header(), version=0), r"version 1\.0 to 3\.0"),
        (_with_header(_header(), version=4), r"version 1\.0 to 3\.0"),
        (b"PK\3\4" + b"\0" * 100, r"version 1\.0 to 3\.0"),
        (b"\x93NUMPY\3\0\4\0\0\0\xff\xff\xff\xff", r"no UTF-8"),
        (_with_header("[]"), r"its header is '\[\]'"),
        (_with_header("{'descr': '<i8', 'shape': (6,)}"), r"its header is"),
        (_with_header("{1: 2, None: 3, 'shape': (6,)}"), r"its header is"),
        (_with_header(_header(shape="(-6,)")), r"shape \(N,\) is needed"),
        (_with_header(_header(shape="(6.0,)")), r"shape \(N,\) is needed"),
        (_with_header(_header(shape="(True,)")), r"shape \(N,\) is needed"),
        (_with_header(_header(shape="6")), r"shape \(N,\) is needed"),
        (_with_header(_header(shape="()")), r"shape \(N,\) is needed"),
        (_with_header(_header(shape="(2, 3)")), r"shape \(N,\) is needed"),
        (_with_header(_header(shape=f"({2**63},)")), r"shape \(N,\) is needed"),
        (_with_header(_header(shape=f"(0x{'f' * 4000},)")), r"shape \(N,\) is needed"),  # too long to be printed
        (_with_header(_header(shape=f"({'9' * 4000},)")), r"shape \(N,\) is needed"),
        (_with_header(_header(shape=f"({'9' * 5000},)")), r"cannot be parsed"),
        (_with_header(_header(shape=f"({2**62},)")), r"4611686018427387904 accesses; .*--limit"),
        (_with_header(_header(shape="(1000000000,)")), r"1000000000 accesses; .*--limit"),
        (_with_header(_header(shape="(7,)")), r"ends after 6 of 7 elements"),
        (_with_header(_header(shape="(5,)")), r"goes on after the 5 elements"),
        (_with_header(_header(shape="(0,)"), data=b""), r"is empty"),
        (_with_header(_header(fortran="3")), r"shape \(N,\) is needed"),
        (_with_header(_header("'|O'")), r"array of integers"),
        (_with_header(_header("'<f8'")), r"array of integers"),
        (_with_header(_header("'|b1'")), r"array of integers"),
        (_with_header(_header("'<m8[s]'")), r"array of integers"),
        (_with_header(_header("'<i3'")), r"array of integers"),
        (_with_header(_header("'(2,)<i8'")), r"array of integers"),
        (_with_header(_header("'<i8,<i8'")), r"array of integers"),
        (_with_header(_header("[('key', '<i8')]")), r"array of integers"),
        (_with_header(_header("[('клюＣ', '<i8')]"), version=3), r"array of integers"),
        (_with_header(_header("None")), r"array of integers"),
    ],
)
def test_trace_npy_of_a_malformed_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.npy"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=rf"{re.escape(str(path))}'.*{message}"):
        read_trace(path)


@pytest.mark.parametrize(
    "content",
    [
        _with_header(_header(), version=2),
        _with_header(_header(), version=3),
        _with_header(_header(fortran="True")),
        _with_header(_header(shape="(6L,)")),  # as Python 2 wrote it
        _with_header('{"shape":(6,),"fortran_order":False,"descr":"=i8"}\n'),
        _with_header(_header("'>i8'"), data=NPY_SOURCE.astype(">i8").tobytes()),
    ],
)
def test_trace_npy_as_others_write_it_is_read(tmp_path: Path, content: bytes) -> None:
    assert _read(tmp_path / "t.npy", content) == _ids(NPY_SOURCE)


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">u2", "<u4", ">i4", "<i8", ">u8"])
def test_trace_npy_of_every_integer_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    keys = np.array([1, 100, 1, 0, 127], dtype)
    np.save(tmp_path / "t.npy", keys)
    assert read_trace(tmp_path / "t.npy").ids.tolist() == [1, 2, 1, 0, 3]
    assert read_trace(tmp_path / "t.npy", limit=2).ids.tolist() == [0, 1]


def test_trace_npy_of_a_huge_shape_is_read_to_its_limit(tmp_path: Path) -> None:
    content = _with_header(_header(shape=f"({2**62},)"))
    assert _read(tmp_path / "t.npy", content, limit=6) == _ids(NPY_SOURCE)
    assert _read(tmp_path / "t.npy", content, limit=7) is None
