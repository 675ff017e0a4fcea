"""The header of a row file is in two slots, which are written alternately.

Each has a sequence number and a checksum: a torn write leaves the other one valid. Layout of a slot: a fixed prefix
(`_PREFIX`), then JSON. The prefix never changes, so that every version of the library recognises a newer file. The
slot's size is chosen at creation, twice the size of the JSON.
"""

from __future__ import annotations

import struct
import zlib

from tieredemb.errors import StorageError, StorageFormatError
from tieredemb.storage.file.header import Header
from tieredemb.storage.file.io import pread_all, pwrite_all
from tieredemb.storage.stored_json import integer_of, parse
from tieredemb.storage.system import system

MAGIC = b"TIEREMB\x00"
VERSION = 2  # 1: without a set, and with the history of steps in a separate file
REGION_BYTES = 65536  # alignment of the regions: the largest page size that Linux runs with
_PREFIX = struct.Struct("<8sIIQQII")  # magic, version, 0, slot size, sequence, JSON size, CRC of all before and after
_SLOT_BYTES = tuple((REGION_BYTES // 2) << power for power in range(12))


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
        """Claims the empty file `fd`: a prefix of sequence 0 means that its creation has not finished."""
        needed = 2 * (_PREFIX.size + len(header.to_json()))
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
        payload = header.to_json()
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
        version, sequence, slot_bytes, payload = max(valid, key=lambda slot: slot[1])
        try:
            integer_of(sequence, "sequence", low=1)
            header = Header.from_json(parse(payload), version)
        except ValueError as error:  # complete and wrong: the other slot would restore an older state
            raise StorageFormatError(
                f"the header of {path!r} is not one that this library writes: {error}; restore the file, or open it "
                "with File(path, fresh=True) and load a checkpoint"
            ) from error
        return cls(path, fd, slot_bytes, sequence), header


def _read_slot(fd: int, offset: int, slot_bytes: int | None) -> tuple[int, int, int, bytes] | None:
    """Version, sequence number, slot size and JSON of the slot at `offset`, which must have `slot_bytes` (if given), or
    None."""
    prefix = pread_all(fd, _PREFIX.size, offset)
    if len(prefix) < _PREFIX.size:
        return None
    *fields, crc = _PREFIX.unpack(prefix)
    magic, version, _, size_bytes, sequence, payload_bytes = fields
    if magic != MAGIC or not 1 <= version <= VERSION or size_bytes not in _SLOT_BYTES:
        return None
    if slot_bytes not in (None, size_bytes) or payload_bytes > size_bytes:
        return None
    payload = pread_all(fd, payload_bytes, offset + _PREFIX.size)
    if sequence == 0 or zlib.crc32(payload, zlib.crc32(_PREFIX.pack(*fields, 0))) != crc:
        return None
    return version, sequence, size_bytes, payload


def is_own(fd: int) -> bool:
    """Whether the file starts as ours do, whatever state it is in."""
    return pread_all(fd, len(MAGIC), 0) == MAGIC


def is_unfinished(fd: int) -> bool:
    """Whether the creation of the file was not finished: its creator died, and it never had a row."""
    start = pread_all(fd, _PREFIX.size, 0)
    if len(start) < _PREFIX.size or not start.startswith(MAGIC):
        return False
    _, version, _, slot_bytes, sequence, payload_bytes, _ = _PREFIX.unpack(start)
    if not 1 <= version <= VERSION or (sequence, payload_bytes) != (0, 0) or slot_bytes not in _SLOT_BYTES:
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
