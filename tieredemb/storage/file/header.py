"""The header of a row file: who wrote it, what the rows are, and whether the last owner closed it.

Two slots are written in turn, each with a sequence number and a checksum: a torn write leaves the other one
valid. Layout of a slot: a fixed prefix (`_PREFIX`), then JSON. The prefix never changes, so that every
version of the library can tell that a file is newer than itself. The slot's size is chosen at creation, twice
what the JSON takes.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import Any

from tieredemb.errors import ConfigError, StorageError, StorageFormatError, shown
from tieredemb.kernels.row_format import encodings
from tieredemb.storage.base import Metadata, RowLayout
from tieredemb.storage.file.io import pread_all, pwrite_all
from tieredemb.storage.stored_json import (
    MAX_GIVEN_DEPTH,
    check_depth,
    fields_of,
    integer_of,
    object_of,
    parse,
    text_of,
)
from tieredemb.storage.system import system

MAGIC = b"TIEREMB\x00"
VERSION = 1
REGION_BYTES = 65536  # alignment of the regions: the largest page size that Linux runs with
_PREFIX = struct.Struct("<8sIIQQII")  # magic, version, 0, slot size, sequence, JSON size, CRC of all before and after
_SLOT_BYTES = tuple((REGION_BYTES // 2) << power for power in range(12))


@dataclass(frozen=True)
class Header:
    """What a slot says. `layout` and `identity` are fixed at creation."""

    layout: dict[str, Any]
    identity: dict[str, Any]
    metadata: Metadata
    clean: bool
    pid: int


def plain_metadata(metadata: Metadata) -> Metadata:
    """A copy that JSON can hold: counters may have become numpy integers."""
    steps = [int(step) for step in metadata.steps]
    return Metadata(int(metadata.batch), steps, metadata.policy, metadata.history)


def layout_fields(layout: RowLayout) -> dict[str, Any]:
    """The layout as it is stored and compared."""
    fields = {"rows": layout.rows, "width": layout.width, "state_width": layout.state_width}
    return fields | {"dtype": layout.encoding.name, "byteorder": sys.byteorder}


def layout_of(value: Any, name: str) -> RowLayout:
    """The layout of such fields. Raises `ValueError` for what are none."""
    sizes = ("rows", "width", "state_width")
    fields = fields_of(value, name, (*sizes, "dtype", "byteorder"))
    known = encodings()
    for key, allowed in (("dtype", list(known)), ("byteorder", ["little", "big"])):
        if text_of(fields[key], f"{name}.{key}") not in allowed:
            raise ValueError(f"{name}.{key} is {shown(fields[key])} and must be one of {', '.join(allowed)}")
    rows, width, state_width = (integer_of(fields[key], f"{name}.{key}") for key in sizes)
    return RowLayout(rows=rows, width=width, state_width=state_width, dtype=known[fields["dtype"]])


def jsonable(value: Any, what: str) -> Any:
    """`value` as JSON gives it back (tuples become lists). Raises `ConfigError` for what JSON cannot hold, and for
    what is nested so deeply that it would be refused when it is read."""
    try:
        result = json.loads(json.dumps(value))
        check_depth(result, MAX_GIVEN_DEPTH)
    except RecursionError:
        raise ConfigError(f"{what} is nested more than {MAX_GIVEN_DEPTH} deep; flatten it") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} must hold only what JSON can store: {error}") from error
    return result


def difference(stored: Any, wanted: Any, name: str, *, stored_in: str = "the file") -> str | None:
    """The first field in which two JSON values differ, in words; None when they are equal."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in sorted({*stored, *wanted}):
            if key not in stored:
                return f"this model has {name}.{key}, which {stored_in} lacks"
            if key not in wanted:
                return f"{stored_in} has {name}.{key}, which this model lacks"
            if found := difference(stored[key], wanted[key], f"{name}.{key}", stored_in=stored_in):
                return found
        return None
    if isinstance(stored, list) and isinstance(wanted, list) and len(stored) == len(wanted):
        for i, (one, other) in enumerate(zip(stored, wanted, strict=True)):
            if found := difference(one, other, f"{name}[{i}]", stored_in=stored_in):
                return found
        return None
    if type(stored) is not type(wanted) or stored != wanted:
        return f"{name} is {stored!r} in {stored_in} and {wanted!r} in this model"
    return None


