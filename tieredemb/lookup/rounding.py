"""How weights are rounded into rows of 16 bits.

To nearest, an update that is smaller than half the gap between two neighbours is lost, even if it is repeated. Rounded
up or down at random, with the probability that keeps the mean, none is (Gupta et al., "Deep learning with limited
numerical precision", ICML 2015). The random bits are those of Philox4x32-10, keyed by the seed, with the counter (id,
step, table, block of eight elements and purpose): no state, and the same bits in any home, on a CPU and on a GPU. An
element takes 16 of them: bfloat16 is unbiased exactly, and float16 above 2⁻¹⁴; smaller ones, which have lost more than
16 bits, to 2⁻¹⁶ of a gap towards zero. Finite values stay finite.

An update, `max_norm` and catching up draw for different purposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from tieredemb.config import Array, TablePart
from tieredemb.kernels.arguments import StructValue, struct_type

if TYPE_CHECKING:
    from tieredemb.lookup.bags import KeySpace

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
MIX = 0x32C1A6E75F356495  # changes the seed, so that a row does not draw the bits that it was generated from


@dataclass(frozen=True)
class Draws:
    """What the random bits of a cache's rows depend on. `seed`: uint32 (2,) · `start`: int64 (T,), the first key of
    each table, ascending · `number`: uint32 (T,), the tables' numbers for the generator · `ids`: int64 (T, 2), the id
    of each table's first row for the generator, and the step from row to row."""

    seed: Array
    start: Array
    number: Array
    ids: Array

    def on_host(self, keys: Array, steps: Array) -> tuple[Array, ...]:
        """What a CPU's kernels are given to round by. `keys`: int64 (C,), of the rows · `steps`: int64 (T,)."""
        return keys, self.start, self.number, self.ids, self.seed, steps


def draws_of(space: KeySpace, parts: Sequence[TablePart], seed: int) -> Draws:
    """The draws of a cache with the tables of `space`, which are `parts` of larger ones."""
    mixed = seed ^ MIX
    words = np.array([mixed & 0xFFFFFFFF, mixed >> 32], np.uint32)
    numbers = np.array([part.number for part in parts], np.uint32)
    ids = np.array([(part.first, part.step) for part in parts], np.int64)
    return Draws(words, np.ascontiguousarray(space.start[:-1]), numbers, ids)


class DeviceDraws:
    """The same on a GPU, for the features of a key `space`. `resident`: of its tables, the slot of the first row of one
    that is resident, or −1 · `steps`: int64 (T,), taken by the tables of the cache."""

    def __init__(self, draws: Draws, space: KeySpace, resident: Sequence[int], steps: torch.Tensor) -> None:
        table = np.searchsorted(draws.start, space.first, side="right") - 1

        def upload(array: Array) -> torch.Tensor:
            return torch.from_numpy(array).to(steps.device)

        self._fields = {
            "seed_low": int(draws.seed[0]),
            "seed_high": int(draws.seed[1]),
            "first": upload(np.ascontiguousarray(space.first)),
            "resident": upload(np.array(resident, np.int64)[space.table]),
            "number": upload(draws.number[table].view(np.int32)),
            "table": upload(table.astype(np.int32)),
            "ids": upload(np.ascontiguousarray(draws.ids[table])),
            "steps": steps,
        }

    def of(self, file: str, key: torch.Tensor, names: torch.Tensor | None) -> StructValue:
        """As kernels of `file` take it. `key`: int64 (C,), of the slots · `names`: of rows without one, `Record`s."""
        keys: torch.Tensor | int = key if key.numel() else 0
        return struct_type(file, "Draws")(key=keys, records=0 if names is None else names, **self._fields)


def no_draws(file: str) -> StructValue:
    """What kernels of `file` take that round to nearest."""
    names = ("seed_low", "seed_high", "first", "resident", "number", "table", "ids", "key", "records", "steps")
    return struct_type(file, "Draws")(**dict.fromkeys(names, 0))
