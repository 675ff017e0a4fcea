"""One family of errors. Every message says what was given, what is allowed, and what to do.

Each class also derives from the builtin that a caller would expect, so that `except ValueError` goes on working.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

_SHOWN_BITS = 256  # 78 digits; Python refuses to write out integers of more than 4300
_SHOWN_LETTERS = 100
_SHOWN_NAMES = 3


def shown(value: object) -> str:
    """`value` as a message names it: its repr, cut where it is long. Never fails, whatever a caller has passed."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # a huge integer inside of it, nested too deeply, a tensor that torch cannot print
        return f"a {type(value).__name__} that cannot be written out"
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"


def some_of(names: Sequence[str]) -> str:
    """Names as a message lists them: the first few, and how many more there are."""
    rest = len(names) - _SHOWN_NAMES
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + (f" and {rest} more" if rest > 0 else "")


def in_documentation(page: str, section: str) -> str:
    """A place in the documentation, named by titles, as an installed library has no files of it. The message itself
    says what to do; the place only explains more."""
    return f"the page {page!r} of tieredemb's documentation, under {section!r}"


class TieredEmbError(Exception):
    """Base class of all errors that tieredemb raises on purpose.

    >>> try:
    ...     tieredemb.TieredEmbeddingBag(1000, 4, capacity=2.0)
    ... except tieredemb.TieredEmbError as error:
    ...     print(error)
    capacity as a share of the rows must lie in (0, 1], got 2.0; a number of rows is an int
    """


class ConfigError(TieredEmbError, ValueError):
    """A constructor argument or a config value is not allowed."""


class ConfigTypeError(ConfigError, TypeError):
    """A constructor argument is no number, or no integer, where one is needed."""


class UnsupportedError(TieredEmbError, NotImplementedError):
    """Something that `torch` offers and tieredemb refuses, or a device without its kernels."""


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Refusals of a config that are raised inside say which of several things they are about."""
    try:
        yield
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"{what}: {error}") from error


class InvalidInputError(TieredEmbError, ValueError, RuntimeError):
    """A batch is malformed: an offset, a shape, a dtype, a device. Nothing was changed. `torch` raises `ValueError` for
    some of these and `RuntimeError` for others."""


class InputTypeError(InvalidInputError, TypeError):
    """A batch holds something else where a tensor is needed."""


class UnsupportedInputError(InvalidInputError, UnsupportedError):
    """A batch asks for what neither `torch` nor tieredemb has, as `per_sample_weights` with mode "mean"."""


class IdOutOfRangeError(InvalidInputError, IndexError):
    """An id lies outside its table. The batch updated nothing."""


class BackwardError(TieredEmbError, RuntimeError):
    """A backward that cannot be honoured: no optimizer, a second pass through one forward."""


class PeerError(TieredEmbError, RuntimeError):
    """Another rank has failed, or does something else than this one. The message says which."""


class StorageError(TieredEmbError, OSError):
    """A cold storage failed to open, read or write. The cause is chained."""


class StorageFullError(StorageError):
    """No space is left for a row that has to be written; nothing is lost while the process has the rows."""


class StorageFormatError(StorageError):
    """A file is foreign, truncated, damaged, newer than this library, or of another shape."""


class StorageExistsError(StorageError, FileExistsError):
    """Rows that were given would be written over those of a file. The message names the two ways on."""


class StorageLockedError(StorageError):
    """Another process (its pid is in the message) holds the file."""


class UncleanFileError(StorageError):
    """The file was not closed by its last owner, so rows of its hot cache are missing."""


class BrokenCacheError(StorageError):
    """An earlier call was interrupted half-way: some rows may be old and some new. The message says what mends it."""


class CheckpointError(TieredEmbError, OSError):
    """A checkpoint is incomplete, damaged, or of another shape. Nothing was changed."""


class ForkedError(TieredEmbError, RuntimeError):
    """A cache was used in a forked child, where its threads and locks do not exist."""


class MissingDependencyError(TieredEmbError, ImportError):
    """An optional library is absent; the message names the install command."""


class DeviceMemoryError(TieredEmbError, MemoryError):
    """The GPU has not enough memory for a cache. What was allocated is freed; the message says what fits."""
