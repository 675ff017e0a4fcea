"""The memory of a plan on a GPU: the plan writes it, and the forward and its update read it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from tieredemb.kernels.streams import current_stream
from tieredemb.lookup.bags import Places
from tieredemb.lookup.device_bags import new_device_bags, new_faults, words_of
from tieredemb.tables.group import DeviceGroup


class CallMemory:
    """Memory for a forward of so many `ids` in each group, and of `batch` samples, allocated on the current stream.
    With several `blocks`, each group has ids of its own; else all groups have the same ids.

    Once the forward is over, another of the same size may be planned into it, as in captured steps, which need the same
    addresses. `faults`, `reports`: of each group · `fault`: of all blocks · `bags`: of each group · `segments`,
    `trained` (int32 (N,)): of each group, if `sorts` or `masks` says so · `ids`: int64 (N,), the planned ids, if a mask
    is made of them.
    """

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        ids: Sequence[int],
        batch: int,
        places: Places | None,
        *,
        blocks: int,
        sorts: Sequence[bool],
        masks: Sequence[bool],
    ) -> None:
        device = groups[0].device_space.device
        self.groups = list(groups)
        self.stream = current_stream(device.index)
        self.words, fault_words = new_faults(blocks, device), blocks * words_of("Fault")
        self.fault = self.words[:fault_words]
        self.faults: Sequence[torch.Tensor] = [self.fault] * len(groups)
        self.reports: Sequence[torch.Tensor] = [self.words[fault_words:]] * len(groups)
        if blocks > 1:
            self.faults = self.fault.view(blocks, -1).unbind()
            self.reports = self.words[fault_words:].view(blocks, -1).unbind()
        self.places = places
        self.bags = [
            new_device_bags(n, group.device_space, batch, is_all=group.space.is_all(places))
            for group, n in zip(groups, ids, strict=True)
        ]
        self.segments = [
            group.lookup.new_segments(n, device) if needed else None
            for group, n, needed in zip(groups, ids, sorts, strict=True)
        ]
        # if rows are not pooled, each occurrence is a bag of its own: its number among those of each feature
        self.own_bag = None
        if not groups[0].config.pooled:
            self.own_bag = torch.empty(ids[0], dtype=torch.int32, device=device)
        self.trained = [
            torch.empty(n, dtype=torch.int32, device=device) if needed else None
            for n, needed in zip(ids, masks, strict=True)
        ]
        # masks are made once homes are known, when the inputs may have been overwritten
        given = ids[0] if blocks == 1 else sum(ids)
        self.ids = torch.empty(given, dtype=torch.int64, device=device) if any(masks) else None
        self._pending: list[torch.cuda.Event] = []
        self.recorded_streams: set[int] = set()  # streams with which `record_stream` of its tensors was called
        self.planner: torch.cuda.Stream | None = None  # of a recorded plan, the stream of its last replay

    def fits(self, groups: Sequence[DeviceGroup], ids: Sequence[int], batch: int, places: Places | None) -> bool:
        """Whether it was made for so many `ids` in each of these groups, `batch` samples, and features at `places`."""
        same = self.groups == list(groups) and self.places == places
        return same and all((len(b.homes), b.batch) == (n, batch) for b, n in zip(self.bags, ids, strict=True))

    def planned(self, events: Iterable[torch.cuda.Event | None]) -> None:
        """Called when the current stream has planned into it. `events`: after the work of other streams."""
        if torch.cuda.is_current_stream_capturing():
            return  # the whole replay is on one stream
        self._pending = [event for event in events if event is not None]
        if torch._C._cuda_getCurrentRawStream(self.fault.get_device()) != self.stream.cuda_stream:
            self._pending.append(torch.cuda.Event())
            self._pending[-1].record(current_stream())

    def joined(self) -> None:
        """Called when the computing stream waits for the plan by itself."""
        self._pending = []

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors."""
        parts = (value for part in (*self.bags, *self.segments) if part is not None for value in vars(part).values())
        single = self.words, self.own_bag, self.ids
        return [value for value in (*single, *parts, *self.trained) if isinstance(value, torch.Tensor)]

    def __del__(self) -> None:
        """If it is freed before its forward, its memory must not be reused before the plan has written to it."""
        if sys.is_finalizing():
            return
        for event in getattr(self, "_pending", ()):
            self.stream.wait_event(event)
        planner = getattr(self, "planner", None)
        if planner is not None and planner != self.stream:
            self.stream.wait_stream(planner)
