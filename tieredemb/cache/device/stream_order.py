"""The order of one GPU cache's work across streams: one that computes, and one beside it that plans ahead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class StreamOrder:
    """Calls may come on any stream: one that differs from the last call's waits for what that has queued.

    Plans made `ahead` wait for what the computing stream had queued before, and it does not wait for them but where it
    uses their rows, or touches the cache as a whole. Inside a capture only the capture's own work is waited for: torch
    lets the device finish all other before. All methods are called on the cache's device: `ahead` under the lock of its
    plans, `memory` by any thread, the others under the lock of its rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._stream = torch.cuda.current_stream(device)  # the one that computes
        self._handle = self._stream.cuda_stream
        self._planner = 0  # the thread that plans ahead, while one does
        self._is_apart = False  # whether it is another than the one that computes
        self.after: torch.cuda.Event | None = None  # what its plan comes behind
        # the last plan ahead, while the computing stream has not waited, and whether it is part of a capture
        self._planned: torch.cuda.Event | None = None
        self._planned_in_capture = False
        self._touched: torch.cuda.Event | None = None

    def compute(self) -> None:
        """The current stream goes on where the last computing one was."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if handle == self._handle:
            return
        stream = torch.cuda.current_stream()
        if not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream, self._handle = stream, handle

    def whole(self) -> None:
        """As `compute`, behind all plans too. A plan made ahead comes behind what computes instead, as updates may have
        made its victims dirty; in a capture it has forked off that already."""
        if not self._is_ahead:
            self.compute()
            if self._planned is not None and self._is_current:
                self._planned.wait()
                self._planned = None
        elif self._is_apart:
            if self._touched is not None:
                self._touched.wait()
        elif not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self._stream)

    def after_plan(self) -> None:
        """A plan is launched that took its time: what has computed on other streams meanwhile comes before what follows
        on this one, and the next plan behind both."""
        if not self._is_ahead:
            self.compute()
        self.touched()

    def touched(self) -> None:
        """The current stream has planned, or touched the cache as a whole: a plan by a thread of its own, which waits
        for no more than it has to, comes behind that."""
        if not torch.cuda.is_current_stream_capturing():
            self._touched = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._touched.record()

    @property
    def _is_ahead(self) -> bool:
        return self._planner != 0 and self._planner == threading.get_ident()

    @property
    def _is_current(self) -> bool:
        """Whether the last plan ahead belongs to what is captured now, or nothing is and neither did it."""
        return self._planned_in_capture == torch.cuda.is_current_stream_capturing()

    def queued(self) -> torch.cuda.Event:
        """What comes once the computing stream is through with what it has queued."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    @contextlib.contextmanager
    def ahead(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Plans inside run on the current stream, beside what computes from now on; a thread of its own comes behind
        `after`."""
        stream = torch.cuda.current_stream()
        capturing = torch.cuda.is_current_stream_capturing()
        if after is not None:
            after.wait()  # and for no more: what computes goes on
        if self._planned is not None and self._is_current:
            self._planned.wait()
        outside = self._planner, self._is_apart, self.after
        self._planner, self._is_apart, self.after = threading.get_ident(), after is not None, after
        try:
            yield
        finally:
            self._planner, self._is_apart, self.after = outside
            self._planned, self._planned_in_capture = torch.cuda.Event(), capturing  # type: ignore[no-untyped-call]
            self._planned.record(stream)

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Tensors made inside outlast a plan made ahead: they are of the computing stream's memory and, freed, reused
        behind what computes with them. A thread of its own, which must not wait for what is queued since, takes its own
        stream's."""
        if not self._is_ahead or self._is_apart or torch.cuda.is_current_stream_capturing():
            yield
            return
        planning, computing = torch.cuda.current_stream(), self._stream
        with torch.cuda.stream(computing):
            yield
        planning.wait_stream(computing)  # what was freed there just now may still be read

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
