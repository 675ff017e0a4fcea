"""Cold storage: where every row of a key space lives, and the contract of a tier.

A tier is a frozen config (`HostMemory`, `UnifiedMemory`, `File`, `Pmem`) whose `open` returns a `ColdRows`. Rows are
two arrays, so that weights stay aligned: `weight (rows, D)` in the dtype's carrier and `state (rows, S + 1)` in 32-bit
words, of which the last is the row's score. A row whose score is zero was never written: its content is whatever the
table's initialiser generates. A storage moves rows; it knows neither map nor policy.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from tieredemb.config import MAX_BYTES, MAX_ROWS
from tieredemb.errors import ConfigError, shown
from tieredemb.kernels.constants import TOLD_WORDS
from tieredemb.storage.stored_json import fields_of, integer_of, list_of, text_of

if TYPE_CHECKING:
    from tieredemb.storage.movers import Job

# numba has neither half nor bfloat16: such rows travel as the 16-bit integers that carry their bits. The two carriers
# differ, so that a kernel can tell the formats apart by type.
CARRIERS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.uint16),
    torch.bfloat16: np.dtype(np.int16),
}
STATE_DTYPE = np.dtype(np.uint32)
# "", or a word and what tells it apart: "clock", "aged:300.0". Which there are is the cache's to know: it starts the
# scores of another policy anew
_POLICY = re.compile(r"(?:[a-z]+(?::[!-~]{1,64})?)?")
_MOST_COUNTED = 2**62  # batches and steps are counted on from there, in int64


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Shape of a key space. `rows`: rows of all its tables; `width`: D; `state_width`: S, 32-bit words of optimizer
    state a row, without the score."""

    rows: int
    width: int
    dtype: torch.dtype = torch.float32
    state_width: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in CARRIERS:
            raise ConfigError(
                f"dtype {self.dtype} is not supported for rows; use one of {', '.join(map(str, CARRIERS))}"
            )
        if self.rows < 0 or self.width < 0 or self.state_width < 0:
            raise ConfigError(f"a row layout needs sizes of 0 or more, got {self}")
        if self.rows > MAX_ROWS or self.rows * self.row_bytes > MAX_BYTES:
            raise ConfigError(
                f"{self.rows} rows of {self.row_bytes} bytes (weights and state) are too many for one key space, which "
                f"holds at most {MAX_ROWS} rows and {MAX_BYTES} bytes; lower num_embeddings or embedding_dim"
            )

    @property
    def carrier(self) -> np.dtype[Any]:
        return CARRIERS[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.rows * self.width * self.carrier.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of all row states, scores included."""
        return self.rows * (self.state_width + 1) * STATE_DTYPE.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one cold row: weights, state and score."""
        return self.width * self.carrier.itemsize + (self.state_width + 1) * STATE_DTYPE.itemsize


class Storage(abc.ABC):
    """Config of a tier: frozen, picklable, opened once for each key space."""

    @abc.abstractmethod
    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> ColdRows:
        """Opens the rows of one key space.

        `name` tells the key spaces of one collection apart (a collection with widths 32 and 64 opens two) and is ""
        for the only one. `identity` is a JSON-able dict that says what the rows mean (tables, seed, initialisers,
        optimizer); a tier that outlives the process stores it and refuses to reopen under another one.
        """


@dataclass
class Metadata:
    """What a key space has to remember beside its rows: `batch`, the number of the last planned batch (scores are
    relative to it); `steps`, the optimizer's step count for each table; `policy`, the unit of the scores."""

    batch: int = 0
    steps: list[int] = field(default_factory=list)
    policy: str = ""

    def cleared(self) -> Metadata:
        """That of as many tables at the start."""
        return Metadata(steps=[0] * len(self.steps))

    @classmethod
    def from_json(cls, value: Any, name: str) -> Metadata:
        """The metadata that a file says it has at `name`. Raises `ValueError` for what is none."""
        fields = fields_of(value, name, ("batch", "steps", "policy"))
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


class HotArrays(Protocol):
    """What moving rows needs of a hot cache: C slots, the rows in the cold carrier's bits.

    `weight`: carrier (C, D); `state`: uint32 (C, S); `score`: uint32 (C,); `dirty`: bool or uint8 (C,). All of
    them C-contiguous numpy arrays.
    """

    weight: np.ndarray[Any, Any]
    state: np.ndarray[Any, Any]
    score: np.ndarray[Any, Any]
    dirty: np.ndarray[Any, Any]


class Told(NamedTuple):
    """What a GPU is about to tell the host of rows that it misses. `words`, int64 in pinned memory: how many they are,
    two words more, then `number`, which is written last and was never there before; and their keys · `event`: comes
    after that."""

    words: torch.Tensor
    number: int
    event: torch.cuda.Event

    def keys(self, rows: int) -> torch.Tensor:
        """Where up to that many keys will be."""
        return self.words[TOLD_WORDS : TOLD_WORDS + rows]


_ROWS_PER_THREAD = 1024  # fewer are moved sooner than a second thread has started (256-byte rows: 30 microseconds)


class ColdRows(abc.ABC):
    """An open tier. `weight`: carrier (rows, D); `state`: uint32 (rows, S + 1), both readable in place, once what
    `scatter` has begun is over (`finish`).

    The caller serialises calls, passes keys in range, and writes a key only after `reserve(keys)` succeeded. Rows are
    moved between hot arrays of the CPU by `read` and `write`, between buffers of a GPU by `gather` and `scatter`.
    Calls but `scatter` and `gather_when_told` are synchronous.
    """

    kind: str  # the tier's name in reports: "host", "unified", "file", "pmem"
    in_memory: bool  # whether deepcopy and pickling may copy it
    volatile: bool  # whether it dies with the process, so that closing needs no flush
    ended: bool = False  # whether closing has got as far as giving rows up: only `close` may be called
    _is_moving: bool = False  # whether rows may yet be being written, or read
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

    def begin_changes(self) -> None:  # noqa: B027 - memory has nobody to tell
        """To be called before rows are used, here or in a hot cache, other than by the calls below, which do so
        themselves: what outlives the process is known then to be older than what this process has."""

    def copy_range(self, start: int, stop: int, weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Copies the rows start … stop − 1 as they lie here: `weight`, carrier (K, D) or without columns, is filled;
        the states are returned, uint32 (K, S + 1). The tier does not grow by it."""
        self.finish()
        weight[:] = self.weight[start:stop, : weight.shape[1]]
        return self.state[start:stop].copy()

    def kept(self) -> None:  # noqa: B027
        """All rows were saved elsewhere, as they are now."""

    def reserve(self, keys: np.ndarray[Any, Any]) -> None:  # noqa: B027 - memory needs no reservation
        """Makes sure that writing the rows `keys` (int64 (K,), any order, duplicates allowed) cannot fail for want
        of space. Raises `StorageFullError` and leaves every row as it was."""

    def reserve_range(self, start: int, stop: int) -> None:  # noqa: B027
        """`reserve` for the rows start … stop - 1."""

    def read(
        self, keys: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], hot: HotArrays
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Fills the hot slots `slots` (int32 (M,), distinct) with the rows `keys` (int64 (M,)): weights, state
        and score.

        Returns bool (M,): the rows never written. Of those only the score (zero) was moved; the caller
        generates them. May raise `StorageFullError` where a score needs space to come back to.
        """
        from tieredemb.kernels.cpu import even_bounds, parallel_for
        from tieredemb.storage.rows_cpu import rows_read

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
        from tieredemb.kernels.cpu import even_bounds, parallel_for
        from tieredemb.storage.rows_cpu import rows_write

        if len(keys) == 0:
            return
        self.reserve(keys[hot.dirty[slots] != 0])
        cold, home = (self.weight, self.state), (hot.weight, hot.state, hot.score)
        bounds = even_bounds(len(keys), _ROWS_PER_THREAD)
        parallel_for(rows_write, bounds, keys, slots, hot.dirty, *cold, *home)

    def gather(
        self, keys: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, *, begun: Job | None = None
    ) -> None:
        """Fills `weight` (rows' dtype (K, D)) and `state` (int32 (K, S + 1)) with the rows `keys` (int64 (K,)) as they
        lie here; all of them contiguous CPU tensors. Of rows never written, whose score is zero, the weights are left
        as they were. `begun`: what `gather_when_told` has returned for these very rows, of which as many fit. Raises as
        `read` does."""
        from tieredemb.storage.movers import Job, movers

        self._is_moving = True
        if begun is not None:
            movers().finish()
        if begun is None or not begun.done:
            movers().begin(Job(keys, self.weight, self.state, weight, state))
            movers().finish()

    def gather_when_told(self, told: Told, weight: torch.Tensor, state: torch.Tensor) -> Job | None:
        """Begins, beside what follows, to gather the rows that a GPU is about to tell of, as soon as it has told, if
        they all fit into `weight` and `state`; `gather` then waits until they are there. Until it, or `finish`, these
        are not to be used, nor `told.words` changed, nor the rows written. None where it cannot: nothing is begun."""
        from tieredemb.storage.movers import Job, movers

        job = Job(told.keys(len(weight)), self.weight, self.state, weight, state, told=told)
        self._is_moving = True
        return job if movers().begin_when_told(job) else None

    def reserve_dirty(self, keys: torch.Tensor, dirty: torch.Tensor) -> None:
        """`reserve` for those of `keys` (int64 (K,)) whose rows are `dirty` (uint8 (K,)), CPU tensors."""
        # numpy, and not torch: that would wake its own threads for it, which then keep all cores from others
        chosen, moved = keys.numpy(), dirty.numpy()
        self.reserve(chosen if moved.all() else chosen[moved != 0])

    def scatter(self, keys: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, dirty: torch.Tensor) -> None:
        """Begins to write `weight` and `state`, which lie as `gather` gives them, back to the rows `keys` (int64 (K,),
        distinct): where `dirty` (uint8 (K,)) is not zero a whole row, which was reserved, else its score. The next
        `gather` and `scatter`, and `finish`, wait until all is written. The tensors are not to be changed until
        then."""
        from tieredemb.storage.movers import Job, movers

        self._is_moving = True
        movers().begin(Job(keys, self.weight, self.state, weight, state, dirty))

    def finish(self) -> None:
        """Returns once all is written that `scatter` was given, and what `gather_when_told` has begun is over or given
        up; to be called before rows are used but by `gather`."""
        if self._is_moving:
            from tieredemb.storage.movers import movers

            movers().finish()
            self._is_moving = False

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

    @abc.abstractmethod
    def close(self) -> None:
        """Releases the tier, which stays unclean unless it was sealed. A second call does nothing, or goes on with one
        that was interrupted."""

    @abc.abstractmethod
    def size_bytes(self) -> dict[str, int]:
        """Bytes by purpose for `memory_report()`: `{"weight": …, "state": …}`, plus what the tier itself needs."""
