"""A barrier of the GPUs of several ranks: a kernel writes a word into each rank's memory, and waits for the words of
the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tieredemb.kernels.arguments import struct_type
from tieredemb.kernels.compiler import kernel
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.streams import on_device
from tieredemb.sharding.peer_wait import PeerWait

BARRIER = "sharding/barrier.cu"
WARP = 32


class Barrier(PeerWait):
    """`begins`: of each rank the address of W words, zero, in memory that this `rank` has mapped."""

    def __init__(self, device: torch.device, begins: Sequence[int], rank: int, timeout: float) -> None:
        super().__init__(device, timeout)
        with no_inference():
            self._begins = torch.tensor(begins, dtype=torch.int64, device=device)
        self._threads = -(-len(begins) // WARP) * WARP
        self._meeting = struct_type(BARRIER, "Meeting")(begins=self._begins, ranks=len(begins), rank=rank)
        self._limits = self._patience(BARRIER)

    def meet(self) -> None:
        """The current stream waits until all ranks have arrived here: what each has launched before on its stream is
        over then."""
        with on_device(self._device):
            self.wait_stream()
            kernel(BARRIER, "ranks_meet")(1, self._threads, self._meeting, self._count, self._waited, self._limits)
