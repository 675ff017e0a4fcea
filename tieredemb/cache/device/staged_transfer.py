"""The transfers of single plans over cold rows that the host alone reaches: begun, and, where plans are recorded, what
is replayed of them on either side of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from tieredemb.cache.device.plan import BatchPlan
from tieredemb.cache.device.staging import ExpectedMisses, HostPhase, MissReports, RowRoom
from tieredemb.cache.device.transfer import RecordedTransfer
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recording import Recording
from tieredemb.storage.base import RowLayout


class Staged(Protocol):
    """What brings rows in (`cache.device.staged`)."""

    def launch_start(self, plan: BatchPlan, expected: ExpectedMisses, number: int, room: RowRoom) -> None:
        """The first half of a plan's transfer."""

    def launch_finish(self, plan: BatchPlan, count: int, weight: torch.Tensor, state: torch.Tensor) -> None:
        """The second half, of so many missed rows."""

    def expect(self, reports: MissReports, ids: int) -> ExpectedMisses:
        """What will be told of the misses of a plan."""

    @property
    def leaving_room(self) -> Sequence[int]:
        """Where rows that leave are put, as addresses."""

    def await_report(self, plan: BatchPlan, host: HostPhase) -> None:
        """Behind the replay of the first half."""


class RecordedStaged(RecordedTransfer):
    """See `RecordedTransfer`: of a plan of `ids` ids, of which all that are missed get slots; where some do not, the
    second half is launched. It is told what is missed in memory of its own, and keeps what a plan uses between its
    halves."""

    def __init__(self, staged: Staged, ids: int, layout: RowLayout, device: torch.device) -> None:
        self._staged = staged
        self._layout = layout
        self._plan: BatchPlan | None = None
        self._finish: Recording | None = None
        self._reports = MissReports()
        self._expected = self._reports.expect(ids)
        with no_inference():
            # of numbers and addresses that differ each time, for which addresses here stand: that of the report, and
            # those of the room for rows that leave
            words = torch.empty(1 + len(RowRoom._fields), dtype=torch.int64, device=device)
        self._number, *self._room = words.unbind()

    def start(self, plan: BatchPlan) -> None:
        self._plan, self.changing = plan, [self._number, *self._room]
        room = RowRoom(*(each.data_ptr() for each in self._room))
        self._staged.launch_start(plan, self._expected, self._number.data_ptr(), room)

    def record_finish(self, graph: Recording) -> None:
        plan = self._plan
        if plan is None:
            return
        device, layout = self._number.device, self._layout
        with no_inference():
            weight = torch.empty((1, layout.columns), dtype=layout.device_dtype, device=device)
            state = torch.empty((1, layout.state_width + 1), dtype=torch.int32, device=device)
        with graph.recorded([weight.data_ptr(), state.data_ptr()]):
            self._staged.launch_finish(plan, plan.missed.n, weight, state)
            if plan.beside:
                plan.beside()
        self._finish = graph

    def expect(self) -> list[int]:
        if self._plan is None:
            return []
        self._expected = self._staged.expect(self._reports, self._plan.missed.n)
        return [self._expected.report.number, *self._staged.leaving_room]

    def begun(self) -> BatchPlan | None:
        if self._plan is None:
            return None
        plan = replace(self._plan)
        self._staged.await_report(plan, HostPhase(self._expected, self._finish))
        return plan

    def size_bytes(self) -> int:
        kept = 0 if self._plan is None else self._plan.missed.size_bytes
        return self._reports.size_bytes() + kept
