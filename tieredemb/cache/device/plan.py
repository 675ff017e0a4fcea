"""The launches of a plan on a GPU, in their order. Nothing here waits for the device.

`Clock`, `Counts` and `Selection` of the kernels are in one small tensor; totals are read from it in one copy.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.policy import Scoring
from tieredemb.errors import StorageError
from tieredemb.kernels.arguments import StructValue, struct_type
from tieredemb.kernels.compiler import OPTIONS, blocks_for, cooperative_kernel, kernel, meeting_blocks
from tieredemb.kernels.constants import MEETING_THREADS
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.source import read
from tieredemb.kernels.streams import current_stream
from tieredemb.shallow import shallow_copy

if TYPE_CHECKING:
    from tieredemb.cache.device.staging import HostPhase
    from tieredemb.cache.device.stream_order import ResumePoint

PLAN, POLICY = "cache/plan.cu", "cache/policy.cu"
THREADS = 256
MOST_BLOCKS = 1056  # eight a multiprocessor of an H200: loops stride over the rest


class FieldOffsets(NamedTuple):
    """Where the host finds the kernels' counters: byte offsets in the control tensor, of `Clock`, `Counts` and
    `Selection`, each at a multiple of 32, and of their fields. `client_bytes`, `claim_bytes`, `moving_bytes`: sizes of
    `Client`, `Claim` and `Moving`, and in the latter the words `to_move` (its rows), `untouched`, `published`, `over` ·
    `last_batch`, `taken`: words of a `Record` and of the `RecordsEnd`.
    """

    clock: int
    counts: int
    selection: int
    end: int
    batch: int
    time: int
    missed: int
    needed: int
    used: int
    into_unused: int
    arrivals: int
    totals: int
    clients: int
    moved: int
    total_names: tuple[str, ...]
    client_bytes: int
    claim_bytes: int
    moving_bytes: int
    to_move: int
    untouched: int
    published: int
    over: int
    last_batch: int
    taken: int


@functools.cache
def field_offsets() -> FieldOffsets:
    """The offsets, read from the kernels' source."""
    source = read(PLAN)
    sizes = [-(-source.layout(name).size // 32) * 32 for name in ("Clock", "Counts")]
    clock, counts, selection = itertools.accumulate(sizes, initial=0)
    names = ("missed", "needed", "used", "into_unused", "arrivals", "totals", "clients")
    in_counts = {name: counts + source.layout("Counts")[name].offset for name in names}
    return FieldOffsets(
        clock=clock,
        counts=counts,
        selection=selection,
        end=selection + source.layout("Selection").size,
        batch=clock + source.layout("Clock")["batch"].offset,
        time=clock + source.layout("Clock")["time"].offset,
        **in_counts,
        moved=in_counts["totals"] + source.layout("Totals")["moved"].offset,
        total_names=tuple(total.name for total in source.leaves("Totals")),
        client_bytes=source.layout("Client").size,
        claim_bytes=source.layout("Claim").size,
        moving_bytes=source.layout("Moving").size,
        to_move=source.layout("Moving")["missed"].offset // 4,
        **{name: source.layout("Moving")[name].offset // 4 for name in ("untouched", "published", "over")},
        last_batch=source.layout("Record")["last_batch"].offset // 4,
        taken=source.layout("RecordsEnd")["taken"].offset // 4,
    )


Beside = Callable[[], object]  # launches, on the current stream, work that needs homes, but no rows
PlanOf = int | torch.Tensor | None  # whose plan it is: one client; int32 (K,) numbers on the device; or None


@dataclass(frozen=True)
class OverflowRows:
    """Where a batch uses rows without a slot. `uncached`: whether it may have such rows · `weight`, `state`: addresses
    of the rows; a state ends with the score · `records`: int64 (R, 2), `Record`s with the rows' keys, or None if record
    r has row r · `names`: those `Record`s in any case, if there are any."""

    uncached: bool
    weight: int
    state: int
    records: torch.Tensor | None
    names: torch.Tensor | None = None

    @property
    def by_key(self) -> bool:
        """Whether a row is found by its key; else by its record."""
        return self.records is not None

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of kernels that look there."""
        return ("-DUNCACHED",) if self.uncached else ()


NO_OVERFLOW = OverflowRows(uncached=False, weight=0, state=0, records=None)


class Missed:
    """The rows that a plan of n ids has to move, in one allocation; addresses of its parts.

    `keys`: int64 (n,) · `slots`: int32 (n,), the destination of each: a slot, −1 while it has none, or the home −2 − r
    of a record · `victims`: int64 (n,), the key that leaves the slot, or −1, and `scores`: uint32 (n,), its score ·
    `untouched`: uint8 (n,), whether the row has to be generated · `chosen`: int32 (n,), the slots that victims leave ·
    `claims`: cells that make each missed key count once · `moving`: a `Moving`, and in it `count`: how many of the n
    positions are used, and `n_untouched`: how many of these are untouched. Only the device knows the contents.
    """

    def __init__(self, n: int, device: torch.device) -> None:
        self.n = n
        self.cells = 2
        while self.cells < 2 * n:
            self.cells *= 2
        padded, at = n + n % 2, field_offsets()  # so that the next array is aligned to 8 bytes
        first = at.claim_bytes * self.cells, at.moving_bytes
        self.cleared = sum(first) // at.claim_bytes  # units that are zeroed at the beginning of a plan
        sizes = (*first, 8 * padded, 8 * padded, 4 * padded, 4 * padded, 4 * padded, padded)
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        starts = itertools.accumulate(sizes[:-1], initial=self._memory.data_ptr())
        self.claims, self.moving, self.keys, self.victims, self.slots, self.chosen, self.scores, self.untouched = starts
        self.count, self.n_untouched = self.moving + 4 * at.to_move, self.moving + 4 * at.untouched

    @property
    def size_bytes(self) -> int:
        return self._memory.nbytes

    def record_stream(self) -> None:
        """As `Tensor.record_stream`, for the current stream."""
        self._memory.record_stream(current_stream())

    @property
    def in_all(self) -> int:
        """How many rows have to move. Synchronises."""
        return int(self._words()[field_offsets().to_move].item())

    @property
    def is_over(self) -> bool:
        """Whether all rows have moved. Synchronises."""
        return bool(self._words()[field_offsets().over].item())

    def have_moved(self) -> None:
        """Marks it as without a plan: nothing has to move."""
        words, at = self._words(), field_offsets()
        words.zero_()
        words[at.published] = words[at.over] = 1

    def _words(self) -> torch.Tensor:
        """The words of its `Moving`, int32."""
        return self.view("moving", field_offsets().moving_bytes // 4)

    def view(self, name: str, count: int) -> torch.Tensor:
        """The first `count` elements of a part as a tensor."""
        dtype = torch.int64 if name in ("keys", "victims") else torch.int32
        start = getattr(self, name) - self._memory.data_ptr()
        return self._memory[start : start + count * dtype.itemsize].view(dtype)


class Phase(enum.IntEnum):
    """The last phase of a plan that was launched. `FOUND`: hits have their homes, misses are known · `PLACED`: misses
    have slots, which are not filled yet · `PUBLISHED`: the map and `homes` name the slots · `MOVED`: the slots are
    filled."""

    FOUND = 0
    PLACED = 1
    PUBLISHED = 2
    MOVED = 3


@dataclass(eq=False)
class BatchPlan:
    """A batch whose rows were found, in the phases of a transfer. `homes`: int32 (N,), to be completed · `missed`: the
    missed rows · `uncached`: whether rows may get no slot · `kind`: how it is planned · `beside`: called once `homes`
    are complete, on a stream that need not wait for the rows · `lag`: how many earlier batches lock their rows.

    `is_deferred`: whether its rows are filled later, perhaps while the next plan is made · `phase`: the last one that
    was launched · `side_done`: the event after `beside`, if a stream has yet to wait for it · `resume_point`: the
    stream that fills its rows; None if these are deferred, and filled on the stream of the next caller · `host`: over a
    staged tier, the work of the host between `start` and `move` · `moving`: how many caches move rows at the same time,
    this one included."""

    homes: torch.Tensor
    missed: Missed
    uncached: bool
    kind: PlanKind
    beside: Beside | None
    lag: int = 0
    is_deferred: bool = False
    phase: Phase = Phase.FOUND
    side_done: torch.cuda.Event | None = None
    resume_point: ResumePoint | None = None
    host: HostPhase | None = None
    moving: int = 1

    @property
    def left_at(self) -> Phase:
        """The phase after which deferred rows wait. Slots change hands at once, unless rows may get none: then the
        cache may be too small for three batches, and victims are chosen as late as possible, when fewer rows are
        locked; no slot changes hands before."""
        return Phase.FOUND if self.uncached else Phase.PUBLISHED

    @property
    def changing(self) -> Sequence[torch.Tensor]:
        """If it is recorded: the words that change from replay to replay."""
        return () if self.host is None else self.host.words

    def rebind(self) -> BatchPlan:
        """The plan that a replay makes in this one's memory."""
        plan = shallow_copy(self)
        plan.phase, plan.side_done = self.left_at if self.is_deferred else Phase.FOUND, None
        return plan

    def size_bytes(self) -> int:
        """Of the memory that it keeps for replays."""
        return self.missed.size_bytes + (0 if self.host is None else self.host.reports.size_bytes())


class Records:
    """Rows that batches in flight use without a slot. `table`: int64 (R + 1, 2), R `Record`s and a `RecordsEnd` ·
    `rows`: R · `index`: int64 (2 R, 2), a map from their keys, for the current plan · `whole`: all of it, for
    kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = 0
        self.table = torch.zeros((1, 2), dtype=torch.int64, device=device)
        self.index = torch.zeros((0, 2), dtype=torch.int64, device=device)
        self._outgrown: list[torch.Tensor] = []
        self.whole = _records_value(self.table, self.index)

    def reserve(self, rows: int) -> None:
        """Enlarges the table to `rows` rows at a time. Records in use keep their numbers. Raises `StorageError` in a
        capture, as replays would overwrite the new memory."""
        size = max(64, 1 << (2 * rows - 1).bit_length())
        if size > self.rows:
            if torch.cuda.is_current_stream_capturing():
                raise StorageError(
                    f"the step to be captured may use {rows} rows without a slot, for which there is no room yet; run "
                    f"it once before it is captured"
                )
            with no_inference():  # they are changed in place outside of inference mode
                grown = torch.zeros((size + 1, 2), dtype=torch.int64, device=self.device)
                index = torch.zeros((2 * size, 2), dtype=torch.int64, device=self.device)
            grown[: self.rows] = self.table[: self.rows]
            grown[size] = self.table[self.rows]
            self._outgrown += [self.table, self.index]  # tickets in flight and captured graphs still read them
            whole = _records_value(grown, index)
            self.table, self.index, self.rows, self.whole = grown, index, size, whole  # in one line, for interrupts

    def free(self, records: torch.Tensor) -> None:
        """Frees `records` (int64 (K,), distinct) that no batch in flight uses, and whose rows are written back."""
        self.table[records, 0] = 0
        self.table.view(torch.int32)[self.rows, field_offsets().taken] -= len(records)

    def clear(self) -> None:
        """Frees all records."""
        for tensor in (self.table, self.index, *self._outgrown):
            tensor.zero_()

    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.table, self.index, *self._outgrown))


def _records_value(table: torch.Tensor, index: torch.Tensor) -> StructValue:
    """Records as kernels take them."""
    return struct_type(PLAN, "Records")(records=table, n_records=len(table) - 1, map=index, n_map=len(index))


class DevicePlan:
    """The state of a cache's plans, and their kernels. `scoring`: of the policy · `clients`: the first key of each, and
    the key after the last; empty without clients · `flags`: of kernels that count."""

    def __init__(
        self, rows: DeviceHotRows, scoring: Scoring, device: torch.device, clients: Sequence[int] = ()
    ) -> None:
        self.rows = rows
        self.scoring = scoring
        self._offsets = at = field_offsets()
        self.control = torch.zeros(at.end, dtype=torch.uint8, device=device)
        self.records = Records(device)
        self._in_parts = int(len(clients) > 0)  # victims are chosen in parts, as there are many plans
        self.flags = ("-DCLIENTS",) if clients else ()
        kernel(PLAN, "plan_begin", *OPTIONS, *self.flags).prepare(device.index)
        if clients:
            self._make_clients(clients, device)
        base = self.control.data_ptr()
        self.clock, self.counts, self.selection = base + at.clock, base + at.counts, base + at.selection
        self.missed, self.needed, self.moved = base + at.missed, base + at.needed, base + at.moved
        self.into_unused, self.arrivals = base + at.into_unused, base + at.arrivals
        self._selection_units = (at.end - at.selection) // 16
        self._totals = self.control[at.totals : at.totals + 8 * len(at.total_names)]
        self._meeting_blocks = meeting_blocks(device.index)
        self._slots = struct_type(PLAN, "Slots")(
            cells=rows.cells, n_cells=len(rows.cells), keys=rows.key, last_batch=rows.last_batch, score=rows.score,
            capacity=rows.slots,
        )  # fmt: skip

    def _make_clients(self, first_keys: Sequence[int], device: torch.device) -> None:
        """Writes once, for the kernels, where each client's keys and its rows in resident slots begin."""
        rows, at, count, end = self.rows, self._offsets, len(first_keys) - 1, first_keys[-1]
        edges = list(first_keys)
        if rows.resident:
            before = [sum(table.rows for table in rows.resident if table.first_key < key) for key in first_keys]
            edges = [*first_keys[:-1], *(end + rows_before for rows_before in before)]
        self._clients = torch.zeros((count, at.client_bytes // 8), dtype=torch.int64, device=device)
        self._numbers = torch.arange(count, dtype=torch.int32, device=device)
        self._edges = torch.tensor(edges, dtype=torch.int64, device=device)
        clients = struct_type(PLAN, "Clients")(
            of=self._clients, first=self._edges, keys=rows.key, beyond=end - rows.slots, n=count, ranges=len(edges) - 1
        )
        whole = torch.frombuffer(bytearray(clients), dtype=torch.uint8)
        self.control[at.clients : at.clients + len(whole)] = whole.to(device)

    def _planned(self, client: PlanOf) -> tuple[Any, int]:
        """The numbers of the clients whose plan it is, and how many they are."""
        if client is None or not self.flags:
            return 0, 0
        if isinstance(client, torch.Tensor):
            return client, len(client)
        return self._numbers.data_ptr() + client * self._numbers.itemsize, 1

    def count(self, homes: torch.Tensor, kind: PlanKind, *, client: PlanOf) -> None:
        """A plan where every row is resident; see `begin`."""
        count = kernel(PLAN, "homes_count", *OPTIONS, *self.flags)
        n = homes.shape[0]
        count(
            max(1, blocks_for(n, THREADS, 264)), THREADS, homes, n, self.clock, self.counts, kind.scored,
            kind.ages, *self._planned(client),
        )  # fmt: skip

    def begin(self, missed: Missed, kind: PlanKind, *, lag: int, client: PlanOf, overflow: OverflowRows) -> None:
        """Counts the batch, at the next time if it `ages` scores, and locks the slots of the `lag` batches before it;
        clears the memory of its misses. `client`: whose batch it is, if there are clients."""
        scoring, records = self.scoring, self.records
        begin = kernel(PLAN, "plan_begin", *OPTIONS, *self.flags)
        begin(
            blocks_for(missed.cells, 4 * THREADS, MOST_BLOCKS), THREADS, self.clock, self.counts,
            scoring.units_per_batch, lag, kind.scored, kind.ages, missed.claims, missed.cleared, self.selection,
            self._selection_units, records.whole, *self._planned(client),
        )  # fmt: skip
        if overflow.uncached:
            clear = kernel(PLAN, "records_clear", *OPTIONS, *overflow.flags, *self.flags)
            clear(blocks_for(len(records.index), THREADS, MOST_BLOCKS), THREADS, records.whole)
            sort_out = kernel(PLAN, "records_index", *OPTIONS, *overflow.flags, *self.flags)
            sort_out(blocks_for(records.rows, THREADS, MOST_BLOCKS), THREADS, records.whole, self.clock)

    def find(
        self,
        keys: torch.Tensor,
        homes: torch.Tensor,
        missed: Missed,
        kind: PlanKind,
        *,
        overflow: OverflowRows,
        may_arrive: bool = False,
    ) -> None:
        """Locks and scores cached rows, and claims missed keys, into `missed.keys`; until these are published, their
        `homes` name the claims. `may_arrive`: whether rows of the last plan may not have arrived yet."""
        rows, scoring, records, n = self.rows, self.scoring, self.records, keys.shape[0]
        find = kernel(PLAN, "keys_find", *OPTIONS, *overflow.flags, *self.flags)
        find(
            blocks_for(n, THREADS), THREADS, self._slots, keys, n, self.clock, scoring.kind, scoring.unit,
            kind.scored, missed.claims, missed.cells, homes, missed.keys, records.whole, overflow.state,
            rows.layout.state_width + 1, overflow.by_key, may_arrive, self.counts,
        )  # fmt: skip

    def place(self, missed: Missed, *, lag: int) -> None:
        """Chooses victims and gives missed keys slots, in one launch: from here on rows may move. If victims' rows have
        to leave first, `choose` and `resolve` are used, two launches. Slots of the `lag` batches before are locked.
        Once the rows have moved, a second call does nothing."""
        rows, scoring = self.rows, self.scoring
        place = cooperative_kernel(PLAN, "missed_place", *OPTIONS, *self.flags)  # the file that the plan began with
        place(
            max(
                blocks_for(rows.slots, 4 * MEETING_THREADS, self._meeting_blocks),
                blocks_for(missed.n, MEETING_THREADS, self._meeting_blocks),
            ),
            MEETING_THREADS, self.selection, self.counts, self.clock, lag, self._slots, scoring.unit,
            scoring.ties_by_age, self._in_parts, missed.chosen, missed.keys, missed.slots, missed.victims,
            missed.scores, missed.moving,
        )  # fmt: skip

    def choose(self, missed: Missed) -> None:
        """Chooses victims for the missed keys, and writes their slots to `missed.chosen`."""
        rows, scoring = self.rows, self.scoring
        select = cooperative_kernel(POLICY, "victims_select")
        select(
            blocks_for(rows.slots, 4 * MEETING_THREADS, self._meeting_blocks), MEETING_THREADS, self.selection,
            self.counts, self.clock, rows.score, rows.last_batch, rows.slots, scoring.unit, scoring.ties_by_age,
            self._in_parts, missed.chosen,
        )  # fmt: skip

    def resolve(self, homes: torch.Tensor, missed: Missed, overflow: OverflowRows, part: int) -> None:
        """Ends a plan. `part`: after `place`, `PUBLISH`: later plans find the missed keys in their slots, and `homes`
        are resolved; repeated, it does nothing. After `choose`, 0 to pair missed keys with slots, and then `ASSIGN |
        PUBLISH`, by which the slots change hands, too."""
        n = homes.shape[0]
        launch = cooperative_kernel(PLAN, "missed_resolve", *OPTIONS, *overflow.flags, *self.flags)
        launch(
            blocks_for(n, MEETING_THREADS, self._meeting_blocks), MEETING_THREADS, self.counts, missed.chosen,
            self.selection, missed.keys, self._slots, self.clock, missed.slots, missed.victims, missed.scores, homes, n,
            missed.claims, missed.cells, self.records.whole, missed.moving, part,
        )  # fmt: skip

    def totals(self, client: int | None = None) -> dict[str, int]:
        """All counters, or those of a client. Synchronises."""
        names, words = self._offsets.total_names, self._totals.view(torch.int64)
        if client is not None:
            words = self._clients[client, : len(names)]
        return dict(zip(names, words.tolist(), strict=True))

    def placed(self, missed: Missed) -> torch.Tensor:
        """The present homes of a plan's `missed` keys, int64 (K,): slots, or −2 − r for record r; empty if no slot has
        changed hands. Synchronises."""
        count = missed.in_all
        keys, homes = missed.view("keys", count), missed.view("slots", count).long()
        key, record = self.rows.key, self.records.table[: self.records.rows, 0] - 1
        # before slots change hands the memory has arbitrary values, and no missed key has a slot
        in_slot, in_record = (homes >= 0) & (homes < len(key)), (homes <= -2) & (homes > -2 - len(record))
        found = torch.zeros_like(in_slot)
        found[in_slot] = key[homes[in_slot]] == keys[in_slot]
        found[in_record] = record[-2 - homes[in_record]] == keys[in_record]
        return homes[found]

    def batch(self) -> int:
        """Number of the last batch planned, including replays of graphs. Synchronises."""
        return int(self._word(self._offsets.batch).item())

    def time_and_used(self) -> tuple[int, int]:
        """The time of the last batch, which scores are made of, and how many slots, the first ones, have ever held a
        row. Synchronises once."""
        at = self._offsets
        words = self.control[: at.totals].cpu()
        time, used = words[at.time : at.time + 8].view(torch.int64), words[at.used : at.used + 4].view(torch.int32)
        return int(time.item()), int(used.item())

    def restart(self, batch: int) -> None:
        """Resets the counters to empty slots; the next batch follows `batch`, in number and time."""
        at = self._offsets
        for place in (at.batch, at.time):
            self._word(place).fill_(batch)
        self.control[at.counts : at.totals].zero_()
        self.records.clear()

    def _word(self, offset: int) -> torch.Tensor:
        """The int64 at a byte offset of the control tensor."""
        return self.control[offset : offset + 8].view(torch.int64)

    def size_bytes(self) -> int:
        tensors = (self._clients, self._numbers, self._edges) if self.flags else ()
        return self.control.nbytes + sum(tensor.nbytes for tensor in tensors)
