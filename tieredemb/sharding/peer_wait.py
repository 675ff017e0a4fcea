"""What kernels have in common that wait for other ranks, in memory that all of them have mapped.

As NCCL's collectives do, such a kernel fails where a rank does not arrive within a long time. Where ranks exchange
nothing any more it waits for none (`collectives.end_waits`).
"""

from __future__ import annotations

import torch

from tieredemb.kernels.arguments import StructValue, struct_type
from tieredemb.kernels.collectives import end_with, is_over
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.streams import current_stream

PATIENCE, MOST = 2, 2**63 - 1  # × the ranks' timeout, within which a host raises a better error; nanoseconds
_ENDED: list[torch.Tensor] = []  # words in host memory, which kernels may read for as long as the process lives


class PeerWait:
    """Kernels of one kind, which all ranks launch equally often, and in the same order among their other exchanges.
    `timeout`: in seconds."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._device, self._timeout = device, timeout
        with no_inference():
            self._count, self._waited = torch.zeros((2, 1), dtype=torch.int64, device=device)  # times; nanoseconds
            self._ended = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        _ENDED.append(self._ended)
        self._stream = current_stream(device.index)  # of the last launch
        end_with(self)

    def _patience(self, file: str) -> StructValue:
        """How long a kernel of a `.cu` file waits."""
        longest = min(int(PATIENCE * self._timeout * 1e9), MOST)
        return struct_type(file, "Patience")(ended=self._ended.data_ptr(), longest=longest)

    def wait_stream(self) -> None:
        """The current stream waits for the stream of the last launch, and for all that was launched behind it by now.
        Does nothing in a capture."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = current_stream(self._device.index)
        if stream.cuda_stream != self._stream.cuda_stream:
            stream.wait_stream(self._stream)
            self._stream = stream

    @property
    def wait_seconds(self) -> float:
        """How long the GPU has waited for other ranks. Synchronises."""
        return 1e-9 * int(self._waited)

    def ends_in_time(self) -> bool:
        """See `collectives.Waiting`."""
        done = torch.cuda.Event()
        done.record(self._stream)
        return is_over(done, self._timeout)

    def end(self) -> None:
        """See `collectives.Waiting`."""
        self._ended.fill_(1)
