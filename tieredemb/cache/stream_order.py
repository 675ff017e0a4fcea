"""The order of one GPU cache's work across streams: one that computes, and one beside it that plans ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class StreamOrder:
    """Calls may come on any stream: one that differs from the last call's waits for what that has queued.

    Plans made `ahead` wait for what the computing stream has queued before, and it does not wait for them but where it
    uses their rows, or touches the cache as a whole. Inside a capture only the capture's own work is waited for: torch
    lets the device finish all other before. All methods are called under the cache's lock, on its device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._handle = self._stream.cuda_stream
        self._is_ahead = False
        self._computing = self._stream  # while a plan is made ahead: the stream that it is made for
        # the last plan ahead, while the computing stream has not waited, and whether it is part of a capture
        self._planned: torch.cuda.Event | None = None
        self._planned_in_capture = False

    def compute(self) -> None:
        """The current stream goes on where the last computing one was."""
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        if handle == self._handle:
            return
        stream = torch.cuda.current_stream()
        if not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream, self._handle = stream, handle

    def whole(self) -> None:
        """As `compute`, behind all plans too."""
        self.compute()
        if not self._is_ahead:
            self._follow_plan()

    def _follow_plan(self) -> None:
        if self._planned is None or self._planned_in_capture != torch.cuda.is_current_stream_capturing():
            return
        self._planned.wait()
        self._planned = None

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Plans inside run on the current stream: behind all that was queued so far, as updates may have made victims
        dirty, and beside what comes from now on. In a capture the current stream has forked off it already."""
        computing = self._stream, self._handle
        stream = torch.cuda.current_stream()
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            stream.wait_stream(self._stream)
        if self._planned is not None and self._planned_in_capture == capturing:
            self._planned.wait()
        self._computing = self._stream
        self._stream, self._handle, self._is_ahead = stream, stream.cuda_stream, True
        try:
            yield
        finally:
            self._is_ahead = False
            self._stream, self._handle = computing
            self._planned, self._planned_in_capture = torch.cuda.Event(), capturing  # type: ignore[no-untyped-call]
            self._planned.record(stream)

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Tensors made inside are of the computing stream's memory, which outlives a plan made ahead: freed, they are
        reused behind what computes with them."""
        if not self._is_ahead or torch.cuda.is_current_stream_capturing():
            yield
            return
        planning = torch.cuda.current_stream()
        with torch.cuda.stream(self._computing):
            yield
        planning.wait_stream(self._computing)  # what was freed there just now may still be read

    def joined(self) -> None:
        """A capture is over, whose plans are part of what it computes."""
        if self._planned_in_capture:
            self._planned = None

    def planned(self) -> torch.cuda.Event | None:
        """What comes once the plan just made is done, if it was made ahead."""
        if not self._is_ahead:
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done
