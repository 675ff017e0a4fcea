"""The histories of one cold storage, and their form in files, checkpoints and state dicts: fields of fixed sizes, whose
number is given by the first of them.

    head: magic, version, N, base, steps, first[0], first[1], zeros up to 64 bytes | windows, float64
    | of each step from `base` to `steps`, array by array: logs float64, sums, rates, numbers float32,
    ends, coupled int32

If tables take separate steps, their histories follow one another. All numbers are little-endian. Sizes that are read
are checked before memory is allocated for them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tieredemb.config import Array
from tieredemb.lookup.history import DenseStep, History
from tieredemb.lookup.history_archive import is_archive, parts_of

MOST_STEPS = 2**32 - 1  # a row notes the step that it stands at in 32 bits
_MAGIC = b"TESTEPS\0"
_VERSION = 1
_HEAD = struct.Struct("<8sIIqqqq16x")
_ARCHIVE_BYTES = 1 << 13  # of an archive of 0.1.0 in addition to its arrays
_BY_STEP = ("logs", "sums", "rates", "numbers", "ends", "coupled")  # fields of 8 bytes first, so that all are aligned


class Stored(Protocol):
    """Bytes in a file or in memory."""

    @property
    def size_bytes(self) -> int:
        """How many."""

    def read(self, start: int, count: int) -> bytes:
        """Those from `start` on. Raises `ValueError` where they are not there."""

    def verify(self) -> None:
        """Raises `ValueError` where any of them is not as it was written."""


class StoredBytes(NamedTuple):
    """Bytes in memory."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, start: int, count: int) -> bytes:
        """See `Stored`."""
        return self.data[start : start + count]

    def verify(self) -> None:
        """See `Stored`."""


class _Head(NamedTuple):
    numbers: int
    base: int
    steps: int
    first: tuple[int, int]

    @property
    def taken(self) -> int:
        """Entries of the arrays by step."""
        return self.steps - self.base + 1


class Histories:
    """The histories of one cold storage: one for all of its tables, if they take the same steps, or one for each.
    `of`: the histories."""

    def __init__(self, of: Sequence[History]) -> None:
        self.of = tuple(of)

    def append(self, tables: Iterable[int], step: DenseStep) -> None:
        """Keeps a step that `tables` take; see `History.append`."""
        alike: dict[int, list[History]] = {}
        for each in self.of if len(self.of) == 1 else [self.of[table] for table in tables]:
            alike.setdefault(id(each.rates), []).append(each)
        for first, *others in alike.values():
            first.append(*step, others=others)

    def shared_by(self, tables: Sequence[int]) -> History | None:
        """That of tables which have taken the same steps, and share its arrays; None of others."""
        first = self.of[tables[0]]
        for table in tables:
            if self.of[table].rates is not first.rates:
                return None
        return first

    def share(self) -> None:
        """Those that have taken the same steps share their arrays from here on."""
        distinct: list[History] = []
        for each in self.of:
            alike = next((other for other in distinct if each.is_as(other)), None)
            if alike is None:
                distinct.append(each)
            elif each.rates is not alike.rates:
                each.share(alike)

    def size_bytes(self) -> int:
        """Those that several share count once."""
        return sum(each.size_bytes() for each in {id(each.rates): each for each in self.of}.values())

    def to_bytes(self) -> bytes:
        """All of them, as a file holds them."""
        parts: list[bytes] = []
        for each in self.of:
            head = _Head(each.count_of_numbers, each.base, each.steps, (each.first[0], each.first[1]))
            parts.append(_HEAD.pack(_MAGIC, _VERSION, head.numbers, head.base, head.steps, *head.first))
            arrays = {name: array[: head.taken] for name, array in each.arrays().items()}
            parts += [_little(each.windows), *(_little(arrays[name]) for name in _BY_STEP)]
        return b"".join(parts)

    def parsed(self, stored: Stored, steps: Sequence[int] | None = None) -> Histories:
        """Histories of this optimizer, equally many, read from `stored`, which `to_bytes` wrote, or an archive of
        0.1.0. `steps`: how many steps each table has taken, if known. Raises `ValueError` if it is invalid."""
        is_old = is_archive(stored.read(0, 4))
        found = _from_archive(self, stored, steps) if is_old else _from_fields(self, stored)
        counted = [each.steps for each in found.of]
        if steps is not None and any(each != counted[min(i, len(counted) - 1)] for i, each in enumerate(steps)):
            raise ValueError(f"it has taken {_listed(counted)} steps, and its tables {_listed(steps)}")
        return found

    def take(self, other: Histories) -> None:
        """Takes over the content of histories of the same optimizer and tables."""
        for each, theirs in zip(self.of, other.of, strict=True):
            each.take(theirs)
        self.share()


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


