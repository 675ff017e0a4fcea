"""Tensors of a call that are made on one stream of a GPU, and used on others: those wait, and the allocator is
notified.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tieredemb.kernels.streams import current_stream


class StreamUse:
    """Tensors on a `device`, which are made on the present current stream. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index if device.type == "cuda" else None
        # the stream that has used them last
        self._last = None if self._index is None else current_stream(self._index)
        self._made: torch.cuda.Event | None = None

    def record_made(self) -> None:
        """Other streams will wait for what was launched on this one by now."""
        if self._index is not None:
            self._made = torch.cuda.Event()
            self._made.record(current_stream(self._index))

    @property
    def event(self) -> torch.cuda.Event | None:
        """The event for which they wait, if there is one."""
        return self._made

    def arrive(self) -> None:
        """The current stream waits for it, and nothing need wait again."""
        if self._index is not None and self._made is not None:
            self._made.wait(current_stream(self._index))
        self.mark_arrived()

    def mark_arrived(self) -> None:
        """Nothing need wait for it any more."""
        self._made = None

    def join(self) -> None:
        """The current stream waits for all launches of the stream that has used the tensors last."""
        if self._index is not None and self._last is not None:
            stream = current_stream(self._index)
            if stream.cuda_stream != self._last.cuda_stream:
                stream.wait_stream(self._last)

    def record_stream(self, tensors: Iterable[torch.Tensor], given: Iterable[torch.Tensor] = ()) -> None:
        """The current stream uses the `tensors` from now on, some of which may have been made on the stream before, and
        the `given` ones of others. Does not synchronise."""
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
