"""The kernel that moves rows between the hot cache and a unified table of 25 GiB, alone: a swap, and a fill.

Rows of 128 fp32 with one word of optimizer state, and the score. Every round moves rows that no earlier one touched.
"""

from __future__ import annotations

import torch

from benchmarks.cuda_providers import check_room
from benchmarks.cuda_timing import ROUNDS, WARM_UP, timed, zeros
from benchmarks.record import Record, at_least, at_most, measured
from benchmarks.timing import Quantiles
from tieredemb.cache.device.moves import MOVE_BLOCKS, MOVE_THREADS, SWAP_BLOCKS
from tieredemb.cache.device.plan import field_offsets
from tieredemb.kernels.compiler import Kernel, options
from tieredemb.storage.base import RowLayout
from tieredemb.storage.unified import UnifiedMemory

ROWS, SLOTS, MOVED, WIDTH = 52_000_000, 520_000, 100_000, 128
ROW_BYTES = 4 * WIDTH + 8
REQUESTS = ROW_BYTES // 128 + 1  # a row and direction: the weights in pieces of 128 bytes, state and score
CONFIG = f"{MOVED:,} rows"


class Swap:
    """A cold table all of whose rows were written, a hot cache, and the rows of each round to move in and out."""

    def __init__(self) -> None:
        layout = RowLayout(rows=ROWS, width=WIDTH, state_width=1)
        check_room(layout.weight_bytes + layout.state_bytes)
        self.cold = UnifiedMemory().open(layout, name="", identity={})
        self.cold.attach(torch.device("cuda"))
        self.cold.wait_until_committed()
        self.cold.state[:, -1] = 1  # zero would say that the row was never written
        sets = torch.randperm(ROWS, device="cuda")[: 4 * MOVED * (WARM_UP + 1 + ROUNDS)].clone()
        self.sets = sets.view(-1, 2, MOVED)
        self.missed, self.victims = zeros(MOVED, dtype=torch.int64), zeros(MOVED, dtype=torch.int64)
        self.slots = torch.randperm(SLOTS, device="cuda")[:MOVED].int()
        self.hot, self.state = torch.randn(SLOTS, WIDTH, device="cuda"), zeros(SLOTS, 1) + 5
        self.score, self.dirty = zeros(SLOTS) + 7, zeros(SLOTS, dtype=torch.uint8)
        self.scores = zeros(MOVED) + 7
        self.moving = zeros(field_offsets().moving_bytes // 4)
        self.moved = zeros(4, dtype=torch.int64)
        self.untouched = zeros(MOVED, dtype=torch.uint8)
        self._kernel = Kernel(
            "cache/device/transfer.cu",
            "rows_swap",
            (*options(torch.float32, WIDTH), "-DSTATE=1"),
        )

    def run(self) -> None:
        """The launch: the one place that knows the kernel's arguments."""
        self._kernel(
            MOVE_BLOCKS, MOVE_THREADS, self.moving, self.missed, self.slots, self.victims, self.scores, SWAP_BLOCKS,
            self.hot, self.state, self.score, self.dirty, self.cold.weight.ctypes.data, self.cold.state.ctypes.data,
            self.untouched, self.moved, 0, 0, 1.0, 0, 0,
        )  # fmt: skip

    def dirty_victims(self, i: int) -> None:
        """Makes every slot of round `i` hold a row that has to be written back."""
        self.missed.copy_(self.sets[i, 0])
        self.victims.copy_(self.sets[i, 1])
        self._begin(victims=MOVED)
        self.dirty.fill_(1)

    def no_victims(self, i: int) -> None:
        """Makes the slots of round `i` empty ones."""
        self.missed.copy_(self.sets[-1 - i, 0])
        self.victims.fill_(-1)
        self._begin(victims=0)
        self.dirty.zero_()

    def _begin(self, *, victims: int) -> None:
        self.moving.zero_()
        self.moving[0], self.moving[1] = MOVED, victims

    def check(self) -> None:
        """One swap, compared with what the rows were."""
        self.dirty_victims(0)
        missed, victims = self.missed.cpu().numpy(), self.victims.cpu().numpy()
        self.cold.weight[missed] = missed[:, None] % 1000
        self.cold.state[missed, 0] = missed % 1000
        leaving = self.hot[self.slots.long()].cpu().numpy()
        self.run()
        torch.cuda.synchronize()
        arrived = self.hot[self.slots.long()].cpu().numpy()
        state = self.state[self.slots.long(), 0].cpu().numpy()
        good = (
            (arrived == missed[:, None] % 1000).all()
            and (state == missed % 1000).all()
            and (self.cold.weight[victims] == leaving).all()
            and (self.cold.state[victims] == (5, 7)).all()
        )
        if not good:
            raise RuntimeError("the swap is wrong")


def swap_requests_per_ms() -> float:
    """Of 128 bytes, that a swap against dirty victims makes in both directions together."""
    torch.cuda.empty_cache()
    swap = Swap()
    try:
        return 2 * MOVED * REQUESTS / timed(swap.run, prepare=swap.dirty_victims).median
    finally:
        swap.cold.close()


def swap_records() -> list[Record]:
    """A swap of rows against dirty victims, in time and in requests; and filling empty slots."""
    torch.cuda.empty_cache()
    swap = Swap()
    try:
        swap.check()
        swapped = timed(swap.run, prepare=swap.dirty_victims)
        filled = timed(swap.run, prepare=swap.no_victims)
    finally:
        swap.cold.close()
    requests = _rates(swapped, 2 * MOVED * REQUESTS / 1e3)  # a millisecond → 10^6 a second
    bytes_moved = _rates(filled, MOVED * ROW_BYTES / 1e6)
    table = f"unified table of {ROWS * ROW_BYTES / 2**30:.0f} GiB"
    fill_note = f"{REQUESTS * MOVED / filled.median / 1e3:,.0f} M requests/s"
    in_time, enough, quick = (
        at_most(swapped.median, 2.0, " ms"),
        at_least(requests.median, 500, " M/s"),
        at_least(bytes_moved.median, 48, " GB/s"),
    )
    return [
        measured("swap with dirty victims", "tieredemb", CONFIG, "ms", swapped, note=table, **in_time),
        measured("swap, PCIe requests", "tieredemb", CONFIG, "M/s", requests, **enough),
        measured("fill of empty slots", "tieredemb", CONFIG, "GB/s", bytes_moved, note=fill_note, **quick),
    ]


def _rates(times: Quantiles, per_run: float) -> Quantiles:
    median, low, high = (per_run / ms for ms in (times.median, times.p80, times.p20))
    return Quantiles(median, low, high, times.rounds)
