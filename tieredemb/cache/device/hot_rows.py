"""The slots on a GPU: weights, optimizer state, and per slot the score, the key, the lock and the dirty bit; their map.

Slots below `slots` are the cache. Those beyond it hold the rows of resident tables, which never leave: they need
neither key nor lock nor a place in the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tieredemb.cache.host.hot_rows import NEVER, NO_KEY
from tieredemb.errors import DeviceMemoryError
from tieredemb.hash.slot_map import map_bytes_per_slot
from tieredemb.kernels.compiler import OPTIONS, blocks_for, kernel
from tieredemb.kernels.constants import CELL_BYTES
from tieredemb.storage.base import RowLayout

CACHED_BYTES = 8 + 4  # key and last batch
EVERY_BYTES = 4 + 1  # score and dirty bit
THREADS = 256


def device_slot_bytes(layout: RowLayout) -> int:
    """Bytes of device memory that one slot costs, map included."""
    return layout.hot_bytes + EVERY_BYTES + CACHED_BYTES + map_bytes_per_slot()


class Resident(NamedTuple):
    """The rows of a resident table: keys from `first_key` on are in the slots from `first_slot` on."""

    first_key: int
    first_slot: int
    rows: int


class DeviceHotRows:
    """`weight` (C + P, D), `state` float32 (C + P, S), `score` int32 (C + P,) that holds uint32, `dirty` uint8
    (C + P,), of the C cached slots alone `key` int64 or `NO_KEY` and `last_batch` int32; `cells` int64 (2 C, 2).

    `slots`: C · `resident`: (first key, rows) of each resident table, whose P rows have the slots from C on, in that
    order. Raises `DeviceMemoryError`, with everything given back, where the device has not enough memory.
    """

    def __init__(
        self, layout: RowLayout, slots: int, resident: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        self.slots = slots
        self.layout = layout
        self.resident: list[Resident] = []
        rows = slots
        for first_key, count in resident:
            self.resident.append(Resident(first_key, rows, count))
            rows += count
        try:
            self.weight = torch.empty((rows, layout.columns), dtype=layout.device_dtype, device=device)
            self.state = torch.empty((rows, layout.state_width), dtype=torch.float32, device=device)
            self.score = torch.zeros(rows, dtype=torch.int32, device=device)
            self.dirty = torch.zeros(rows, dtype=torch.uint8, device=device)
            self.key = torch.full((slots,), NO_KEY, dtype=torch.int64, device=device)
            self.last_batch = torch.full((slots,), NEVER, dtype=torch.int32, device=device)
            cells = max(2, slots * map_bytes_per_slot() // CELL_BYTES)
            self.cells = torch.zeros((cells, 2), dtype=torch.int64, device=device)
        except torch.cuda.OutOfMemoryError as error:
            self.__dict__.clear()
            error.__traceback__ = None  # its frames reference what was allocated
            raise DeviceMemoryError(_out_of_memory(layout, rows, device)) from None

    def reset(self) -> None:
        """Empties the cached slots. Does not synchronise."""
        self.score[: self.slots].zero_()
        self.dirty[: self.slots].zero_()
        self.key.fill_(NO_KEY)
        self.last_batch.fill_(NEVER)
        self.cells.zero_()

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """The cached slot of each key (int64 (N,), on the device), int32 (N,), or `NOT_FOUND`. Does not synchronise."""
        slots = torch.empty(len(keys), dtype=torch.int32, device=keys.device)
        find = kernel("hash/slot_map.cu", "slot_map_find", *OPTIONS)
        find(blocks_for(len(keys), THREADS), THREADS, self.cells, len(self.cells), keys, len(keys), slots)
        return slots

    def size_bytes(self) -> dict[str, int]:
        """Bytes by purpose."""
        sizes = {name: value.nbytes for name, value in self.__dict__.items() if isinstance(value, torch.Tensor)}
        sizes["map"] = sizes.pop("cells")
        return sizes


def _out_of_memory(layout: RowLayout, rows: int, device: torch.device) -> str:
    each = device_slot_bytes(layout)
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fits = max(0, (free + idle) * 9 // 10 // each)  # batches need memory too
    return (
        f"{rows} slots of {each} bytes need {rows * each} bytes of device memory for the hot rows of a width-"
        f"{layout.width} cache; {device} has {free + idle} of {total} bytes free. A capacity of {fits} rows "
        f'("{fits * each // 2**20}MiB") fits'
    )
