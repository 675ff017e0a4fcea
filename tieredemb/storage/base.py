"""Cold storage: where every row of a key space lives, and the contract of a tier.

A tier is a frozen config (`HostMemory`, `UnifiedMemory`, `File`, `Pmem`) whose `open` returns a `ColdRows`. Rows are
two arrays, so that weights stay aligned: `weight (rows, D)` in the dtype's carrier and `state (rows, S + 1)` in 32-bit
words, the last of which is the row's score. A row whose score is zero was never written: its content is what the
table's initialiser generates. A storage has rows and knows no map, no policy and no threads: a caller that copies rows
beside other work follows the contract of `ColdRows`.
"""

from __future__ import annotations

import abc
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tieredemb.config import MAX_BYTES, MAX_ROWS
from tieredemb.errors import ConfigError, shown
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.kernels.row_format import CARRIERS as CARRIERS
from tieredemb.kernels.row_format import STATE_DTYPE as STATE_DTYPE
from tieredemb.kernels.row_format import RowFormat
from tieredemb.storage.range_copies import begin_rows, copy_rows
from tieredemb.storage.stored_json import fields_of, integer_of, list_of, text_of

# "", or a word with parameters: "clock", "aged:300.0". Only the cache knows which exist: it resets the scores of
# another policy
_POLICY = re.compile(r"(?:[a-z]+(?::[!-~]{1,64})?)?")
_MOST_COUNTED = 2**62  # batches and steps are counted on from there, in int64


@dataclass(frozen=True, kw_only=True)
class RowLayout(RowFormat):
    """Shape of a key space: `rows`, those of all its tables, of one format."""

    rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < 0:
            raise ConfigError(f"a row layout needs sizes of 0 or more, got {self}")
        if self.rows > MAX_ROWS or self.rows * self.row_bytes > MAX_BYTES:
            raise ConfigError(
                f"{self.rows} rows of {self.row_bytes} bytes (weights and state) are too many for one key space, which "
                f"holds at most {MAX_ROWS} rows and {MAX_BYTES} bytes; lower num_embeddings or embedding_dim"
            )

    @property
    def format(self) -> RowFormat:
        """That of a row, however many there are."""
        return RowFormat(width=self.width, dtype=self.dtype, state_width=self.state_width)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.rows * self.columns * self.carrier.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of all row states, scores included."""
        return self.rows * (self.state_width + 1) * STATE_DTYPE.itemsize


Gather = Callable[[Any], list[Any]]
"""Returns the values that all processes which open storage with this one have passed, in their order."""


def alone(own: Any) -> list[Any]:
    """The `Gather` of a process that opens storage by itself."""
    return [own]


class RowOpener(Protocol):
    """Opens key spaces, once each."""

    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> ColdRows:
        """See `Storage.open`."""


class Storage(abc.ABC):
    """Config of a tier: frozen, picklable, opened once for each key space."""

    @contextlib.contextmanager
    def opening(
        self, names: Sequence[str], *, given: str = "", fills: bool = False, gather: Gather = alone
    ) -> Iterator[RowOpener]:
        """Opens the key spaces `names` of one module or conversion inside the context: all key spaces of such a tier at
        that place are checked as one before any is changed.

        `given`: what would overwrite their rows, in words for a message, "" if nothing would: a tier with rows then
        refuses · `fills`: whether the caller writes all rows of new key spaces, and calls `filled()` on each before it
        uses them: an unfilled one is made anew the next time · `gather`: exchanges the findings of processes that open
        key spaces at the same time. Raises `StorageError`.
        """
        gather(None)
        yield self

    @abc.abstractmethod
    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> ColdRows:
        """Opens the rows of one key space.

        `name` distinguishes the key spaces of one collection (a collection with widths 32 and 64 opens two) and is ""
        for a single one. `identity` is a JSON-able dict of the rows' meaning (tables, seed, initialisers, optimizer);
        a tier that outlives the process stores it and refuses to reopen with another one.
        """


@dataclass
class Metadata:
    """Metadata of a key space: `batch`, the time that scores are relative to, which is the number of batches that have
    aged them; `steps`, the optimizer's step count for each table; `policy`, the unit of the scores."""

    batch: int = 0
    steps: list[int] = field(default_factory=list)
    policy: str = ""

    def cleared(self) -> Metadata:
        """That of as many tables at the start."""
        return Metadata(steps=[0] * len(self.steps))

    @classmethod
    def from_json(cls, value: Any, name: str) -> Metadata:
        """The metadata in a file's field `name`. Raises `ValueError` if it is invalid."""
        # 0.1.0 wrote here the checksum of a history in a file of its own
        fields = fields_of(value, name, ("batch", "steps", "policy"), optional=("history",))
        policy = text_of(fields["policy"], f"{name}.policy")
        if not _POLICY.fullmatch(policy):
            raise ValueError(f"{name}.policy is {shown(policy)} and must be a policy's name, such as 'aged:300.0'")
        return cls(
            batch=integer_of(fields["batch"], f"{name}.batch", high=_MOST_COUNTED),
            steps=[
                integer_of(step, f"{name}.steps[{i}]", high=_MOST_COUNTED)
                for i, step in enumerate(list_of(fields["steps"], f"{name}.steps"))
            ],
            policy=policy,
        )

    def to_json(self) -> dict[str, Any]:
        """As a field of a file."""
        return {"batch": int(self.batch), "steps": [int(step) for step in self.steps], "policy": self.policy}


