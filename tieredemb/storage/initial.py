"""Initial values: a row that was never written is generated from (seed, table, id) when it is first needed.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), counter (id, block of four
columns, table), key seed. Normal values come from Wichura's AS 241 (PPND7, 1988) in float32. Only integer operations
and correctly rounded float operations are used, in a fixed order, so CPU and GPU generate the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.config import Array, Init, Normal, Uniform
from tieredemb.errors import UnsupportedError
from tieredemb.kernels import twin
from tieredemb.kernels.constants import NORMAL, UNIFORM

if TYPE_CHECKING:
    from tieredemb.storage.initial_cuda import DeviceInitialRows


@dataclass(frozen=True, kw_only=True)
class InitialTable:
    """One table of a key space. `start`: its first key · `number`: what the generator calls it · `padding_idx`: a row
    that starts as zeros · `first_id`, `id_step`: row k is what the generator calls id `first_id` + `id_step` · k."""

    start: int
    number: int
    init: Init
    padding_idx: int | None
    first_id: int = 0
    id_step: int = 1


def _parameters(init: Init) -> tuple[float, float]:
    """Those of the distribution; rows that were written need none, and are never generated."""
    if isinstance(init, Normal):
        return init.mean, init.std
    return (init.low, init.high) if isinstance(init, Uniform) else (0.0, 0.0)


class InitialRows:
    """Generates rows of one key space. `state_value`: what every word of optimizer state starts as, a float ·
    `has_last_step`: whether the last word is the step that the row stands at, and so starts as 0.

    With a CUDA `device` it generates rows there too; `generate` writes to host memory on every device.
    """

    def __init__(
        self,
        tables: Sequence[InitialTable],
        *,
        seed: int,
        state_value: float,
        device: torch.device,
        has_last_step: bool = False,
    ) -> None:
        pairs = [_parameters(t.init) for t in tables]
        padding = [-1 if t.padding_idx is None else t.start + t.padding_idx for t in tables]
        self.tables = (
            np.array([t.start for t in tables], np.int64),
            np.array([t.number for t in tables], np.uint32),
            np.array([NORMAL if isinstance(t.init, Normal) else UNIFORM for t in tables], np.int32),
            np.array(pairs, np.float32).reshape(-1, 2),
            np.array(padding, np.int64),
        )
        self._ids = np.array([(t.first_id, t.id_step) for t in tables], np.int64).reshape(-1, 2)
        self._seed = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)
        self._state_word = np.float32(state_value).view(np.uint32)
        self._has_last_step = has_last_step
        self._host: Any = twin(__name__, torch.device("cpu"))
        self._device: DeviceInitialRows | None = None
        if device.type == "cuda":
            from tieredemb.storage.initial_cuda import DeviceInitialRows

            self._device = DeviceInitialRows(
                self.tables,
                ids=self._ids,
                seed=self._seed,
                state_word=self._state_word,
                device=device,
                has_last_step=has_last_step,
            )

    def generate(self, keys: Array, rows: Array, weight: Array, state: Array, state_width: int) -> None:
        """Writes the initial row of keys[i] to weight[rows[i]] (carrier (·, D)) and to the first `state_width` words
        of state[rows[i]] (uint32). Synchronous."""
        self._host.generate(
            keys, rows, weight, state, state_width, self._state_word, self._seed, self._ids, self.tables
        )
        if self._has_last_step and state_width:
            state[rows, state_width - 1] = 0

    def state(self, state_width: int) -> Array:
        """What the state of each row starts as, uint32 (S,)."""
        words = np.full(state_width, self._state_word, np.uint32)
        if self._has_last_step:
            words[-1:] = 0
        return words

    def on_device(self) -> DeviceInitialRows:
        """What generates the rows on the GPU. Raises `UnsupportedError` where they were built for the CPU."""
        if self._device is None:
            raise UnsupportedError("these initial rows were built for the CPU; build them with the cache's device")
        return self._device
