"""CUDA twin of the initial values: rows are generated where they are wanted, without a word from the host."""

from __future__ import annotations

import functools

import numpy as np
import torch

from tieredemb.config import Array
from tieredemb.kernels.arguments import struct_type
from tieredemb.kernels.compiler import Kernel, blocks_for, options

_FILE = "storage/initial.cu"
_THREADS = 256
_MOST_BLOCKS = 2048  # some waves on the largest GPU: the kernels stride over the rest


@functools.cache
def _missed_kernel(dtype: torch.dtype, width: int) -> Kernel:
    return Kernel(_FILE, "rows_generate", options(dtype, width))


@functools.cache
def _range_kernel(dtype: torch.dtype, width: int) -> Kernel:
    return Kernel(_FILE, "rows_generate_range", options(dtype, width))


def _blocks(rows: int, width: int) -> int:
    quads = max(1, (width + 3) // 4)
    lanes = min(32, 1 << (quads - 1).bit_length())  # LANES of the kernels
    return blocks_for(rows * lanes, _THREADS, _MOST_BLOCKS)


class DeviceInitialRows:
    """The tables of one key space on a CUDA device, and the launches that generate their rows there.

    `tables`: the arrays of `InitialRows.tables` · `ids`: int64 (T, 2), what the generator calls the first row of each,
    and by how much it counts on. They are copied once, here. Nothing else synchronises.
    """

    def __init__(
        self,
        tables: tuple[Array, ...],
        *,
        ids: Array,
        seed: Array,
        state_word: np.uint32,
        device: torch.device,
        has_last_step: bool = False,
    ) -> None:
        start, number, kind, params, padding_key = tables
        held = {"start": start, "ids": ids, "number": number.view(np.int32), "kind": kind, "params": params}
        held["padding_key"] = padding_key
        self._generator = struct_type(_FILE, "Generator")(
            state_word=int(state_word), seed_low=int(seed[0]), seed_high=int(seed[1]), n_tables=len(start),
            has_last_step=int(has_last_step),
            **{name: torch.from_numpy(array).to(device) for name, array in held.items()},
        )  # fmt: skip

    def generate_missed(
        self,
        count: torch.Tensor | int,
        n: int,
        keys: torch.Tensor | int,
        slots: torch.Tensor | int,
        untouched: torch.Tensor | int,
        hot_weight: torch.Tensor,
        hot_state: torch.Tensor,
        cold_weight_address: int,
        cold_state_address: int,
        state_width: int,
        *,
        by_key: bool = True,
        some: int = 0,
    ) -> None:
        """Writes the initial rows of the missed keys that were never written, on the device. Does not synchronise.

        `count`: how many of the `n` are missed, int32 on the device · `keys`: int64 (n,) · `slots`: int32 (n,), the
        destination of each row: a slot of `hot_weight` (C, D) and `hot_state` (C, S), 32-bit words, or where negative
        the cold row of its key, or with `by_key=False` row r for −2 − r · `untouched`: uint8 (n,), not 0 where the row
        is to be generated; all of these tensors or addresses. Of a cold row all is written but its last state word, the
        score; the addresses may be 0 where no slot is negative. `some`: address of how many are to be generated, if the
        device knows that.
        """
        dtype, width = hot_weight.dtype, hot_weight.shape[1]
        _missed_kernel(dtype, width)(
            _blocks(n, width), _THREADS, count, some, keys, slots, untouched, hot_weight, hot_state,
            cold_weight_address, cold_state_address, by_key, state_width, self._generator,
        )  # fmt: skip

    def prepare_missed(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        """Begins to compile it; see `Kernel.prepare`."""
        _missed_kernel(dtype, width).prepare(device.index)

    def load_missed(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        """Compiles what `generate_missed` launches, for rows (width,) of `dtype`, unless it was."""
        _missed_kernel(dtype, width).load(device.index)

    def generate_range(
        self, first_key: int, first_row: int, n: int, weight: torch.Tensor, state: torch.Tensor, state_width: int
    ) -> None:
        """Writes the initial rows of the keys from `first_key` on to the rows from `first_row` on, n of them, of
        `weight` (·, D) and `state` (·, S), 32-bit words, on the device. Does not synchronise."""
        dtype, width = weight.dtype, weight.shape[1]
        _range_kernel(dtype, width)(
            _blocks(n, width), _THREADS, first_key, first_row, n, weight, state, state_width, self._generator
        )