class HeaderSlots:
    """The two slots at the start of the file `fd`. Every write is durable when it returns."""

    def __init__(self, path: str, fd: int, slot_bytes: int, sequence: int) -> None:
        self.path, self._fd, self._sequence = path, fd, sequence
        self.slot_bytes = slot_bytes

    @property
    def region_bytes(self) -> int:
        """Bytes of the header region, a multiple of `REGION_BYTES`."""
        return 2 * self.slot_bytes

    @classmethod
    def create(cls, path: str, fd: int, header: Header) -> HeaderSlots:
        """Claims the empty file `fd`: a prefix of sequence 0 says that its creation has not finished."""
        needed = 2 * (_PREFIX.size + len(_payload(header)))
        slot_bytes = next((size for size in _SLOT_BYTES if size >= needed), None)
        if slot_bytes is None:
            raise StorageError(
                f"the identity of {path!r} takes {needed // 2} bytes; at most {_SLOT_BYTES[-1] // 2} are "
                "supported: split the collection"
            )
        unfinished = _PREFIX.pack(MAGIC, VERSION, 0, slot_bytes, 0, 0, 0)
        pwrite_all(fd, unfinished.ljust(2 * slot_bytes, b"\0"), 0)  # zeros, not a hole: rewriting needs no space
        return cls(path, fd, slot_bytes, 0)

    def write(self, header: Header) -> None:
        """Writes the older slot. Raises `StorageError` when the header has outgrown its slot."""
        payload = _payload(header)
        if _PREFIX.size + len(payload) > self.slot_bytes:
            raise StorageError(
                f"the header of {self.path!r} takes {_PREFIX.size + len(payload)} bytes and has "
                f"{self.slot_bytes}; save a checkpoint and load it into a new file"
            )
        sequence = self._sequence + 1
        fields = (MAGIC, VERSION, 0, self.slot_bytes, sequence, len(payload))
        crc = zlib.crc32(payload, zlib.crc32(_PREFIX.pack(*fields, 0)))
        pwrite_all(self._fd, _PREFIX.pack(*fields, crc) + payload, self.slot_bytes * (sequence % 2))
        system.fsync(self._fd)
        self._sequence = sequence

    @classmethod
    def load(cls, path: str, fd: int) -> tuple[HeaderSlots, Header]:
        """Reads the newest valid slot. Raises `StorageFormatError`: foreign, newer, unfinished or damaged."""
        found = [_read_slot(fd, offset, offset) for offset in _SLOT_BYTES]
        found.append(_read_slot(fd, 0, None))
        valid = list(filter(None, found))
        if not valid:
            raise StorageFormatError(_reason(path, fd))
        sequence, slot_bytes, payload = max(valid, key=lambda slot: slot[0])
        try:
            integer_of(sequence, "sequence", low=1)
            header = _header(parse(payload))
        except ValueError as error:  # whole and wrong: the slot before it would bring an older state back
            raise StorageFormatError(
                f"the header of {path!r} is not one that this library writes: {error}; restore the file, or open it "
                "with File(path, fresh=True) and load a checkpoint"
            ) from error
        return cls(path, fd, slot_bytes, sequence), header


def _payload(header: Header) -> bytes:
    fields = dataclasses.asdict(header) | {"metadata": header.metadata.to_json()}
    return json.dumps(fields, sort_keys=True).encode()


def _header(value: Any) -> Header:
    """The header that a slot says. Raises `ValueError`: nothing in it is used before all of it is known to be right."""
    fields = fields_of(value, "it", ("layout", "identity", "metadata", "clean", "pid"))
    layout_of(fields["layout"], "layout")
    if not isinstance(fields["clean"], bool):
        raise ValueError(f"clean is {shown(fields['clean'])} and must be true or false")
    return Header(
        layout=fields["layout"],
        identity=object_of(fields["identity"], "identity"),
        metadata=Metadata.from_json(fields["metadata"], "metadata"),
        clean=fields["clean"],
        pid=integer_of(fields["pid"], "pid"),
    )


def _read_slot(fd: int, offset: int, slot_bytes: int | None) -> tuple[int, int, bytes] | None:
    """Sequence number, slot size and JSON of the slot at `offset`, which has to say `slot_bytes` (if given), or
    None."""
    prefix = pread_all(fd, _PREFIX.size, offset)
    if len(prefix) < _PREFIX.size:
        return None
    *fields, crc = _PREFIX.unpack(prefix)
    magic, version, _, said_bytes, sequence, payload_bytes = fields
    if magic != MAGIC or version != VERSION or said_bytes not in _SLOT_BYTES:
        return None
    if slot_bytes not in (None, said_bytes) or payload_bytes > said_bytes:
        return None
    payload = pread_all(fd, payload_bytes, offset + _PREFIX.size)
    if sequence == 0 or zlib.crc32(payload, zlib.crc32(_PREFIX.pack(*fields, 0))) != crc:
        return None
    return sequence, said_bytes, payload


def is_own(fd: int) -> bool:
    """Whether the file starts as ours do, whatever state it is in."""
    return pread_all(fd, len(MAGIC), 0) == MAGIC


def is_unfinished(fd: int) -> bool:
    """Whether the creation of the file did not come to its end: its creator died, and no row was ever in it."""
    start = pread_all(fd, _PREFIX.size, 0)
    if len(start) < _PREFIX.size or not start.startswith(MAGIC):
        return False
    _, version, _, slot_bytes, sequence, payload_bytes, _ = _PREFIX.unpack(start)
    if (version, sequence, payload_bytes) != (VERSION, 0, 0) or slot_bytes not in _SLOT_BYTES:
        return False
    return _read_slot(fd, slot_bytes, slot_bytes) is None


def _reason(path: str, fd: int) -> str:
    """Why no slot is valid, and what to do."""
    start = pread_all(fd, 4096, 0)
    if not start.startswith(MAGIC):
        if not any(start):
            return (
                f"{path!r} has no header: it is foreign, or its creation did not finish; "
                "delete it if nothing in it is needed"
            )
        return f"{path!r} is no row file of tieredemb (it starts with {start[:8]!r}); give another path"
    if len(start) >= _PREFIX.size:
        _, version, *_ = _PREFIX.unpack_from(start)
        if version > VERSION:
            return (
                f"{path!r} has format version {version}, this library reads version {VERSION} and older; "
                "upgrade tieredemb"
            )
    return (
        f"both copies of the header of {path!r} are damaged; restore the file, or open it with "
        "File(path, fresh=True) and load a checkpoint"
    )
