"""Whether planning ahead pays, measured: where the host is what a loop waits for, there is nothing to hide, and
planning ahead is work of its own.

Steps are timed with it and without, by events on the GPU, which see both what the GPU does and what it waits for. The
numbers of a loop are the same either way.
"""

from __future__ import annotations

from itertools import pairwise

import torch

FIRST, LAST = 16, 16384  # steps from one trial to the next: more each time
SPAN, SPANS = 4, 4  # steps that are timed as one, and how often in each way
WORTH = 1.03  # planning ahead has to save more than this: it costs the host in any case
SETTLE = 4  # steps after a change that are not timed, beside those that were planned before it


class Pace:
    """Of the loops over one `device`, whose steps plan `depth` batches ahead if `ahead`. Its calls come from the thread
    that runs the loop."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self.ahead = True
        self._device = device
        self._settle = SETTLE + depth
        self._between = FIRST
        self._left = FIRST  # steps until a trial begins
        self._events: dict[bool, list[torch.cuda.Event]] = {}  # of a trial, by whether steps planned ahead
        self._wait = 0  # steps until the next of them

    def step(self) -> None:
        """A step is about to begin. Does not synchronise."""
        if self._left:
            self._left -= 1
            return
        if self._wait:
            self._wait -= 1
            return
        events = self._events.setdefault(self.ahead, [])
        if len(events) <= SPANS:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            events.append(event)
            self._wait = SPAN - 1
            if len(events) > SPANS and len(self._events) == 1:
                self._turn(not self.ahead)
        elif events[-1].query():  # type: ignore[no-untyped-call]
            times = {ahead: _usual(each) for ahead, each in self._events.items()}
            times[True] *= WORTH
            self._events = {}
            self._between = min(16 * self._between, LAST)
            self._left = self._between
            if times[not self.ahead] < times[self.ahead]:
                self._turn(not self.ahead)

    def _turn(self, ahead: bool) -> None:
        self.ahead, self._wait = ahead, self._settle

    def leave(self) -> None:
        """The loop has ended: a trial that is under way begins anew with the next one."""
        if self._events:
            self.ahead = next(iter(self._events))  # as it was before
            self._events, self._left, self._wait = {}, self._settle, 0


def _usual(events: list[torch.cuda.Event]) -> float:
    """Milliseconds of the second fastest span: one may be lucky, and some are disturbed."""
    spans = [float(begin.elapsed_time(end)) for begin, end in pairwise(events)]  # type: ignore[no-untyped-call]
    return sorted(spans)[1]
