"""Where the plan of one forward on a GPU lives: what it writes, and what the forward and its update read of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from tieredemb.kernels.streams import current_stream
from tieredemb.lookup.bags import Places
from tieredemb.lookup.device_bags import new_device_bags, new_faults, words_of
from tieredemb.tables.group import DeviceGroup


class CallMemory:
    """Of a forward of so many `ids` in each group, and of `batch` samples, all of the stream that is current when it is
    made. Several `blocks` are of one group each, which has ids of its own; else all look among the same ones.

    A later forward of as many may be planned into it once this one is over; captured steps find it where it was.
    `faults`, `reports`: of each group, and `fault`: those of all blocks · `bags`, `segments`, `trained` (int32 (N,)):
    of each group, those that `sorts` or `masks` asks for · `ids`: int64 (N,), what was planned, where a mask is made
    of it.
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
        # of each occurrence, where rows are not pooled, its number among as many for each feature: a bag of its own
        self.own_bag = None
        if not groups[0].config.pooled:
            self.own_bag = torch.empty(ids[0], dtype=torch.int32, device=device)
        self.trained = [
            torch.empty(n, dtype=torch.int32, device=device) if needed else None
            for n, needed in zip(ids, masks, strict=True)
        ]
        # what masks are made of, which may be once homes are known, behind what was given
        given = ids[0] if blocks == 1 else sum(ids)
        self.ids = torch.empty(given, dtype=torch.int64, device=device) if any(masks) else None
        self._pending: list[torch.cuda.Event] = []
        self.recorded_streams: set[int] = set()  # `record_stream` of its tensors was called with these
        self.planner: torch.cuda.Stream | None = None  # of a recorded plan, where that was replayed last

    def fits(self, groups: Sequence[DeviceGroup], ids: Sequence[int], batch: int, places: Places | None) -> bool:
        """Whether it is that of a forward of so many `ids` in each of these groups, and of `batch` samples, with
        features there."""
        same = self.groups == list(groups) and self.places == places
        return same and all((len(b.homes), b.batch) == (n, batch) for b, n in zip(self.bags, ids, strict=True))

    def planned(self, events: Iterable[torch.cuda.Event | None]) -> None:
        """The current stream has planned into it; `events`: those of other streams that have."""
        if torch.cuda.is_current_stream_capturing():
            return  # a replay is one whole
        self._pending = [event for event in events if event is not None]
        if torch._C._cuda_getCurrentRawStream(self.fault.get_device()) != self.stream.cuda_stream:
            self._pending.append(torch.cuda.Event())
            self._pending[-1].record(current_stream())

    def joined(self) -> None:
        """What computes with it waits for the plan by itself."""
        self._pending = []

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        parts = (value for part in (*self.bags, *self.segments) if part is not None for value in vars(part).values())
        single = self.words, self.own_bag, self.ids
        return [value for value in (*single, *parts, *self.trained) if isinstance(value, torch.Tensor)]

    def __del__(self) -> None:
        """Dropped before its forward came, it is reused behind the plan that still writes to it."""
        if sys.is_finalizing():
            return
        for event in getattr(self, "_pending", ()):
            self.stream.wait_event(event)
        planner = getattr(self, "planner", None)
        if planner is not None and planner != self.stream:
            self.stream.wait_stream(planner)
