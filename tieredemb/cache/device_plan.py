"""The launches of a plan on a GPU, in their order. Nothing here waits for the device.

`Counts` and `Clock` of plan.cuh live in one small tensor; totals are read from it in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tieredemb.cache.device_rows import DeviceRows
from tieredemb.cache.policy import Scoring
from tieredemb.kernels.compiler import OPTIONS, blocks_for, kernel

PLAN, POLICY = "cache/plan.cu", "cache/policy.cu"
THREADS = 256
MOST_BLOCKS = 1056  # eight a multiprocessor of an H200: loops stride over what is beyond
SELECT_BLOCKS = 264  # of 1,024 threads
DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of a score and of an age, from the top
RECORD_BYTES = 16

# byte offsets in the control tensor: Clock, Counts, the flag of map_fill, Selection
CLOCK, COUNTS, FINISHED, SELECTION = 0, 32, 160, 192
SELECTION_BYTES = 4 * (8 + 2048)
MISSED, NEEDED, USED, TOMBSTONES = (COUNTS + 4 * i for i in range(4))
TOTALS = COUNTS + 32
MOVED = TOTALS + 8 * 5  # what `storage/move.cu` counts
CHOSEN = SELECTION + 4 * 6
TOTAL_NAMES = (
    *("batches", "lookups", "hits", "unique", "filled", "generated", "evicted", "written_back", "scores_written"),
    "overflow",
)


@dataclass(frozen=True)
class Away:
    """Where rows without a slot are used. `slotless`: whether the batch may have such rows · `weight`, `state`:
    addresses of the rows, a state ending with the score · `records`: int64 (R, 2), `Record`s that name their keys, or
    None where record r has row r."""

    slotless: bool
    weight: int
    state: int
    records: torch.Tensor | None

    @property
    def by_key(self) -> bool:
        """Whether a row lies at its key, or at its record."""
        return self.records is not None

    @property
    def flags(self) -> tuple[str, ...]:
        """What kernels are compiled with to look there."""
        return ("-DSLOTLESS",) if self.slotless else ()


@dataclass(frozen=True)
class Missed:
    """What a plan has to move. `keys`: int64 (N,) · `slots`: int32 (N,), where each goes: a slot, −1 while it has none,
    or the home −2 − r of a record · `victims`: int64 (N,), the key that leaves the slot, or −1. How many of the N
    places are taken is known to the device alone."""

    keys: torch.Tensor
    slots: torch.Tensor
    victims: torch.Tensor
    claims: torch.Tensor

    @staticmethod
    def empty(n: int, device: torch.device) -> Missed:
        cells = 2
        while cells < 2 * n:
            cells *= 2
        return Missed(
            keys=torch.empty(n, dtype=torch.int64, device=device),
            slots=torch.empty(n, dtype=torch.int32, device=device),
            victims=torch.empty(n, dtype=torch.int64, device=device),
            claims=torch.zeros((cells, 2), dtype=torch.int64, device=device),
        )


class Records:
    """Rows that batches in flight use where they lie. `table`: int64 (R, 2), `Record`s · `map`: int64 (2 R, 2)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.table = torch.zeros((0, 2), dtype=torch.int64, device=device)
        self._outgrown: list[torch.Tensor] = []

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows at a time. Those in use keep their numbers."""
        size = max(64, 1 << (2 * rows - 1).bit_length())
        if size > len(self.table):
            grown = torch.zeros((size, 2), dtype=torch.int64, device=self.device)
            grown[: len(self.table)] = self.table
            self._outgrown.append(self.table)  # kernels of tickets in flight, and captured graphs, go on reading it
            self.table = grown

    def size_bytes(self) -> int:
        return self.table.nbytes + sum(table.nbytes for table in self._outgrown)


class DevicePlan:
    """The state of a cache's plans, and their kernels. `unit` and kind come from the policy's `Scoring`."""

    def __init__(self, rows: DeviceRows, scoring: Scoring, device: torch.device) -> None:
        self.rows = rows
        self.scoring = scoring
        self.control = torch.zeros(SELECTION + SELECTION_BYTES, dtype=torch.uint8, device=device)
        self.records = Records(device)
        base = self.control.data_ptr()
        self.clock, self.counts, self.selection = base + CLOCK, base + COUNTS, base + SELECTION
        self.missed, self.moved, self.chosen = base + MISSED, base + MOVED, base + CHOSEN
        self._needed, self._used, self._finished = base + NEEDED, base + USED, base + FINISHED

    def count(self, homes: torch.Tensor, *, scored: bool) -> None:
        """A plan where every row is resident."""
        count = kernel(PLAN, "homes_count", "i32 n p p i")
        count(max(1, blocks_for(len(homes), THREADS, 264)), THREADS, homes, len(homes), self.clock, self.counts, scored)

    def find(
        self, keys: torch.Tensor, homes: torch.Tensor, missed: Missed, *, lag: int, scored: bool, away: Away
    ) -> None:
        """Locks and scores what is resident, claims what is missed, into `missed.keys` and, for now, `homes`."""
        rows, scoring, n = self.rows, self.scoring, len(keys)
        begin = kernel(PLAN, "plan_begin", "p p d i i")
        begin(1, 1, self.clock, self.counts, scoring.units_per_batch, lag, scored)
        table, index = self.records.table, None
        if away.slotless:
            index = torch.zeros((2 * len(table), 2), dtype=torch.int64, device=table.device)
            sort_out = kernel(PLAN, "records_index", "any i any n p", *OPTIONS, *away.flags)
            sort_out(
                blocks_for(len(table), THREADS, MOST_BLOCKS), THREADS, table, len(table), index, len(index), self.clock
            )
        find = kernel(
            PLAN, "keys_find", "any n i64 n p i32 i32 i x i any n i32 i64 any p n p n i p", *OPTIONS, *away.flags
        )
        find(
            blocks_for(n, THREADS), THREADS, rows.cells, len(rows.cells), keys, n, self.clock, rows.last_batch,
            rows.score, scoring.kind, scoring.unit, scored, missed.claims, len(missed.claims), homes, missed.keys,
            table, 0 if index is None else index, 0 if index is None else len(index), away.state,
            rows.layout.state_width + 1, away.by_key, self.counts,
        )  # fmt: skip

    def choose(self, n: int) -> torch.Tensor:
        """Victims that make room for what is missed of n ids: int32 (min(n, slots),), as many as `chosen` says."""
        rows = self.rows
        victims = torch.empty(min(n, rows.slots), dtype=torch.int32, device=self.control.device)
        kernel(PLAN, "room_count", "p i")(1, 1, self.counts, rows.slots)
        begin = kernel(POLICY, "victims_begin", "p p p x")
        begin(1, 1024, self.selection, self._needed, self.clock, self.scoring.unit)
        blocks = blocks_for(rows.slots, 4096, SELECT_BLOCKS)
        digit = kernel(POLICY, "victims_count", "p i32 i32 p p i i i")
        for by_age in (0, 1) if self.scoring.ties_by_age else (0,):
            for shift, bits in DIGITS:
                digit(
                    blocks, 1024, self.selection, rows.score, rows.last_batch, self._used, self.clock, shift, bits,
                    by_age,
                )  # fmt: skip
        emit = kernel(POLICY, "victims_emit", "p i32 i32 p p p i32 i")
        emit(
            blocks_for(rows.slots, 1024, 2 * SELECT_BLOCKS), 1024, self.selection, rows.score, rows.last_batch,
            self._used, self.clock, self._needed, victims, self.scoring.ties_by_age,
        )  # fmt: skip
        return victims

    def assign(self, missed: Missed, victims: torch.Tensor, *, commit: bool) -> None:
        """Pairs missed keys with slots; with `commit` the slots change hands."""
        rows = self.rows
        assign = kernel(PLAN, "missed_assign", "p i32 p i64 any n i64 i32 p i32 i64 i")
        assign(
            blocks_for(len(missed.keys), THREADS, MOST_BLOCKS), THREADS, self.counts, victims, self.chosen, missed.keys,
            rows.cells, len(rows.cells), rows.key, rows.last_batch, self.clock, missed.slots, missed.victims, commit,
        )  # fmt: skip

    def publish(self, homes: torch.Tensor, missed: Missed, away: Away) -> None:
        """Lets later plans find the missed keys in their slots, resolves all homes, and ends the plan."""
        rows, n = self.rows, len(homes)
        some = blocks_for(n, THREADS, MOST_BLOCKS)
        publish = kernel(PLAN, "missed_publish", "any n i64 i32 p any i p", *OPTIONS, *away.flags)
        publish(
            some, THREADS, rows.cells, len(rows.cells), missed.keys, missed.slots, self.counts, self.records.table,
            len(self.records.table), self.clock,
        )  # fmt: skip
        resolve = kernel(PLAN, "homes_resolve", "i32 n any n i32")
        resolve(blocks_for(n, THREADS), THREADS, homes, n, missed.claims, len(missed.claims), missed.slots)
        kernel(PLAN, "plan_end", "p p")(1, 1, self.counts, self.chosen)
        cells = blocks_for(len(rows.cells), 1024, SELECT_BLOCKS)
        kernel(PLAN, "map_clear", "any n p")(cells, 1024, rows.cells, len(rows.cells), self.counts)
        fill = kernel(PLAN, "map_fill", "any n i64 p p")
        fill(cells, 1024, rows.cells, len(rows.cells), rows.key, self.counts, self._finished)

    def score(self, missed: Missed, away: Away, *, scored: bool) -> None:
        """Scores of the missed rows, once they have arrived."""
        score = kernel(PLAN, "missed_score", "p i64 i32 i32 p n i p i x i i")
        score(
            blocks_for(len(missed.keys), THREADS, MOST_BLOCKS), THREADS, self.counts, missed.keys, missed.slots,
            self.rows.score, away.state, self.rows.layout.state_width + 1, away.by_key, self.clock, self.scoring.kind,
            self.scoring.unit, self.scoring.remember, scored,
        )  # fmt: skip

    def missed_count(self) -> int:
        """Missed keys of the plan under way. Synchronises."""
        at = self.missed - self.control.data_ptr()
        return int(self.control[at : at + 4].view(torch.int32).item())

    def totals(self) -> dict[str, int]:
        """Counters since the last `clear`. Synchronises."""
        words = self.control[TOTALS : TOTALS + 8 * len(TOTAL_NAMES)].view(torch.int64).tolist()
        return dict(zip(TOTAL_NAMES, words, strict=True))

    def clear_totals(self) -> None:
        """Starts all counters again."""
        self.control[TOTALS : TOTALS + 8 * len(TOTAL_NAMES)].zero_()

    def batch(self) -> int:
        """Number of the last batch planned, replays of graphs included. Synchronises."""
        return int(self.control[CLOCK : CLOCK + 8].view(torch.int64).item())

    def restart(self, batch: int) -> None:
        """Empties the plan's view of the slots; the next batch follows `batch`."""
        self.control[CLOCK : CLOCK + 8].view(torch.int64).fill_(batch)
        self.control[COUNTS : COUNTS + 32].zero_()
        self.records.table.zero_()

    def size_bytes(self) -> int:
        return self.control.nbytes