class RowSet(NamedTuple):
    """Files that were opened as one: their identity, 32 hexadecimal digits, how many sessions have used their rows,
    and the paths of those that this process has open."""

    identity: str
    generation: int
    files: list[str]


class HotArrays(Protocol):
    """What moving rows needs of a hot cache: C slots, the rows in the cold carrier's bits.

    `weight`: carrier (C, D); `state`: uint32 (C, S); `score`: uint32 (C,); `dirty`: bool or uint8 (C,). All of
    them C-contiguous numpy arrays.
    """

    weight: np.ndarray[Any, Any]
    state: np.ndarray[Any, Any]
    score: np.ndarray[Any, Any]
    dirty: np.ndarray[Any, Any]


_ROWS_PER_THREAD = 256  # fewer, of some 256 bytes, one thread moves as fast as two


class ColdRows(abc.ABC):
    """An open tier. `weight`: carrier (rows, D); `state`: uint32 (rows, S + 1), both readable and writable in place.

    The caller serialises calls and passes keys in range. `read` and `write` move rows between the arrays and the hot
    arrays of a CPU. A caller that copies rows itself does what they do first: `reserve_scores` before it reads rows,
    and `reserve` before it writes them. Copies that it lets run beside other work have to be over before it calls
    `read`, `write`, `copy_range`, `put_range`, `reset`, `flush`, `seal` or `close`. All calls are synchronous.
    """

    kind: str  # the tier's name in reports: "host", "unified", "file", "pmem"
    in_memory: bool  # whether deepcopy and pickling may copy it
    as_fast_as_slots: bool = False  # whether a CPU reads a row here as fast as in a slot of its cache
    volatile: bool  # whether it dies with the process, so that closing needs no flush
    is_new: bool = True  # whether it was made now, and holds no row of an earlier owner
    released: bool = False  # whether `close` has begun to give the rows up: nothing but `close` may be called then
    history: Any = None  # what an optimizer that moves every row keeps of its steps: `lookup.history.Histories`
    saved_history: Any = None  # the history when the storage was closed, as `lookup.histories.Stored`
    was_recovered: bool = False  # whether its last owner did not close it
    device_readable: bool = False  # whether GPU kernels read and write `weight` and `state` at the arrays' addresses

    def __init__(self, layout: RowLayout, weight: np.ndarray[Any, Any], state: np.ndarray[Any, Any]) -> None:
        self.layout = layout
        self.weight = weight
        self.state = state
        self.metadata = Metadata()

    def attach(self, device: torch.device) -> None:  # noqa: B027 - other tiers are staged
        """Makes the rows readable in place by kernels on `device`, where the tier can: then `device_readable` is true
        afterwards. A cache on a CUDA device calls it once, before its first plan; a second call does nothing. The
        rows keep their content and their addresses. May synchronise. Raises `StorageError` where it should work and
        does not."""

    def wait_until_committed(self) -> None:  # noqa: B027 - others commit memory as it is used, or at once
        """Waits until no use of the rows commits memory any more, where the tier does that behind its opening."""

    def begin_changes(self) -> None:  # noqa: B027 - memory has no mark
        """To be called before rows are used, here or in a hot cache, other than by the calls below, which do so
        themselves: what outlives the process is known then to be older than what this process has."""

    def filled(self) -> None:  # noqa: B027 - memory is never found half filled
        """All rows that the owner begins with were written; see `Storage.opening`. Durable when it returns."""

    @property
    def row_set(self) -> RowSet | None:
        """The files that the rows are in; None where they end with the process."""
        return None

    def copy_range(
        self, start: int, stop: int, weight: np.ndarray[Any, Any], state: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Copies the rows start … stop − 1 of this tier to `weight`, carrier (K, D), and `state`, uint32 (K, S), either
        of which may have fewer columns; returns the scores, uint32 (K,). The tier does not grow."""
        copy_rows(self.weight[start:stop, : weight.shape[1]], weight)
        copy_rows(self.state[start:stop, : state.shape[1]], state)
        return self.state[start:stop, -1].copy()

    def put_range(
        self,
        start: int,
        weight: np.ndarray[Any, Any] | None,
        state: np.ndarray[Any, Any] | None,
        begun: np.ndarray[Any, Any],
    ) -> None:
        """Overwrites weights, carrier (K, D), or states, uint32 (K, S), of the rows from `start` on, whose space was
        reserved. Rows that were never written get the state `begun`, uint32 (S,), and the lowest score."""
        rows = slice(start, start + len(weight if weight is not None else state if state is not None else ()))
        begin_rows(self.state[rows], begun, MIN_SCORE)
        if weight is not None:
            copy_rows(weight, self.weight[rows])
        if state is not None:
            copy_rows(state, self.state[rows, :-1])

    def kept(self) -> None:  # noqa: B027
        """All rows were saved elsewhere, as they are now."""

    def reserve(self, keys: np.ndarray[Any, Any]) -> None:  # noqa: B027 - memory needs no reservation
        """Makes sure that writing the rows `keys` (int64 (K,), any order, duplicates allowed) cannot fail for want
        of space; without keys, that scores alone may be written. Raises `StorageFullError` and leaves every row as it
        was."""

    def reserve_range(self, start: int, stop: int) -> None:  # noqa: B027
        """`reserve` for the rows start … stop - 1."""

    def reserve_scores(self, keys: np.ndarray[Any, Any]) -> None:  # noqa: B027
        """Called before the rows `keys` (int64 (K,)) are read: makes sure that their scores can be written back, even
        of rows that stay clean. Raises `StorageFullError`, with every row unchanged."""

    @property
    def has_all_scores_reserved(self) -> bool:
        """Whether `reserve_scores` has nothing left to do for any row: rows may be read whose keys are not known
        yet."""
        return True

    @property
    def has_all_reserved(self) -> bool:
        """Whether `reserve` takes no space any more for any row."""
        return True

    def read(
        self, keys: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], hot: HotArrays
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Fills the hot slots `slots` (int32 (M,), distinct) with the rows `keys` (int64 (M,)): weights, state
        and score.

        Returns bool (M,): the rows never written. Of those only the score (zero) was moved; the caller
        generates them. May raise `StorageFullError` if a score needs space to be written back.
        """
        from tieredemb.kernels.parallel_cpu import even_bounds, parallel_for
        from tieredemb.storage.rows_cpu import rows_read

        self.reserve_scores(keys)
        untouched = np.empty(len(keys), np.bool_)
        cold, home = (self.weight, self.state), (hot.weight, hot.state, hot.score)
        parallel_for(rows_read, even_bounds(len(keys), _ROWS_PER_THREAD), keys, slots, *cold, *home, untouched)
        return untouched

    def write(self, keys: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], hot: HotArrays) -> None:
        """Writes the hot slots `slots` (int32 (M,)) back to the rows `keys` (int64 (M,), distinct).

        A dirty row moves whole, of a clean one only the score. Reserves first: raises `StorageFullError` with
        every cold row as it was. `hot.dirty` is left to the caller; until this returns the slots are the rows'
        home.
        """
        from tieredemb.kernels.parallel_cpu import even_bounds, parallel_for
        from tieredemb.storage.rows_cpu import rows_write

        if len(keys) == 0:
            return
        self.reserve(keys[hot.dirty[slots] != 0])
        cold, home = (self.weight, self.state), (hot.weight, hot.state, hot.score)
        bounds = even_bounds(len(keys), _ROWS_PER_THREAD)
        parallel_for(rows_write, bounds, keys, slots, hot.dirty, *cold, *home)

    def used_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges (start, stop) of rows outside which no row was ever written."""
        if self.layout.rows:
            yield 0, self.layout.rows

    @abc.abstractmethod
    def reset(self) -> None:
        """Makes every row untouched again (all-zero state) and clears the metadata (`Metadata.cleared`)."""

    def flush(self) -> None:  # noqa: B027 - memory has nothing behind it
        """Makes rows and metadata durable where the tier outlives the process."""

    def seal(self) -> None:  # noqa: B027
        """`flush`, and marks the tier clean, until rows are used again."""

    def close(self) -> None:
        """Releases the tier, which stays unclean unless it was sealed. A second call does nothing, or completes an
        interrupted one. Memory is freed once the arrays are no longer referenced."""
        self.released = True
        self.weight, self.state = self.weight[:0].copy(), self.state[:0].copy()

    def size_bytes(self) -> dict[str, int]:
        """Bytes by purpose for `memory_report()`: `{"weight": …, "state": …}`, plus what the tier itself needs."""
        return {"weight": self.weight.nbytes, "state": self.state.nbytes}
