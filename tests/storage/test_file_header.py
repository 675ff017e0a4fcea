"""Headers of row files with a right checksum and a wrong content: refused as `StorageFormatError`, unchanged."""

from __future__ import annotations

import json
import struct
import zlib

import pytest
from nasty_json import changed, text_of, wrong_values

from tieredemb.errors import ConfigError, StorageFormatError, UncleanFileError
from tieredemb.storage.base import Metadata, RowLayout
from tieredemb.storage.file.slots import REGION_BYTES
from tieredemb.storage.file.tier import File

LAYOUT = RowLayout(rows=5, width=2, state_width=1)
IDENTITY = {"seed": 7, "tables": [{"name": "user", "rows": 5}], "start": 0.5}
SLOT_BYTES = REGION_BYTES // 2
PREFIX = struct.Struct("<8sIIQQII")


def open_file(path, **flags):
    return File(path, **flags).open(LAYOUT, name="", identity=IDENTITY)


@pytest.fixture
def closed(tmp_path):
    """A file that was closed, with something to remember."""
    cold = open_file(tmp_path / "rows.bin")
    cold.metadata = Metadata(batch=12, steps=[3], policy="aged:300.0")
    cold.seal()
    cold.close()
    return tmp_path / "rows.bin"


def slot(path, at):
    """Prefix fields and JSON of the slot at `at`."""
    with path.open("rb") as file:
        file.seek(at)
        fields = PREFIX.unpack(file.read(PREFIX.size))
        return fields, file.read(fields[5])


def newest(path):
    return max((0, SLOT_BYTES), key=lambda at: slot(path, at)[0][4])


def write_slot(path, at, payload, sequence=None):
    """Writes a slot whose checksum is right."""
    (magic, version, zero, size, old, _, _), _ = slot(path, at)
    fields = (magic, version, zero, size, old if sequence is None else sequence, len(payload))
    crc = zlib.crc32(payload, zlib.crc32(PREFIX.pack(*fields, 0)))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(PREFIX.pack(*fields, crc) + payload)


def assert_refused(path, match=None):
    before = path.read_bytes()
    with pytest.raises(StorageFormatError, match=match):
        open_file(path)
    assert path.read_bytes() == before


def test_header_wrong_in_any_place_is_refused(closed):
    at, whole = newest(closed), closed.read_bytes()
    count, loaded = 0, set()
    for path, new, wrong in wrong_values(json.loads(slot(closed, at)[1])):
        count += 1
        write_slot(closed, at, text_of(wrong).encode())
        before = closed.read_bytes()
        try:
            cold = open_file(closed)
        except StorageFormatError:
            assert closed.read_bytes() == before, (path, new)
        except UncleanFileError:
            assert (path, new) == (("clean",), False)
        else:
            if path == ("filled",):
                assert cold.is_new, "rows of a file that was never filled count for nothing"
            assert path[0] in ("metadata", "pid", "filled", "membership"), (path, new)
            numbers = (cold.metadata.batch, *cold.metadata.steps)
            assert all(type(number) is int and 0 <= number <= 2**62 for number in numbers), (path, new)
            loaded.add(path)
            cold.seal()
            cold.close()
        closed.write_bytes(whole)
    assert count > 500
    assert loaded == {("metadata", name) for name in ("batch", "steps", "policy")} | {
        ("metadata", "steps", 0),
        ("pid",),
        ("filled",),
        ("membership", "generation"),
        ("membership", "left"),
    }


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        (("metadata", "batch"), -1, r"metadata\.batch is -1 and must be an integer from 0"),
        (("metadata", "steps"), [1, True], r"metadata\.steps\[1\] is True"),
        (("metadata", "policy"), "../x", r"metadata\.policy is '\.\./x' and must be a policy's name"),
        (("layout", "width"), "2", r"layout\.width is '2' and must be an integer"),
        (("clean",), 1, "clean is 1 and must be true or false"),
        (("pid",), -3, "pid is -3"),
        (("more",), 0, "has 'more', which this library does not know"),
    ],
)
def test_refusal_names_what_is_wrong_and_what_to_do(closed, path, new, message):
    at = newest(closed)
    write_slot(closed, at, text_of(changed(json.loads(slot(closed, at)[1]), path, new)).encode())
    assert_refused(closed, message)
    assert_refused(closed, r"restore the file, or open it with File\(path, fresh=True\)")
    open_file(closed, fresh=True).close()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "Expecting value"),
        (b"[]", "must be an object"),
        (b"\xff", "utf-8"),
        (b"{", "Expecting property"),
        (b"[" * 10_000 + b"]" * 10_000, "nested more than 100 deep"),
        (b"9" * 5000, "digits"),
        (b'{"clean":true,"clean":true}', "'clean' occurs twice"),
        (b'{"pid":NaN}', "lacks clean, filled, history, identity, layout, membership, metadata"),
    ],
)
def test_header_that_is_no_json_of_ours_is_refused(closed, payload, message):
    write_slot(closed, newest(closed), payload)
    assert_refused(closed, message)


def test_wrong_header_does_not_bring_the_one_before_back(closed):
    at = newest(closed)
    older = SLOT_BYTES - at
    write_slot(closed, at, b"[]")
    assert slot(closed, older)[0][4] > 0  # which is whole
    assert_refused(closed, "must be an object")


def test_wrong_header_that_is_outdated_is_not_looked_at(closed):
    write_slot(closed, SLOT_BYTES - newest(closed), b"[]")
    cold = open_file(closed)
    assert cold.metadata == Metadata(batch=12, steps=[3], policy="aged:300.0")
    cold.seal()
    cold.close()


def test_sequence_number_that_cannot_be_followed_is_refused(closed):
    at = newest(closed)
    for sequence in (2**63, 2**64 - 1):
        write_slot(closed, at, slot(closed, at)[1], sequence)
        assert_refused(closed, "sequence is")


def test_file_shorter_than_a_prefix_is_refused(closed):
    whole = closed.read_bytes()
    for size in range(1, PREFIX.size + 2):
        closed.write_bytes(whole[:size])
        assert_refused(closed)


def test_identity_nested_too_deeply_is_refused_before_a_file_is_made(tmp_path):
    for depth in (100, 10**5):
        nested: list[object] = []
        for _ in range(depth):
            nested = [nested]
        with pytest.raises(ConfigError, match="identity"):
            File(tmp_path / "rows.bin").open(LAYOUT, name="", identity={"nested": nested})
    assert not list(tmp_path.iterdir())
