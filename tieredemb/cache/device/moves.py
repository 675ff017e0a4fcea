"""The launches that move rows into slots and out of them, wherever the other end is. Nothing here waits for the
device."""

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
# of 1,024 threads saturate PCIe both ways beside other kernels: 16 are a little faster for short rows and slower for
# long ones, 12 the other way round, and 20 keep a plan's blocks from meeting. Caches that move rows at the same time
# share them, as far as each still has a few: one may move far more rows than the others
SWAP_BLOCKS, LEAST_SWAP_BLOCKS = 14, 5


class Loaded(NamedTuple):
    """Rows that are brought into slots which are theirs already, for no plan; see `Missed`."""

    moving: torch.Tensor
    keys: Any
    slots: torch.Tensor
    untouched: torch.Tensor
    victims: int = 0
    scores: int = 0


class RowMoves:
    """The kernels that move rows between the slots `hot` and rows elsewhere, which lie as in cold storage: addresses
    `weight` of (·, D) and `state` of (·, S + 1), which ends with the score."""

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
        """Compiles all of them, unless they were, before a plan: between the slots' change of hands and their rows'
        arrival it is too late to find out that one does not compile, and at exit, too."""
        self._write_back.load(self.device.index)
        self._swap.load(self.device.index)
        self._initial.on_device().load_missed(*self._rows)

    def swap(
        self, missed: Missed | Loaded, n: int, weight: Any, state: Any, *, scored: bool, in_place: bool, moving: int = 1
    ) -> None:
        """Brings the cold rows of `weight` and `state` that a plan has `missed`, n at most, into the slots that are
        theirs, after the victims' rows went back there; where they are not `in_place`, but have been brought, in their
        order, the victims' rows have gone already. `scored`: whether this use raises their scores · `moving`: how many
        caches move rows at the same time. Called again, it does nothing. Rows that are `Loaded` count nowhere."""
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
        """Writes `n` slots, or as many as the number at `count` says if that is less, to the rows `keys`: the slots
        from `first_slot` on, or `slots`; without keys the rows from `first_key` on. `was_dirty`: address of flags where
        the rows are a buffer's, in the order of the slots; else the slots become clean · `moved`: address of the
        counters, 0 for none."""
        hot = self._hot
        self._write_back(
            blocks, MOVE_THREADS, count, n, first_slot, first_key, slots, keys, hot.weight, hot.state, hot.score,
            hot.dirty, weight, state, was_dirty, moved,
        )  # fmt: skip

    def load(
        self, source: Any, keys: torch.Tensor, slots: torch.Tensor, weight: Any, state: Any, overflow: OverflowRows
    ) -> None:
        """Brings the rows of `keys` (int64 (K,)) into `slots` (int32 (K,)), which are theirs, from the rows `source`
        of `weight` and `state` (0: in their order), or generates them. No row in a slot has a score of zero."""
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
        """Generates the untouched of the rows `keys`, in their `slots` or where they overflow."""
        hot = self._hot
        self._initial.on_device().generate_missed(
            count, n, keys, slots, untouched, hot.weight, hot.state, overflow.weight, overflow.state,
            self._state_width, by_key=overflow.by_key, some=some,
        )  # fmt: skip

    def generate_missed(self, missed: Missed, n: int, overflow: OverflowRows) -> None:
        """Generates what a plan has missed, n at most, that was never written, behind `swap`."""
        given = missed.keys, missed.slots, missed.untouched
        self.generate(missed.count, n, *given, overflow, some=missed.n_untouched)

    def generate_range(self, first_key: int, first_slot: int, rows: int) -> None:
        """Generates consecutive rows in consecutive slots."""
        generator = self._initial.on_device()
        generator.generate_range(first_key, first_slot, rows, self._hot.weight, self._hot.state, self._state_width)
