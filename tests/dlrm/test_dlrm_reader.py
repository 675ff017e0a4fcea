"""The example's reader: what stands in the file is what comes out, from any position, and faults are named."""

from __future__ import annotations

import gzip
import lzma
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the examples are no part of the installed package

from examples.dlrm import criteo, text
from examples.dlrm.criteo import CriteoFile, LogError, Rows
from examples.dlrm.model import to_batch

WRITERS: dict[str, Callable[[bytes], bytes]] = {"tsv": bytes, "gz": gzip.compress, "xz": lzma.compress}


def log_lines(rows: int, seed: int = 0) -> list[str]:
    """Lines of a log with empty and negative fields and both extremes of a category."""
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        values = [*random.integers(-3, 10, 7), *random.integers(-(10**17), 10**17, 6)]
        integers = [str(value) if random.random() < 0.7 else "" for value in values]
        values = [0, 2**32 - 1, *random.integers(0, 2**32, 24)]
        categories = [f"{value:08x}" if random.random() < 0.8 else "" for value in values]
        lines.append("\t".join([str(random.integers(2)), *integers, *categories]))
    return lines


def parsed_plainly(lines: list[str]) -> Rows:
    """What the reader must return, by the simplest means."""
    fields = [line.split("\t") for line in lines]
    return Rows(
        np.array([int(f[0]) for f in fields], np.uint8),
        np.array([[int(v) if v else text.NO_INTEGER for v in f[1:14]] for f in fields]),
        np.array([[int(v, 16) if v else text.NO_CATEGORY for v in f[14:]] for f in fields]),
    )


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def assert_equal(given: Rows, wanted: Rows) -> None:
    np.testing.assert_array_equal(given.labels, wanted.labels)
    np.testing.assert_array_equal(given.integers, wanted.integers)
    np.testing.assert_array_equal(given.categories, wanted.categories)


def read_all(log: CriteoFile, start: int = 0, stop: int | None = None, size: int = 7) -> Rows:
    batches = list(log.batches(start, len(log) if stop is None else stop, size))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    return Rows(*(np.concatenate([getattr(b, name) for b in batches]) for name in Rows.__dataclass_fields__))


@pytest.mark.parametrize("suffix", WRITERS)
def test_reader_returns_what_the_file_holds(tmp_path: Path, suffix: str) -> None:
    lines = log_lines(100)
    path = tmp_path / "log"  # told apart by content, not by name
    path.write_bytes(WRITERS[suffix]("".join(line + "\n" for line in lines).encode()))
    log = CriteoFile(path)
    assert len(log) == 100
    assert_equal(read_all(log), parsed_plainly(lines))


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 50), (1, 50), (3, 50), (17, 18), (49, 50), (20, 33)])
def test_reader_enters_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, start: int, stop: int
) -> None:
    monkeypatch.setattr(criteo, "CHUNK_BYTES", chunk_bytes)
    lines = log_lines(50)
    assert_equal(read_all(CriteoFile(write(tmp_path / "log", lines)), start, stop), parsed_plainly(lines[start:stop]))


def test_reader_at_the_end_returns_nothing(tmp_path: Path) -> None:
    assert list(CriteoFile(write(tmp_path / "log", log_lines(5))).batches(5, 5, 2)) == []


def test_reader_takes_a_last_line_without_newline(tmp_path: Path) -> None:
    lines = log_lines(3)
    (tmp_path / "log").write_text("\n".join(lines))
    log = CriteoFile(tmp_path / "log")
    assert len(log) == 3
    assert_equal(read_all(log), parsed_plainly(lines))


def test_reader_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    plain_read = criteo._read
    monkeypatch.setattr(criteo, "_read", lambda file: (reads.append(1), plain_read(file))[1])
    monkeypatch.setattr(criteo, "CHUNK_BYTES", 4096)
    batches = CriteoFile(write(tmp_path / "log", log_lines(1000)), rows=1000).batches(0, 1000, 10)
    next(batches)
    assert len(reads) == 1, "one chunk of 4 KiB holds more than 10 rows; nothing else may be read"


def test_format_lines_inverts_parse_lines() -> None:
    lines = log_lines(50, seed=1)
    rows = parsed_plainly(lines)
    buffer = np.empty(50 * text.MAX_LINE_BYTES, np.uint8)
    used = text.format_lines(rows.labels, rows.integers, rows.categories, buffer)
    assert buffer[:used].tobytes().decode() == "".join(line + "\n" for line in lines)


def _replaced(field: int, value: str) -> Callable[[str], str]:
    def change(line: str) -> str:
        fields = line.split("\t")
        fields[field] = value
        return "\t".join(fields)

    return change


