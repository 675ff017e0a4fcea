"""Where the plan of one forward on a GPU lives: what it writes, and what the forward and its update read of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from tieredemb.kernels.streams import current_stream
from tieredemb.lookup.bags import Places
from tieredemb.lookup.device_bags import new_device_bags, new_fault, words_of
from tieredemb.tables.group import DeviceGroup


class CallMemory:
    """Of a forward of `ids` ids and `batch` samples, all of the stream that is current when it is made.

    A later forward of as many may be planned into it once this one is over; captured steps find it where it was.
    `bags`, `segments`, `trained` (int32 (N,)): of each group, those that `sorts` or `masks` asks for · `ids`: int64
    (N,), what was planned, where a mask is made of it.
    """

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        ids: int,
        batch: int,
        places: Places | None,
        *,
        sorts: Sequence[bool],
        masks: Sequence[bool],
    ) -> None:
        device = groups[0].device_space.device
        self.groups = list(groups)
        self.stream = current_stream(device.index)
        self.words = new_fault(device)
        self.fault, self.report = self.words[: words_of("Fault")], self.words[words_of("Fault") :]
        self.places = places
        self.bags = [
            new_device_bags(ids, group.device_space, batch, is_all=group.space.is_all(places)) for group in groups
        ]
        self.segments = [
            group.lookup.new_segments(ids, device) if wanted else None
            for group, wanted in zip(groups, sorts, strict=True)
        ]
        # of each occurrence, where rows are not pooled, its number among as many for each feature: a bag of its own
        self.own_bag = None
        if not groups[0].config.pooled:
            self.own_bag = torch.empty(ids, dtype=torch.int32, device=device)
        self.trained = [torch.empty(ids, dtype=torch.int32, device=device) if wanted else None for wanted in masks]
        # what masks are made of, which may be once homes are known, behind what was given
        self.ids = torch.empty(ids, dtype=torch.int64, device=device) if any(masks) else None
        self._pending: list[torch.cuda.Event] = []
        self.told: set[int] = set()  # streams that use it, of which the allocator knows until it is freed
        self.planner: torch.cuda.Stream | None = None  # of a recorded plan, where that was replayed last

    def fits(self, groups: Sequence[DeviceGroup], ids: int, batch: int, places: Places | None) -> bool:
        """Whether it is that of a forward of `ids` ids and `batch` samples in these groups, with features there."""
        same = self.groups == list(groups) and self.places == places
        return same and all((len(b.homes), b.batch) == (ids, batch) for b in self.bags)

    def planned(self, aside: Iterable[torch.cuda.Event | None]) -> None:
        """The current stream has planned into it; `aside`: what comes once other streams have."""
        if torch.cuda.is_current_stream_capturing():
            return  # a replay is one whole
        self._pending = [event for event in aside if event is not None]
        if torch._C._cuda_getCurrentRawStream(self.fault.get_device()) != self.stream.cuda_stream:
            self._pending.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
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
        """Given up before its forward came, it is reused behind the plan that still writes to it."""
        if sys.is_finalizing():
            return
        for event in getattr(self, "_pending", ()):
            self.stream.wait_event(event)
        planner = getattr(self, "planner", None)
        if planner is not None and planner != self.stream:
            self.stream.wait_stream(planner)
