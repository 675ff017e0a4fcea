"""A batch of bags on a GPU: ids and offsets are checked there, and the host does not wait.

A fault marks its batch: bad ids read zeros, bad offsets nothing at all, and the batch updates no row. Kernels report
the first fault in a few words of host memory (`FaultReport`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tieredemb.errors import IdOutOfRangeError, InvalidInputError, UnsupportedError
from tieredemb.kernels.arguments import StructValue, struct_type
from tieredemb.kernels.compiler import blocks_for, kernel
from tieredemb.kernels.constants import BAD_ID, FILL_THREADS, IDS_32, KIND_BITS, LAST, MOST_JOINED, OFFSETS_32, SPOILT
from tieredemb.kernels.source import read
from tieredemb.lookup.bags import EqualBags, KeySpace, Places, id_out_of_range, offsets_out_of_order
from tieredemb.lookup.spoilt import why_refused

FILE = "lookup/bags.cu"
THREADS = 256
MOST_BLOCKS = 4224


@functools.cache
def words_of(struct: str) -> int:
    """How many int64 a `Fault` or a `Report` takes."""
    return read(FILE).layout(struct).size // 8


class DeviceKeySpace:
    """The arrays of a `KeySpace` on a device: `column`, `mode`, `padding` and, where tables are shared, the `table` of
    each feature; and those that kernels take as one struct. `resident`: (T,), the slot of the first row of a table that
    is resident, or −1 · `separate`: whether each feature was looked up by itself, so that faults are reported in its
    own terms."""

    def __init__(
        self, space: KeySpace, resident: Sequence[int], device: torch.device, *, separate: bool = False
    ) -> None:
        def upload(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        kernel(FILE, "bags_fill").prepare(device.index)
        self.space = space
        self.device = device
        self.column = upload(space.column)
        self.mode = upload(space.mode)
        self.table = upload(space.table) if space.is_shared else None
        self.padding = upload(space.padding)
        self._first, self._resident = upload(space.first), upload(np.array(resident, np.int64)[space.table])
        self._paddings = {True: self.padding, False: upload(np.full_like(space.padding, -1))}
        self._fields = {
            "features": upload(space.features),
            "first": self._first,
            "size": upload(space.size),
            "resident": self._resident,
            "n_features": len(space.features),
            "separate": separate,
        }
        # requested ones are kept, as captured steps use their memory
        self._features: dict[tuple[bool, Places | None], StructValue] = {}
        for dropped in self._paddings:
            self.features(padding_is_dropped=dropped)

    def ids(self, keys: torch.Tensor, homes: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """The ids of occurrences with a home, int64 (N,), given their keys, homes and features, (N,)."""
        slot = self._resident[feature]
        return torch.where(slot < 0, keys - self._first[feature], homes - slot)

    def features(self, places: Places | None = None, *, padding_is_dropped: bool) -> StructValue:
        """The features as kernels take them; without `padding_is_dropped` none has padding. Synchronises for new
        `places`."""
        key = padding_is_dropped, places
        if key not in self._features:
            blocks: torch.Tensor | int = 0
            if not self.space.is_all(places):
                given = self.space.features if places is None else self.space.blocks(places)
                blocks = torch.from_numpy(given).to(self.device)
            padding = self._paddings[padding_is_dropped]
            self._features[key] = struct_type(FILE, "Space")(blocks=blocks, padding=padding, **self._fields)
        return self._features[key]


@dataclass(frozen=True)
class Edges:
    """Where the bags of all features start and end. `offsets`: int64 (K,) on the device, not yet checked, or bags of
    one length · `count`: F · B + 1, of which the last may be missing and is the number of ids · `exact`: whether the
    last must be that number · `ids`: that number, or while launches are recorded an address that stands for it."""

    offsets: torch.Tensor | EqualBags
    count: int
    exact: bool
    ids: int

    @property
    def arguments(self) -> tuple[torch.Tensor | int, int]:
        """As kernels take them: the offsets and how many are given, or none and the length of every bag."""
        offsets = self.offsets
        return (0, offsets.length) if isinstance(offsets, EqualBags) else (offsets, offsets.shape[0])


@dataclass(frozen=True)
class DeviceBags:
    """The bags of one key space in one batch of B samples. N is the number of ids, or a larger capacity; unused
    occurrences are dropped.

    `keys`: int64 (N,), negative for occurrences without a lookup · `homes`: int32 (N,), −1 for a key, the slot of a
    resident table's row, or `DROPPED` · `offsets`: int64 (F·B + 1,), or (F·(B + 1),) if features `have_ends`: then ids
    that are in no bag may lie between them · `bag`: int32 (N,), of each occurrence · `position`: int64 (N,), of each
    occurrence in the ids, or None if they are the same. Occurrences of other key spaces are dropped, at the end.
    """

    keys: torch.Tensor
    homes: torch.Tensor
    offsets: torch.Tensor
    bag: torch.Tensor
    position: torch.Tensor | None
    batch: int
    have_ends: bool = False


def new_faults(count: int, device: torch.device) -> torch.Tensor:
    """Memory for the `Fault`s of `count` batches, zero without a fault, followed by their `Report`s, which are reported
    to the host later: int64 (11 · `count`,). All must be zero when batches are planned."""
    return torch.empty(count * (words_of("Fault") + words_of("Report")), dtype=torch.int64, device=device)


def report_fault(report: torch.Tensor, address: int) -> None:
    """Reports to the host, by the words at `address`, the fault that `report` holds, if any. Does not synchronise."""
    kernel(FILE, "fault_tell")(1, 32, report, address)


def new_device_bags(n: int, space: DeviceKeySpace, batch: int, *, is_all: bool) -> DeviceBags:
    """Room for the bags of `space` in a batch of `batch` samples with `n` ids, or fewer. `is_all`: whether all
    of them are the space's, in its features' order."""
    device = space.device
    return DeviceBags(
        keys=torch.empty(n, dtype=torch.int64, device=device),
        homes=torch.empty(n, dtype=torch.int32, device=device),
        offsets=torch.empty(len(space.space.features) * batch + 1, dtype=torch.int64, device=device),
        bag=torch.empty(n, dtype=torch.int32, device=device),
        position=None if is_all else torch.empty(n, dtype=torch.int64, device=device),
        batch=batch,
    )


def find_device_bags(
    bags: DeviceBags,
    ids: torch.Tensor,
    edges: Edges,
    space: DeviceKeySpace,
    fault: torch.Tensor,
    report: int,
    places: Places | None = None,
    *,
    padding_is_dropped: bool,
) -> None:
    """Finds the bags of `space` among `ids` (int64, `edges.ids` of them, which fit in `bags`), with features at
    `places`. Does not synchronise, except for new places. Bad ids, and offsets that do not start at 0, fall, or exceed
    the ids, leave a mark in `fault` and are reported to the words at `report`."""
    capacity, batch = bags.homes.shape[0], bags.batch
    offsets, given = edges.arguments
    features = space.features(places, padding_is_dropped=padding_is_dropped)
    check = kernel(FILE, "offsets_check")
    check(
        blocks_for(edges.count, THREADS, MOST_BLOCKS), THREADS, offsets, given, edges.ids, edges.count, edges.exact,
        batch, features, fault, bags.offsets,
    )  # fmt: skip
    fill = kernel(FILE, "bags_fill")
    fill(
        max(1, blocks_for(capacity, FILL_THREADS, MOST_BLOCKS)), FILL_THREADS, ids, offsets, given, edges.ids, capacity,
        bags.offsets, batch, features, bags.keys, bags.homes, bags.bag, 0 if bags.position is None else bags.position,
        edges.count, fault, report,
    )  # fmt: skip


class Joined(NamedTuple):
    """How the inputs of F features that were looked up separately, with `batch` bags each, are joined. For each feature
    `stride`: from an id to the next one, in elements · `start`: of its ids among all · `n_ids`: how many it has ·
    `before`: ids of its pool before its own · `edge`: of its first bag among all edges · `kind`: see `kind_of`."""

    batch: int
    stride: Sequence[int]
    start: Sequence[int]
    n_ids: Sequence[int]
    before: Sequence[int]
    edge: Sequence[int]
    kind: Sequence[int]


def kind_of(ids: torch.dtype, offsets: torch.dtype | None, length: int, *, is_last: bool) -> int:
    """What a kernel needs to know of a feature: the dtypes of its inputs, the `length` of its bags where it has no
    offsets, and whether it is the last one of its pool."""
    is_ids_32, is_offsets_32 = ids is torch.int32, offsets is torch.int32
    return IDS_32 * is_ids_32 | OFFSETS_32 * is_offsets_32 | LAST * is_last | max(0, length) << KIND_BITS


def join_bags(
    ids: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor | None], joined: Joined, count: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The joined ids of features that were looked up separately, int64 (N,), and unless `count` is 0 the edges of their
    bags, pool by pool: int64 (`count`,), F·B and one more for each pool. `ids`: of each feature, int32 or int64, of one
    dimension, or contiguous · `offsets`: int32 or int64 (B,), or None. Faults that `find_device_bags` finds in the
    edges are reported in the feature's own terms. Does not synchronise."""
    device, features = ids[0].device, len(ids)
    all_ids = torch.empty(joined.start[-1] + joined.n_ids[-1], dtype=torch.int64, device=device)
    edges = torch.empty(count, dtype=torch.int64, device=device) if count else None
    join = kernel(FILE, "bags_join")
    where, starts = [each.data_ptr() for each in ids], [0 if each is None else each.data_ptr() for each in offsets]
    for first in range(0, features, MOST_JOINED):
        some = slice(first, first + MOST_JOINED)
        fields = {"ids": where, "offsets": starts} | {
            name: getattr(joined, name) for name in Joined._fields if name != "batch"
        }
        own = {name: [*values[some], *[0] * (MOST_JOINED - len(values[some]))] for name, values in fields.items()}
        of = len(where[some])
        total = joined.start[first + of - 1] + joined.n_ids[first + of - 1] - joined.start[first]
        n = total + of * joined.batch * bool(count)
        join(
            blocks_for(n, THREADS, MOST_BLOCKS), THREADS, struct_type(FILE, "Joined")(**own), of, total, joined.batch,
            all_ids, 0 if edges is None else edges,
        )  # fmt: skip
    return all_ids, edges


