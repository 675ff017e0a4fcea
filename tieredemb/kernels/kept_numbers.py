"""Numbers of the host that kernels on a GPU read, which are often the same ones again."""

from __future__ import annotations

import torch

from tieredemb.kernels.streams import outside_capture

MOST = 64


class KeptNumbers:
    """Arrays of a `dtype` on a `device`. Arrays requested in a capture are kept for good, as the graph uses their
    memory; of others the last ones, each for the stream on which it was sent."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._last: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}  # by stream
        self._captured: dict[tuple[int, ...], torch.Tensor] = {}

    def get(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """The numbers on the device, (K,). Does not synchronise. In a capture, numbers that were not requested shortly
        before need memory, which a capture may refuse."""
        made = self._captured.get(numbers)
        if made is not None:
            return made
        captures = torch.cuda.is_current_stream_capturing()
        key = torch._C._cuda_getCurrentRawStream(self._device.index), numbers
        made = self._last.pop(key, None)
        if made is None and captures:  # which begins behind all streams
            made = next((each for (_, known), each in list(self._last.items()) if known == numbers), None)
        if made is None:
            with outside_capture(self._device):
                host = torch.tensor(numbers, dtype=self._dtype, device="cpu").pin_memory()
                made = host.to(self._device, non_blocking=True)
        if captures:
            self._captured[numbers] = made
        else:
            self._last[key] = made  # the last one now
            if len(self._last) > MOST:
                self._last.pop(next(iter([*self._last])), None)
        return made
