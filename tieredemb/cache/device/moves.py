"""The launches that move rows into slots and out of them. Nothing here waits for the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.plan import DevicePlan, Missed, OverflowRows, field_offsets
from tieredemb.kernels.compiler import OPTIONS, blocks_for, kernel
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.storage.base import RowLayout
from tieredemb.storage.initial import InitialRows

MOVE = "cache/device/transfer.cu"
MOVE_BLOCKS, MOVE_THREADS = 32, 1024
# blocks of 1,024 threads saturate PCIe both ways beside other kernels: 16 are a little faster for short rows and slower
# for long ones, 12 the other way round, and with 20 a plan's blocks cannot all be resident. Caches that move rows at
# the same time share the blocks, but each gets a few: one may move far more rows than the others
SWAP_BLOCKS, LEAST_SWAP_BLOCKS = 14, 5


class Loaded(NamedTuple):
    """Rows to fill slots that belong to them already, without a plan; see `Missed`."""

    moving: torch.Tensor
    keys: Any
    slots: torch.Tensor
    untouched: torch.Tensor
    victims: int = 0
    scores: int = 0


class RowMoves:
    """The kernels that move rows between the slots `hot` and arrays with the layout of cold storage: addresses `weight`
    of (·, D) and `state` of (·, S + 1), which ends with the score."""

    def __init__(self, layout: RowLayout, hot: DeviceHotRows, plan: DevicePlan, initial: InitialRows) -> None:
        self.device = hot.weight.device
        self.flags = flags = (*OPTIONS, *layout.flags, *plan.flags)
        self._hot = hot
        self._plan = plan
        self._initial = initial
        self._state_width = layout.state_width
        self._swap = kernel(MOVE, "rows_swap", *flags)
        self._write_back = kernel(MOVE, "rows_write_back", *flags)
        self._rows = self.device, layout.device_dtype, layout.width
        self._swap.prepare(self.device.index)
        initial.on_device().prepare_missed(*self._rows)

    def make_ready(self) -> None:
        """Compiles all kernels, if necessary, before a plan: once slots have changed hands, or at exit, it is too late
        for a compilation to fail."""
        self._write_back.load(self.device.index)
        self._swap.load(self.device.index)
        self._initial.on_device().load_missed(*self._rows)

    def swap(
        self, missed: Missed | Loaded, n: int, weight: Any, state: Any, *, scored: bool, in_place: bool, moving: int = 1
    ) -> None:
        """Fills the slots of the rows that a plan has `missed`, at most n, from `weight` and `state`. `in_place`:
        whether these are cold storage, and the victims' rows are written back there first; else they are the missed
        rows in order, and the victims' rows have been sent already · `scored`: whether this use raises scores ·
        `moving`: how many caches move rows at the same time. A second call does nothing. Rows that are `Loaded` are not
        counted."""
        hot, plan, scoring, is_use = self._hot, self._plan, self._plan.scoring, isinstance(missed, Missed)
        self._swap(
            blocks_for(n, 64, MOVE_BLOCKS), MOVE_THREADS, missed.moving, missed.keys if in_place else 0, missed.slots,
            missed.victims, missed.scores, max(LEAST_SWAP_BLOCKS, SWAP_BLOCKS // moving) if is_use else 0, hot.weight,
            hot.state, hot.score, hot.dirty, weight, state, missed.untouched, plan.moved if is_use else 0,
            plan.clock if is_use else 0, scoring.kind, scoring.unit, scoring.remember, scored,
        )  # fmt: skip

    def write_back(
        self,
        blocks: int,
        count: int,
        n: int,
        first_slot: int,
        first_key: int,
        slots: Any,
        keys: Any,
        weight: Any,
        state: Any,
        was_dirty: int,
        moved: int,
    ) -> None:
        """Writes at most `n` slots, and as many as the number at `count`, to the rows `keys`: the slots from
        `first_slot` on, or `slots`; without keys to the rows from `first_key` on. `was_dirty`: address of flags if the
        rows are in a buffer, in the order of the slots; else the slots become clean · `moved`: address of the counters,
        0 for none."""
        hot = self._hot
        self._write_back(
            blocks, MOVE_THREADS, count, n, first_slot, first_key, slots, keys, hot.weight, hot.state, hot.score,
            hot.dirty, weight, state, was_dirty, moved,
        )  # fmt: skip

    def load(
        self, source: Any, keys: torch.Tensor, slots: torch.Tensor, weight: Any, state: Any, overflow: OverflowRows
    ) -> None:
        """Fills `slots` (int32 (K,)), which belong to `keys` (int64 (K,)), from the rows `source` of `weight` and
        `state` (0: in order), or generates the rows. No row in a slot has a score of zero."""
        n, given = len(slots), slots.contiguous()
        moving = torch.zeros(field_offsets().moving_bytes // 4, dtype=torch.int32, device=self.device)
        moving[:1] = n
        untouched = torch.empty(n, dtype=torch.uint8, device=self.device)
        self.swap(Loaded(moving, source, given, untouched), n, weight, state, scored=False, in_place=True)
        self.generate(moving, n, keys, given, untouched, overflow)
        score = self._hot.score[slots.long()]
        self._hot.score[slots.long()] = torch.where(score == 0, MIN_SCORE, score)

    def generate(
        self, count: Any, n: int, keys: Any, slots: Any, untouched: Any, overflow: OverflowRows, *, some: int = 0
    ) -> None:
        """Generates the untouched rows of `keys`, in their `slots` or where rows without a slot are."""
        hot = self._hot
        self._initial.on_device().generate_missed(
            count, n, keys, slots, untouched, hot.weight, hot.state, overflow.weight, overflow.state,
            self._state_width, by_key=overflow.by_key, some=some,
        )  # fmt: skip

    def generate_missed(self, missed: Missed, n: int, overflow: OverflowRows) -> None:
        """After `swap`: generates missed rows, at most n, that were never written."""
        given = missed.keys, missed.slots, missed.untouched
        self.generate(missed.count, n, *given, overflow, some=missed.n_untouched)

    def generate_range(self, first_key: int, first_slot: int, rows: int) -> None:
        """Generates consecutive rows in consecutive slots."""
        generator = self._initial.on_device()
        generator.generate_range(first_key, first_slot, rows, self._hot.weight, self._hot.state, self._state_width)