def number_samples(bags: DeviceBags, own: torch.Tensor, row: torch.Tensor | int, rows: int) -> None:
    """Writes to `own`, int32 (N,), the bag that each occurrence would have if the sample in `row`, int32 (N,), of
    `rows`, were its own; if `row` is 0, the sample of its number: then `rows` is N. Does not synchronise."""
    n = own.shape[0]
    kernel(FILE, "bags_number")(
        blocks_for(n, THREADS, MOST_BLOCKS), THREADS, bags.bag, n, max(1, bags.batch), row, rows, own
    )


def is_good(report: torch.Tensor) -> torch.Tensor:
    """Whether the words of a `Report`, int64 on their device, report no fault: bool (1,). Does not synchronise."""
    state = _words_of_reports().index("state")
    return report[state : state + 1] == 0


@functools.cache
def _words_of_reports() -> tuple[str, ...]:
    """The names of the words of a `Report`."""
    return tuple(field.name for field in read(FILE).layout("Report").fields)


def _report_of(words: Sequence[int]) -> dict[str, int]:
    """The words of a `Report`, by their names."""
    return dict(zip(_words_of_reports(), words, strict=True))


def fault_in(
    words: Sequence[int], names: Sequence[str], rows: Sequence[int], ending: str = ""
) -> InvalidInputError | IdOutOfRangeError | None:
    """The error that the words of a `Report` stand for, if any. `names`, `rows`: of each feature, as messages name it,
    and of its table · `ending`: what the message ends with."""
    if words[_words_of_reports().index("state")] == 0:  # as in each replay of several ranks
        return None
    report = _report_of(words)
    position, value, feature = report["position"], report["value"], report["feature"]
    if report["kind"] == BAD_ID:
        return IdOutOfRangeError(id_out_of_range(names[feature], rows[feature], value, position) + ending)
    wrong = offsets_out_of_order(position, value, report["before"], report["ids"], report["edges"])
    return InvalidInputError(wrong + ending)


