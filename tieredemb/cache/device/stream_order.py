"""The order of one GPU cache's work across streams: one that computes, one that plans ahead, and one beside both for
what need not be waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tieredemb.kernels.inference import inference
from tieredemb.kernels.streams import current_stream, on_stream, own_stream


class ResumePoint(NamedTuple):
    """Where work was begun that is to go on there later. `after`: what a plan on a thread of its own comes behind ·
    `inference`: whether in torch's inference mode."""

    stream: torch.cuda.Stream
    after: torch.cuda.Event | None
    inference: bool


class StreamOrder:
    """Calls may come on any stream: one that differs from the last call's waits for what that has queued.

    Plans made `ahead` wait for what the computing stream had queued before, and it does not wait for them but where it
    uses their rows, or touches the cache as a whole. Inside a capture only the capture's own work is waited for: torch
    lets the device finish all other before. All methods are called on the cache's device: `ahead`, `place` and
    `resumed` under the lock of its plans, `memory` by any thread, the others under the lock of its rows.

    `plans_wait`: whether plans wait for the host, so that threads of their own may make them.
    """

    def __init__(self, device: torch.device, *, plans_wait: bool) -> None:
        self._index = device.index
        self._plans_wait = plans_wait
        self._stream = current_stream(device.index)  # the one that computes
        self._handle = self._stream.cuda_stream
        self._planner = 0  # the thread that plans ahead, while one does
        self._on_thread = False  # whether it is on a thread of its own, and not the one that computes
        self._after: torch.cuda.Event | None = None  # what its plan comes behind
        # the last plan ahead, while the computing stream has not waited, and whether it is part of a capture
        self._planned: torch.cuda.Event | None = None
        self._planned_in_capture = False
        self._touched: torch.cuda.Event | None = None
        # comes once the plans are done that are made ahead now, on which stream
        self._done: torch.cuda.Event | None = None
        self._done_on: torch.cuda.Stream | None = None
        self._arrived: torch.cuda.Event | None = None  # what the computing stream has waited for last
        self._arrived_on = 0

    def compute(self) -> None:
        """The current stream goes on where the last computing one was."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if handle == self._handle:
            return
        stream = current_stream()
        if not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream, self._handle = stream, handle

    def whole(self) -> None:
        """As `compute`, behind all plans too. A plan made ahead comes behind what computes instead, as updates may have
        made its victims dirty: in a capture, behind what has computed there before. That may be over on the books, so
        that the plan takes its rows, while its update is yet to run."""
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
        """A plan was launched. If that took its time, what has computed on other streams meanwhile comes before what
        follows on this one, and the next plan behind both."""
        if not self._plans_wait:
            return
        if not self._is_ahead:
            self.compute()
        self.touched()

    def touched(self) -> None:
        """The current stream has planned, or touched the cache as a whole: a plan by a thread of its own, which waits
        for no more than it has to, comes behind that."""
        if self._plans_wait and not torch.cuda.is_current_stream_capturing():
            self._touched = torch.cuda.Event()
            self._touched.record(current_stream())

    @property
    def is_behind(self) -> bool:
        """Whether what is launched now comes behind all that the computing stream has queued: a plan by a thread of its
        own does not."""
        return not (self._is_ahead and self._on_thread)

    @property
    def _is_ahead(self) -> bool:
        return self._planner != 0 and self._planner == threading.get_ident()

    @property
    def _is_current(self) -> bool:
        """Whether the last plan ahead belongs to what is captured now, or nothing is and neither did it."""
        return self._planned_in_capture == torch.cuda.is_current_stream_capturing()

    def queued(self) -> torch.cuda.Event:
        """What comes once the computing stream is through with what it has queued."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    @contextlib.contextmanager
    def ahead(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Plans inside run on the current stream, beside what computes from now on; a thread of its own comes behind
        `after`."""
        if self._is_ahead and after is self._after:  # one of several that are planned in one go
            yield
            return
        stream = current_stream()
        capturing = torch.cuda.is_current_stream_capturing()
        if after is not None:
            after.wait(stream)  # and for no more: what computes goes on
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
        """What was begun ahead goes on inside, where it was begun."""
        with inference(point.inference), on_stream(point.stream), self.ahead(point.after):
            yield

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Tensors made inside outlast a plan made ahead: they are of the computing stream's memory and, freed, reused
        behind what computes with them. A thread of its own, which must not wait for what is queued since, takes its own
        stream's."""
        if not self._is_ahead or self._on_thread or torch.cuda.is_current_stream_capturing():
            yield
            return
        planning, computing = current_stream(), self._stream
        with on_stream(computing):
            yield
        planning.wait_stream(computing)  # what was freed there just now may still be read

    def joined(self) -> None:
        """A capture is over, whose plans are part of what it computes."""
        if self._planned_in_capture:
            self._planned = None

    def planned(self) -> torch.cuda.Event | None:
        """What comes once the plans are done that are made ahead now, if any are: it is recorded behind the last."""
        return self._done if self._is_ahead else None

    def arrive(self, planned: torch.cuda.Event) -> None:
        """What computes on the current stream from here on waits for plans that were made ahead."""
        if planned is self._done:  # others of its batch are yet being planned, by another thread
            planned.record(self._done_on)
            planned.wait(current_stream())
            return
        has_waited = planned is self._arrived and self._arrived_on == self._handle
        if not has_waited or torch.cuda.is_current_stream_capturing():
            planned.wait(current_stream())
            self._arrived, self._arrived_on = planned, self._handle


class SideStream:
    """A stream for what may run beside the movement of rows, once the current stream has come to a mark. Called under
    the lock of plans."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._mark = torch.cuda.Event()

    def mark(self) -> None:
        """What is run next comes behind what the current stream has queued by now."""
        self._mark.record(current_stream())

    def run(self, function: Callable[[], object]) -> torch.cuda.Event:
        """Calls `function` on the side stream, behind the last `mark`; returns what comes once its work is done."""
        if self._stream is None:
            self._stream = own_stream(self, self._device, -1)
        self._mark.wait(self._stream)
        done = torch.cuda.Event()
        try:
            with on_stream(self._stream):
                function()
        except BaseException:
            # a capture is to end with this error, not with another
            current_stream().wait_stream(self._stream)
            raise
        done.record(self._stream)
        return done
