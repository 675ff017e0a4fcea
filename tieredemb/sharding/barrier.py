"""A barrier of the GPUs of several ranks, in memory that all of them have mapped.

A kernel writes a word into each rank's memory, and waits for the words of the others. As NCCL's collectives do, it
fails where a rank does not arrive within a long time. Where ranks exchange nothing any more it waits for none
(`collectives.end_waits`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tieredemb.kernels.arguments import struct_type
from tieredemb.kernels.collectives import end_with, is_over
from tieredemb.kernels.compiler import kernel
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.streams import current_stream, on_device

BARRIER = "sharding/barrier.cu"
WARP = 32
PATIENCE, MOST = 2, 2**63 - 1  # × the ranks' timeout, within which a host raises a better error; nanoseconds
_ENDED: list[torch.Tensor] = []  # words in host memory, which kernels may read for as long as the process lives


class Barrier:
    """All ranks call `meet` equally often, and in the same order among their other exchanges. `begins`: of each rank
    the address of W words, zero, in memory that this `rank` has mapped · `timeout`: in seconds."""

    def __init__(self, device: torch.device, begins: Sequence[int], rank: int, timeout: float) -> None:
        self._device, self._timeout, self._ranks = device, timeout, len(begins)
        with no_inference():
            self._begins = torch.tensor(begins, dtype=torch.int64, device=device)
            self._count, self._waited = torch.zeros((2, 1), dtype=torch.int64, device=device)  # times; nanoseconds
            self._ended = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        _ENDED.append(self._ended)
        self._meeting = struct_type(BARRIER, "Meeting")(begins=self._begins, ranks=self._ranks, rank=rank)
        self._patience = min(int(PATIENCE * timeout * 1e9), MOST)
        self._stream = current_stream(device.index)  # of the last launch
        end_with(self)

    def meet(self) -> None:
        """The current stream waits until all ranks have arrived here: what each has launched before on its stream is
        over then."""
        with on_device(self._device):
            if not torch.cuda.is_current_stream_capturing():
                self.wait_stream()
            threads = -(-self._ranks // WARP) * WARP
            kernel(BARRIER, "ranks_meet")(
                1, threads, self._meeting, self._count, self._waited, self._ended.data_ptr(), self._patience
            )

    def wait_stream(self) -> None:
        """The current stream waits for the stream of the last barrier, and for all that was launched behind it by
        now."""
        stream = current_stream(self._device.index)
        if stream.cuda_stream != self._stream.cuda_stream:
            stream.wait_stream(self._stream)
            self._stream = stream

    @property
    def wait_seconds(self) -> float:
        """How long the GPU has waited in it. Synchronises."""
        return 1e-9 * int(self._waited)

    def ends_in_time(self) -> bool:
        """See `collectives.Waiting`."""
        done = torch.cuda.Event()
        done.record(self._stream)
        return is_over(done, self._timeout)

    def end(self) -> None:
        """See `collectives.Waiting`."""
        self._ended.fill_(1)
