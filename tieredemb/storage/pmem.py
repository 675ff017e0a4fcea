"""Cold rows in persistent memory, through the C library of memkind. Volatile: they die with the process.

memkind keeps its heap in a file that it unlinks at once, in a directory that should lie on a DAX filesystem
(`mount -o dax`). It takes the blocks with `posix_fallocate` when it allocates, so a full device is an error
here and no signal later. The states come from `memkind_calloc`: fresh blocks read as zeros and are known to
memkind as such, so nothing is touched; the weights of an untouched row are never read, and not initialised.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tieredemb.config import MAX_BYTES, is_whole, parse_bytes, plain
from tieredemb.errors import ConfigError, MissingDependencyError, StorageError, StorageFullError, shown
from tieredemb.storage.base import STATE_DTYPE, ColdRows, RowLayout, Storage

MIN_BYTES = 16 << 20  # MEMKIND_PMEM_MIN_SIZE: memkind refuses a smaller heap
_ALIGN_BYTES = 4096
_LIBRARY = "libmemkind.so.0"


@dataclass(frozen=True)
class Pmem(Storage):
    """Rows live in a memkind heap under `directory`; a checkpoint keeps them.

    `max_bytes`: limit of the heap of each key space, an int or a size such as "64GiB"; 0 means the space of
    the filesystem. memkind rounds an allocation up to its size class, by at most a quarter.

    >>> storage = tieredemb.Pmem("/mnt/pmem", max_bytes="64GiB")
    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, capacity=100, storage=storage)    # doctest: +SKIP
    """

    directory: str | os.PathLike[str]
    max_bytes: int | str = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        given = self.directory
        directory = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
        if not isinstance(directory, str) or not directory or "\0" in directory:
            raise ConfigError(f"directory of Pmem must be a non-empty path, got {given!r}")
        limit = parse_bytes(self.max_bytes) if isinstance(self.max_bytes, str) else plain(self.max_bytes)
        # memkind would take what exceeds 64 bits for its low 64 bits
        if not is_whole(limit) or (limit != 0 and not MIN_BYTES <= limit <= MAX_BYTES):
            raise ConfigError(
                f"max_bytes of Pmem must be 0 (no limit), or at least {MIN_BYTES} (memkind's smallest heap) and at "
                f"most {MAX_BYTES}, got {shown(self.max_bytes)}"
            )
        object.__setattr__(self, "directory", directory)
        object.__setattr__(self, "max_bytes", limit)

    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> PmemRows:
        """Allocates the rows. Raises `MissingDependencyError`, `StorageFullError`, or `StorageError` for a
        directory that is missing or not writable."""
        directory = os.fspath(self.directory)
        if not os.path.isdir(directory):
            raise StorageError(f"directory {directory!r} of Pmem does not exist; create it on a DAX filesystem")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise StorageError(f"directory {directory!r} of Pmem is not writable by this user; change its mode")
        limit = parse_bytes(self.max_bytes) if isinstance(self.max_bytes, str) else self.max_bytes
        return PmemRows(layout, _Heap(directory, limit))


@functools.cache
def _memkind() -> ctypes.CDLL:
    """The C library, with the signatures of the calls made here."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise MissingDependencyError(
            f"Pmem needs {_LIBRARY}, which is not installed; on Debian or Ubuntu: apt-get install libmemkind0"
        ) from error
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.memkind_create_pmem.argtypes = [ctypes.c_char_p, size, ctypes.POINTER(pointer)]
    library.memkind_calloc.argtypes = [pointer, size, size]
    library.memkind_calloc.restype = pointer
    library.memkind_posix_memalign.argtypes = [pointer, ctypes.POINTER(pointer), size, size]
    library.memkind_destroy_kind.argtypes = [pointer]
    library.memkind_error_message.argtypes = [ctypes.c_int, ctypes.c_char_p, size]
    library.memkind_error_message.restype = None
    return library


def _destroy(kind: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child shares the heap's file with its parent and leaves it alone
        _memkind().memkind_destroy_kind(kind)


class _Heap:
    """A memkind kind, destroyed when nothing allocated from it is referenced any more."""

    def __init__(self, directory: str, max_bytes: int) -> None:
        self.directory = directory
        kind = ctypes.c_void_p()
        code = _memkind().memkind_create_pmem(os.fsencode(directory), max_bytes, ctypes.byref(kind))
        if code or kind.value is None:
            text = ctypes.create_string_buffer(128)
            _memkind().memkind_error_message(code, text, len(text))
            raise StorageError(
                f"memkind could not make a heap in {directory!r}: {text.value.decode(errors='replace')} "
                f"(code {code}); check that the filesystem allows files there and is not full"
            )
        self._kind = kind.value
        weakref.finalize(
            self, _destroy, kind.value, os.getpid()
        ).atexit = False  # its file has no name: the exit frees it

    def weights(self, size_bytes: int) -> np.ndarray[Any, Any]:
        """uint8 (size_bytes,), 4096-aligned, with any content."""
        address = ctypes.c_void_p()
        if size_bytes and _memkind().memkind_posix_memalign(
            self._kind, ctypes.byref(address), _ALIGN_BYTES, size_bytes
        ):
            raise self._full(size_bytes)
        return self._array(address.value, size_bytes)

    def zeros(self, size_bytes: int) -> np.ndarray[Any, Any]:
        """uint8 (size_bytes,), 4096-aligned zeros. `memkind_calloc` guarantees them, at an odd address."""
        if not size_bytes:
            return self._array(None, 0)
        address = _memkind().memkind_calloc(self._kind, 1, size_bytes + _ALIGN_BYTES)
        if address is None:
            raise self._full(size_bytes)
        return self._array(-(-address // _ALIGN_BYTES) * _ALIGN_BYTES, size_bytes)

    def _full(self, size_bytes: int) -> StorageFullError:
        disk = os.statvfs(self.directory)
        free = disk.f_bavail * disk.f_frsize
        return StorageFullError(
            f"memkind has no {size_bytes / 2**20:.1f} MiB in {self.directory!r}, whose filesystem has "
            f"{free / 2**20:.1f} MiB free; raise max_bytes, free space, or use File(path). memkind rounds up by at "
            "most a quarter"
        )

    def _array(self, address: int | None, size_bytes: int) -> np.ndarray[Any, Any]:
        if address is None or not size_bytes:
            return np.empty(0, np.uint8)
        return np.asarray(_Block(self, address, size_bytes))


class _Block:
    """What numpy keeps alive below an array: the heap that the memory belongs to."""

    def __init__(self, heap: _Heap, address: int, size_bytes: int) -> None:
        self._heap = heap
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class PmemRows(ColdRows):
    """Rows in a memkind heap. `weight` and `state` are 4096-aligned."""

    kind = "pmem"
    in_memory = False
    volatile = True

    def __init__(self, layout: RowLayout, heap: _Heap) -> None:
        weight = heap.weights(layout.weight_bytes).view(layout.carrier).reshape(layout.rows, layout.columns)
        state = heap.zeros(layout.state_bytes).view(STATE_DTYPE)
        super().__init__(layout, weight, state.reshape(layout.rows, layout.state_width + 1))

    def reset(self) -> None:
        """Zeros the states. They are written, not punched out: the heap's space must stay taken."""
        self.state.fill(0)
        self.metadata = self.metadata.cleared()
