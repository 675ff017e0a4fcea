"""Tensors of a call that is made on one stream of a GPU, and used on others: who uses them waits, and the allocator is
told."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tieredemb.kernels.streams import current_stream


class StreamUse:
    """Of tensors on a `device`, which are made on the stream that is current now. On a CPU there is nothing to do."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index if device.type == "cuda" else None
        # the stream that uses them now
        self._last = None if self._index is None else current_stream(self._index)
        self._made: torch.cuda.Event | None = None

    def record_made(self) -> None:
        """Other streams are to wait for what was launched on this one by now."""
        if self._index is not None:
            self._made = torch.cuda.Event()
            self._made.record(current_stream(self._index))

    @property
    def event(self) -> torch.cuda.Event | None:
        """That for which they wait, if there is any."""
        return self._made

    def arrive(self) -> None:
        """The current stream waits for that, and with it all that comes."""
        if self._index is not None and self._made is not None:
            self._made.wait(current_stream(self._index))
        self.mark_arrived()

    def mark_arrived(self) -> None:
        """Nothing need wait for that any more."""
        self._made = None

    def join(self) -> None:
        """The current stream waits for all that the one has launched that has used them last."""
        if self._index is not None and self._last is not None:
            stream = current_stream(self._index)
            if stream.cuda_stream != self._last.cuda_stream:
                stream.wait_stream(self._last)

    def record_stream(self, tensors: Iterable[torch.Tensor], given: Iterable[torch.Tensor] = ()) -> None:
        """The current stream uses the `tensors` from now on, some of which may have been made on the stream before, and
        what it is `given` by others. Does not synchronise."""
        if self._index is None:
            return
        stream = current_stream(self._index)
        for tensor in given:
            tensor.record_stream(stream)
        if self._last is not None and stream.cuda_stream == self._last.cuda_stream:
            return
        self._last = stream
        if self._made is not None:
            self._made.wait(stream)
        for tensor in tensors:
            tensor.record_stream(stream)