FAULTS: dict[str, tuple[Callable[[str], str], str]] = {
    "few": (lambda line: line.rsplit("\t", 1)[0], "expected 40 tab-separated fields .*, got 39"),
    "many": (lambda line: line + "\tx", "expected 40 tab-separated fields .*, got 41"),
    "blank": (lambda line: "", "expected 40 tab-separated fields .*, got 1"),
    "label": (_replaced(0, "2"), "the label must be 0 or 1, got '2'"),
    "no label": (_replaced(0, ""), "the label must be 0 or 1, got ''"),
    "not a number": (_replaced(3, "1.5"), "I3 must be an integer .* got '1.5'"),
    "lone minus": (_replaced(13, "-"), "I13 must be an integer .* got '-'"),
    "overflow": (_replaced(1, "9" * 19), "I1 must be an integer of at most 18 digits"),
    "not hex": (_replaced(14, "0123456g"), "C1 must be 8 hexadecimal digits or empty, got '0123456g'"),
    "short": (_replaced(39, "123"), "C26 must be 8 hexadecimal digits or empty, got '123'"),
    "carriage return": (lambda line: line + "\r", r"C26 must be 8 hexadecimal digits or empty, got '.*\\r'"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("start", [0, 30])
def test_reader_names_file_line_and_fault(tmp_path: Path, fault: str, start: int) -> None:
    change, message = FAULTS[fault]
    lines = log_lines(60, seed=2)
    lines[-1] = lines[36].rsplit("\t", 1)[0] + "\t12345678"
    lines[36] = change(lines[-1])
    path = write(tmp_path / "day.tsv", lines)
    with pytest.raises(LogError, match=rf"day\.tsv, line 37: {message}"):
        read_all(CriteoFile(path), start)


def test_reader_refuses_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"there is no file .*absent\.tsv"):
        CriteoFile(tmp_path / "absent.tsv")
    (tmp_path / "empty.tsv").touch()
    with pytest.raises(LogError, match=r"empty\.tsv is empty"):
        CriteoFile(tmp_path / "empty.tsv")
    (tmp_path / "log.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(LogError, match=r"compressed with zstd; plain text, gzip and xz"):
        CriteoFile(tmp_path / "log.zst")
    (tmp_path / "long").write_bytes(bytes(6 << 20))
    with pytest.raises(LogError, match=r"a line of more than \d+ bytes"):
        CriteoFile(tmp_path / "long")


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_reader_names_a_truncated_file(tmp_path: Path, suffix: str) -> None:
    whole = WRITERS[suffix]("\n".join(log_lines(200)).encode())
    (tmp_path / "log").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LogError, match="truncated or damaged"):
        CriteoFile(tmp_path / "log")


def test_reader_refuses_more_rows_than_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "log", log_lines(10))
    with pytest.raises(LogError, match="ends after 10 rows, where 11 were asked for"):
        read_all(CriteoFile(path, rows=11))
    assert len(read_all(CriteoFile(path, rows=4))) == 4


def test_batch_is_table_major_with_an_id_for_missing_values() -> None:
    rows = parsed_plainly(log_lines(6, seed=3))
    batch = to_batch(rows, 1000, "cpu")
    ids = batch.ids.numpy().reshape(text.CATEGORIES, 6).T
    missing = rows.categories == text.NO_CATEGORY
    assert missing.any()
    np.testing.assert_array_equal(ids == 0, missing)
    np.testing.assert_array_equal(ids[~missing], 1 + rows.categories[~missing] % 999)
    assert batch.offsets.tolist() == list(range(6 * 26 + 1))
    np.testing.assert_array_equal(batch.labels.numpy(), rows.labels)


def test_batch_takes_logarithms_of_counts_and_zero_for_missing_or_negative() -> None:
    integers = np.array([[text.NO_INTEGER, -2, 0, 1, 1000, *[0] * 8]])
    rows = Rows(np.zeros(1, np.uint8), integers, np.zeros((1, text.CATEGORIES), np.int64))
    dense = to_batch(rows, 10, "cpu").dense.numpy()[0]
    np.testing.assert_allclose(dense[:5], [0, 0, 0, np.log(2), np.log(1001)], rtol=1e-6)


def test_reader_agrees_with_what_is_known_of_the_real_log(data_dir: Path) -> None:
    log = CriteoFile(data_dir / "criteo" / "train_10000.tsv.xz")
    rows = read_all(log, size=512)
    pairs = Counter((column, value) for column in range(26) for value in rows.categories[:, column])
    empty = {(column, text.NO_CATEGORY) for column in range(26)}
    pairs = Counter({pair: uses for pair, uses in pairs.items() if pair not in empty})
    assert (len(log), rows.labels.sum()) == (10_000, 2_182)
    assert (len(pairs), sum(uses == 1 for uses in pairs.values())) == (43_579, 30_768)
