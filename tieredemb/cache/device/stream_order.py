"""The order of one GPU cache's work across streams: one that computes, one that plans ahead, and a side stream."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tieredemb.kernels.inference import inference
from tieredemb.kernels.streams import current_stream, on_stream, own_stream


class ResumePoint(NamedTuple):
    """Where work was begun that continues there later. `after`: the event that a plan on another thread waits for ·
    `inference`: whether in torch's inference mode."""

    stream: torch.cuda.Stream
    after: torch.cuda.Event | None
    inference: bool


class StreamOrder:
    """Calls may be made on any stream: a stream that differs from the last call's waits for the work queued there.

    Plans made `ahead` wait for the work that the computing stream had queued before; it waits for them only before it
    uses their rows, or the cache as a whole. Inside a capture only the capture's own work is waited for: torch lets the
    device finish all other work before. All methods are called on the cache's device: `ahead`, `place` and `resumed`
    under the lock of its plans, `memory` by any thread, the others under the lock of its rows.

    `plans_wait`: whether plans wait for the host, so that other threads may make them.
    """

    def __init__(self, device: torch.device, *, plans_wait: bool) -> None:
        self._index = device.index
        self._plans_wait = plans_wait
        self._stream = current_stream(device.index)  # the computing stream
        self._handle = self._stream.cuda_stream
        self._planner = 0  # the thread that plans ahead, while one does
        self._on_thread = False  # whether that is not the thread that computes
        self._after: torch.cuda.Event | None = None  # the event that its plan waits for
        # the last plan ahead, until the computing stream waits for it, and whether it is part of a capture
        self._planned: torch.cuda.Event | None = None
        self._planned_in_capture = False
        self._touched: torch.cuda.Event | None = None
        # the event after the plans that are being made ahead, and its stream
        self._done: torch.cuda.Event | None = None
        self._done_on: torch.cuda.Stream | None = None
        self._arrived: torch.cuda.Event | None = None  # the event that the computing stream waited for last
        self._arrived_on = 0

    def compute(self) -> None:
        """The current stream becomes the computing one, and waits for the last one."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if handle == self._handle:
            return
        stream = current_stream()
        if not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream, self._handle = stream, handle

    def whole(self) -> None:
        """As `compute`, and waits for all plans, too. A plan made ahead waits for the computing stream instead, as
        updates may have made its victims dirty: in a capture, for its part that computes. That batch may be released
        already, so that the plan takes its slots, while its update has yet to run."""
        if self._planner == 0 or not self._is_ahead:
            self.compute()
            if self._planned is not None and self._is_current:
                self._planned.wait(current_stream())
                self._planned = None
        elif torch.cuda.is_current_stream_capturing():
            with on_stream(self._stream):
                is_captured = torch.cuda.is_current_stream_capturing()
            if is_captured:
                current_stream().wait_stream(self._stream)
        elif not self._on_thread:
            current_stream().wait_stream(self._stream)
        elif self._touched is not None:
            self._touched.wait(current_stream())

    def after_plan(self) -> None:
        """Called after a plan was launched. If plans wait for the host, this stream waits for work that other streams
        have computed meanwhile, and the next plan follows both."""
        if not self._plans_wait:
            return
        if not self._is_ahead:
            self.compute()
        self.touched()

    def touched(self) -> None:
        """Called when the current stream has planned, or used the cache as a whole: a plan on another thread, which
        waits for as little as possible, waits for that."""
        if self._plans_wait and not torch.cuda.is_current_stream_capturing():
            self._touched = torch.cuda.Event()
            self._touched.record(current_stream())

    @property
    def is_behind(self) -> bool:
        """Whether work launched now waits for all that the computing stream has queued: a plan on another thread does
        not."""
        return not (self._is_ahead and self._on_thread)

    @property
    def _is_ahead(self) -> bool:
        return self._planner != 0 and self._planner == threading.get_ident()

    @property
    def _is_current(self) -> bool:
        """Whether the last plan ahead is part of the present capture; or, without one, was not part of a capture."""
        return self._planned_in_capture == torch.cuda.is_current_stream_capturing()

    def queued(self) -> torch.cuda.Event:
        """An event after the work that the computing stream has queued."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    @contextlib.contextmanager
    def ahead(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Inside, plans run on the current stream, beside what computes from now on; on another thread, they wait for
        `after`."""
        if self._is_ahead and after is self._after:  # one of several plans made in one go
            yield
            return
        stream = current_stream()
        capturing = torch.cuda.is_current_stream_capturing()
        if after is not None:
            after.wait(stream)  # and for nothing else: the computation goes on
        if self._planned is not None and self._is_current:
            self._planned.wait(current_stream())
        outside = self._planner, self._on_thread, self._after, self._done
        self._planner, self._on_thread, self._after = threading.get_ident(), after is not None, after
        done = torch.cuda.Event()
        self._done, self._done_on = done, stream
        try:
            yield
        finally:
            done.record(stream)
            self._planned, self._planned_in_capture = done, capturing
            self._planner, self._on_thread, self._after, self._done = outside

    def resume_point(self) -> ResumePoint:
        """Where the current plan is made, for `resumed`."""
        return ResumePoint(current_stream(), self._after, torch.is_inference_mode_enabled())

    @contextlib.contextmanager
    def resumed(self, point: ResumePoint) -> Iterator[None]:
        """Inside, a plan begun ahead is continued, on its stream."""
        with inference(point.inference), on_stream(point.stream), self.ahead(point.after):
            yield

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Tensors made inside outlast a plan made ahead: their memory belongs to the computing stream, so that it is
        reused only after computations with them. On another thread, which must not wait for work queued since, it
        belongs to the planning stream."""
        if not self._is_ahead or self._on_thread or torch.cuda.is_current_stream_capturing():
            yield
            return
        planning, computing = current_stream(), self._stream
        with on_stream(computing):
            yield
        planning.wait_stream(computing)  # memory freed there just now may still be read

    def joined(self) -> None:
        """Called after a capture, which the plans made in it are part of."""
        if self._planned_in_capture:
            self._planned = None

    def planned(self) -> torch.cuda.Event | None:
        """The event after the plans that are being made ahead, recorded after the last; None outside of `ahead`."""
        return self._done if self._is_ahead else None

    def arrive(self, planned: torch.cuda.Event) -> None:
        """Has the current stream wait for plans that were made ahead."""
        if planned is self._done:  # another thread is still planning others of its batch
            planned.record(self._done_on)
            planned.wait(current_stream())
            return
        has_waited = planned is self._arrived and self._arrived_on == self._handle
        if not has_waited or torch.cuda.is_current_stream_capturing():
            planned.wait(current_stream())
            self._arrived, self._arrived_on = planned, self._handle


class SideStream:
    """A stream for work that may run while rows move, after a mark of the current stream. Called under the lock of
    plans."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._mark = torch.cuda.Event()

    def mark(self) -> None:
        """The next `run` waits for the work that the current stream has queued by now."""
        self._mark.record(current_stream())

    def run(self, function: Callable[[], object]) -> torch.cuda.Event:
        """Calls `function` on the side stream, after the last `mark`; returns the event after its work."""
        if self._stream is None:
            self._stream = own_stream(self, self._device, -1)
        self._mark.wait(self._stream)
        done = torch.cuda.Event()
        try:
            with on_stream(self._stream):
                function()
        except BaseException:
            # so that a capture ends with this error, and not with one about streams
            current_stream().wait_stream(self._stream)
            raise
        done.record(self._stream)
        return done
