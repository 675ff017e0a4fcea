"""Sorts the occurrences of a batch by home on a GPU: short batches by a radix sort, long ones by `torch.sort`.

Both give the same order. Of a short batch the kernels of `homes_sort.cu` are faster, as they have fewer passes that
wait for each other; where there is more to move, torch's are.
"""

from __future__ import annotations

import torch

from tieredemb.kernels.compiler import blocks_for, kernel
from tieredemb.kernels.constants import SORT_BITS, SORT_ITEMS, SORT_PASSES, SORT_THREADS

FILE = "lookup/homes_sort.cu"
DIGITS = 1 << SORT_BITS
TILE = SORT_THREADS * SORT_ITEMS
SHORT = (
    1 << 18
)  # occurrences; on an H200 53,248 take 35 µs and torch 53, 212,992 take 52 and 59, 425,984 take 79 and 62
COUNT_BLOCKS, PLACE_BLOCKS = 132, 4224
TOTALS = 4  # words of the notes: first the number of tiles begun in each pass, then the passes' counts of digits
TILE_COUNTS = TOTALS + SORT_PASSES * DIGITS  # and the counts that its tiles publish


def _tiles(n: int) -> int:
    return -(-n // TILE)


def note_words(n: int) -> int:
    """Words of the notes that a sort of `n` occurrences takes, and begins with as zeros."""
    return TILE_COUNTS + SORT_PASSES * _tiles(n) * DIGITS if n <= SHORT else 0


def prepare(device: int) -> None:
    """Begins to compile what sorts short batches."""
    kernel(FILE, "digits_sort").prepare(device)


def sort_homes(
    homes: torch.Tensor,
    bag: torch.Tensor,
    notes: int,
    scratch: torch.Tensor,
    sorted_homes: torch.Tensor,
    order: torch.Tensor,
    sorted_bag: torch.Tensor,
) -> None:
    """Writes the sorted homes, `DROPPED` first; the occurrences in that order, stably; and their bags. All int32 (N,).
    `notes`: address of `note_words(N)` zeros · `scratch`: 16 N bytes. Allocates nothing that outlasts it. Does not
    synchronise."""
    n = homes.shape[0]
    if n > SHORT:
        places = torch.empty(n, dtype=torch.int64, device=homes.device)
        torch.sort(homes, stable=True, out=(sorted_homes, places))
        place = kernel(FILE, "bags_place")
        place(blocks_for(n, SORT_THREADS, PLACE_BLOCKS), SORT_THREADS, places, n, bag, order, sorted_bag)
        return
    tiles = _tiles(n)
    begun, totals, tile_counts = notes, notes + 4 * TOTALS, notes + 4 * TILE_COUNTS
    source, target = 0, scratch.data_ptr()
    count = kernel(FILE, "digits_count")
    count(blocks_for(n, SORT_THREADS, COUNT_BLOCKS), SORT_THREADS, homes, n, totals)
    sort = kernel(FILE, "digits_sort")
    for number in range(SORT_PASSES):
        sort(
            tiles, SORT_THREADS, number, homes, source, n, totals, begun, tile_counts, target, bag, sorted_homes, order,
            sorted_bag,
        )  # fmt: skip
        source, target = target, scratch.data_ptr() + 8 * n if number == 0 else source
