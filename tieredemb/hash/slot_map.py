"""Map from key to slot: open addressing with linear probing, one thread a key, cells of 16 bytes, load 0.5.

It holds resident keys only, so that the capacity bounds it; the slots' key array is the truth and this an index over
it. Linear probing beats bucketed tiles two to one at this load on a GPU, and one cache line a find is the floor on a
CPU. See cuCollections `static_map` for the verbs.

Inserting takes the first free cell in probe order, by compare-and-swap, and follows a finished find. As cells only
fill meanwhile, equal keys meet in the same cell. On a GPU erasing leaves a tombstone; past a quarter of the cells the
map is rebuilt from the slots' keys (`missed_resolve` in cache/plan.cu). The map knows no scores.
"""

from __future__ import annotations

from tieredemb.kernels.constants import CELL_BYTES

LOAD = 0.5  # cells = slots / LOAD; at 0.8 finds take twice as long


def map_bytes_per_slot() -> int:
    """Bytes of map that each slot costs."""
    return int(CELL_BYTES / LOAD)