def _from_fields(like: Histories, stored: Stored) -> Histories:
    heads, starts, start = [], [], 0
    for each in like.of:
        head = _read_head(stored.read(start, _HEAD.size), each)
        heads.append(head)
        starts.append(start + _HEAD.size)
        start = starts[-1] + sum(_size(shape, dtype) for _, shape, dtype in _fields(each, head))
    if start != stored.size_bytes:
        raise ValueError(f"it has {stored.size_bytes} bytes, and histories of such steps {start}")
    stored.verify()
    found = []
    for each, head, start in zip(like.of, heads, starts, strict=True):
        arrays = {}
        for name, shape, dtype in _fields(each, head):
            arrays[name] = np.frombuffer(stored.read(start, _size(shape, dtype)), dtype).reshape(shape)
            start += _size(shape, dtype)
        found.append(_loaded(each, head, arrays))
    return Histories(found)


def _read_head(data: bytes, like: History) -> _Head:
    if len(data) < _HEAD.size:
        raise ValueError("it ends within its first fields")
    magic, version, numbers, base, steps, *first = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise ValueError(f"it starts with {magic!r}, and no history of steps does")
    if version != _VERSION:
        raise ValueError(f"it has version {version}, and this library reads version {_VERSION}; upgrade tieredemb")
    if numbers != like.count_of_numbers:
        raise ValueError(f"it keeps {numbers} numbers a step, and this optimizer {like.count_of_numbers}")
    return _checked(_Head(numbers, base, steps, (first[0], first[1])))


def _checked(head: _Head) -> _Head:
    if not 0 <= head.base <= head.steps <= MOST_STEPS:
        raise ValueError(f"it is of the steps {head.base} … {head.steps}, which have to lie in 0 … {MOST_STEPS}")
    if not all(0 <= each <= head.taken for each in head.first):
        raise ValueError("it names steps that were not taken")
    return head


def _fields(like: History, head: _Head) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Name, shape and dtype of each array, in their order."""
    arrays = like.arrays()
    of = [("windows", like.windows.shape, like.windows)]
    of += [(name, (head.taken, *arrays[name].shape[1:]), arrays[name]) for name in _BY_STEP]
    return [(name, shape, array.dtype.newbyteorder("<")) for name, shape, array in of]


def _size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    size = dtype.itemsize
    for each in shape:  # of Python's integers, which do not overflow
        size *= each
    return size


def _little(array: Array) -> bytes:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _loaded(like: History, head: _Head, arrays: dict[str, Array]) -> History:
    """A history of these arrays. Raises `ValueError` where they name steps that there are not."""
    ends = arrays["ends"]
    if (ends >= head.taken).any() or (ends < -1).any():
        raise ValueError("it names steps that were not taken")
    found = History(like.recipe, like.count_of_numbers)
    windows = arrays.pop("windows")
    found.load(arrays, windows, base=head.base, steps=head.steps, first=head.first)
    return found


# --- archives of 0.1.0 ------------------------------------------------------------------------------------------------


def _from_archive(like: Histories, stored: Stored, steps: Sequence[int] | None) -> Histories:
    if steps is not None:  # all of it is read at once
        most = _Head(0, 0, max(steps), (0, 0))
        fields = sum(_size(shape, dtype) for each in like.of for _, shape, dtype in _fields(each, most))
        if stored.size_bytes > fields + len(like.of) * _ARCHIVE_BYTES:
            raise ValueError(f"it has {stored.size_bytes} bytes, which are too many for {_listed(steps)} steps")
    stored.verify()
    data = stored.read(0, stored.size_bytes)
    if len(like.of) == 1:
        return Histories([_from_one_archive(like.of[0], data)])
    parts = parts_of(data, {str(i): _any_bytes for i in range(len(like.of))})
    return Histories([_from_one_archive(each, parts[str(i)].tobytes()) for i, each in enumerate(like.of)])


def _any_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    return dtype == np.uint8 and len(shape) == 1


def _from_one_archive(like: History, data: bytes) -> History:
    arrays = {**like.arrays(), "windows": like.windows, "counted": np.zeros(4, np.int64)}
    parts = parts_of(data, {name: _such_as(array, name) for name, array in arrays.items()})
    base, steps, *first = parts.pop("counted").tolist()
    head = _checked(_Head(like.count_of_numbers, base, steps, (first[0], first[1])))
    for name in _BY_STEP:
        if len(parts[name]) != head.taken:
            raise ValueError(f"its {name} are of {len(parts[name])} steps, and not of {head.taken}")
    return _loaded(like, head, parts)


def _such_as(array: Array, name: str) -> Callable[[tuple[int, ...], np.dtype[Any]], bool]:
    """Whether an array of a shape and dtype can be taken for `array`, which has more or fewer steps."""
    fixed = name in ("windows", "counted")

    def fits(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        rest = shape == array.shape if fixed else shape[1:] == array.shape[1:] and len(shape) == array.ndim
        return dtype == array.dtype.newbyteorder("<") and rest

    return fits