class FaultReport:
    """The first fault that was not raised yet: a `Report` in host memory, which kernels write to. `names`, `rows`: of
    each feature, as messages name it, and of its table · `tables`: the name of each table."""

    def __init__(self, names: Sequence[str], rows: Sequence[int], tables: Sequence[str]) -> None:
        self._names = names
        self._rows = rows
        self._tables = tables
        fields = [field.name for field in read(FILE).layout("Report").fields]
        self._state = fields.index("state")  # not 0 once the other words are written
        self._words = torch.zeros(words_of("Report"), dtype=torch.int64, device="cpu", pin_memory=True)
        self._seen = self._words.numpy().data  # numbers of Python: before each forward one is read
        self.address = self._words.data_ptr()

    def check(self, ending: str = "") -> None:
        """Raises `IdOutOfRangeError` or `InvalidInputError` for a fault that the device has reported by now, once, or
        `UnsupportedError` for a step. `ending`: what the message ends with."""
        if self._seen[self._state] == 0:
            return
        words = [*self._seen]
        self._seen[self._state] = 0
        report = _report_of(words)
        if report["kind"] == SPOILT:
            raise UnsupportedError(
                why_refused(self._tables[report["feature"]], is_dense=bool(report["value"])) + ending
            )
        error = fault_in(words, self._names, self._rows, ending)
        if error is not None:
            raise error
