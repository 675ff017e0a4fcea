"""Ids that the ranks of one host send each other by a kernel of our own, through memory that all of them have mapped.

A collective of NCCL does the same, and takes the host several times as long to launch. One kernel writes a rank's
blocks into the memory of the others, waits for theirs, and copies them to where they are read.
"""

from __future__ import annotations

import torch

from tieredemb.kernels.arguments import struct_type
from tieredemb.kernels.compiler import blocks_for, kernel
from tieredemb.kernels.constants import REGION_HEAD
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.spread import RowSpread
from tieredemb.kernels.streams import on_device
from tieredemb.sharding.peer_wait import PeerWait

EXCHANGE = "sharding/peer_exchange.cu"
THREADS, MOST_BLOCKS = 256, 64  # all at once on a GPU, beside other kernels


def words_of_region(capacity: int) -> int:
    """How many words a rank has in the memory of another one, to send it `capacity` words at once."""
    return REGION_HEAD + 2 * capacity


class PeerExchange(PeerWait):
    """An all-to-all in blocks of one size, of `capacity` words at most. `regions`: where this `rank` has its region of
    `words_of_region` on each rank, which begins with zeros."""

    def __init__(self, device: torch.device, regions: RowSpread, rank: int, timeout: float) -> None:
        super().__init__(device, timeout)
        self.capacity = (regions.each - REGION_HEAD) // 2
        with no_inference():
            self._blocks = torch.zeros(2, dtype=torch.int32, device=device)
        self._regions = struct_type(EXCHANGE, "Regions")(
            begins=regions.begins, capacity=self.capacity, ranks=len(regions.begins), rank=rank
        )
        self._limits = self._patience(EXCHANGE)
        with on_device(device):
            kernel(EXCHANGE, "blocks_exchange").load(device.index)  # a capture may launch it first

    def send(self, received: torch.Tensor, given: torch.Tensor) -> None:
        """Sends each rank its block of `given`, int64 (W, N), where `N` is equal on all ranks and `capacity` at most;
        writes to `received`, int64 (W, N), what each has sent to this rank. Does not synchronise."""
        each = given.shape[1]
        assert each <= self.capacity
        with on_device(self._device):
            self.wait_stream()
            kernel(EXCHANGE, "blocks_exchange")(
                blocks_for(max(1, each), THREADS, MOST_BLOCKS), THREADS, self._regions, given, received, each,
                self._count, self._blocks, self._waited, self._limits,
            )  # fmt: skip
