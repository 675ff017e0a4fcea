"""How long a GPU exchanges something by NCCL: kernels before and behind it read the time, in replays of a captured step
as well, where events cannot."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch

from tieredemb.kernels.compiler import kernel
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.streams import on_device

CLOCK = "sharding/exchange_clock.cu"
WORD, AT_ONCE = 8, 64  # bytes; exchanges that may be under way, on whatever streams


class ExchangeClock:
    """The time that exchanges have taken on `device`: each from when the GPU has come to it, until it has received
    everything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with no_inference():
            self._total = torch.zeros(1, dtype=torch.int64, device=device)
            self._begins = torch.zeros(AT_ONCE, dtype=torch.int64, device=device)
        self._places = itertools.cycle(range(self._begins.data_ptr(), self._begins.data_ptr() + WORD * AT_ONCE, WORD))
        kernel(CLOCK, "clock_note").prepare(device.index)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, something is exchanged on the current stream. Does not synchronise."""
        begin = next(self._places)
        with on_device(self._device):
            kernel(CLOCK, "clock_note")(1, 1, begin, 0)
            yield
            kernel(CLOCK, "clock_note")(1, 1, begin, self._total)

    @property
    def seconds(self) -> float:
        """In all. Synchronises."""
        return 1e-9 * int(self._total)
