"""Whether planning ahead pays, measured: where the host is what a loop waits for, there is nothing to hide, and
planning ahead is work of its own.

Steps are timed with it and without, by events on the GPU, which see both what the GPU does and what it waits for. The
numbers of a loop are the same either way. So are captured steps: one that goes ahead does more on the host, and shares
the way to cold storage between rows that come and rows that are used in place.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tieredemb.step.agreement import Agreement

FIRST, AGAIN, LAST = 16, 32, 16384  # steps before a trial: the first one, until two find the same, and then more
SPAN = 4  # steps that are timed as one
SPANS = (2, 4, 2)  # of a trial: as the loop goes, the other way, and as it goes again
WORTH = 1.03  # planning ahead has to save more than this: it costs the host in any case
MOST_CUT = 4  # times that the end of a loop may cut a trial short
UNTIMED = 4  # steps after a change that are not timed, beside those that were planned before it


class Autotuner:
    """Of the loops over one `device`, whose steps plan `depth` batches ahead if `ahead`. Its calls come from the thread
    that runs the loop.

    A trial has the other way between two halves of the first one: what changes meanwhile, as a cache does that fills,
    tells on both. Hosts have bad moments that are longer than a trial: so soon after one that finds what none has found
    before comes another one, and what both have timed decides. One trial alone does not overrule two that agreed.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.ahead = True
        self.device = device
        self._untimed = UNTIMED + depth
        self._between = AGAIN
        self._left = FIRST  # steps until a trial begins
        self._found: bool | None = None  # by the last trial: whether to plan ahead
        self._spans: dict[bool, list[float]] = {True: [], False: []}  # of trials that are not sure, in each way
        self._stages: list[list[torch.cuda.Event]] = []  # of a trial: between any two events is a span
        self._wait = 0  # steps until the next event
        self._cut = 0  # how often a loop's end has cut a trial short

    def step(self) -> None:
        """A step is about to begin. Does not synchronise."""
        if self._left:
            self._left -= 1
        elif self._wait:
            self._wait -= 1
        elif not self._is_timed:
            self._note()
        elif self._stages[-1][-1].query():
            self._decide()

    @property
    def _is_timed(self) -> bool:
        """Whether all spans of a trial have ended."""
        return len(self._stages) == len(SPANS) and len(self._stages[-1]) > SPANS[-1]

    def _note(self) -> None:
        """A span begins, or ends."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._stages = self._stages or [[]]
        self._stages[-1].append(event)
        self._wait = SPAN - 1
        if len(self._stages[-1]) > SPANS[len(self._stages) - 1] and len(self._stages) < len(SPANS):
            self._stages.append([])
            self._switch()

    def _switch(self) -> None:
        self.ahead, self._wait = not self.ahead, self._untimed

    def _decide(self) -> None:
        before, other, after = map(_spans, self._stages)
        self._stages, self._cut = [], 0
        self._spans[self.ahead] += before + after
        self._spans[not self.ahead] += other
        times = {way: _usual(spans) for way, spans in self._spans.items()}
        times[True] *= WORTH
        found = not self.ahead if times[not self.ahead] < times[self.ahead] else self.ahead
        agreed, agrees = self._between > AGAIN, found == self._found  # the two trials before; this one with the last
        if agrees:
            self._between = min(8 * self._between, LAST)
            self._spans = {True: [], False: []}
        else:
            self._between = AGAIN
        self._found, self._left = found, self._between
        if found != self.ahead and (agrees or not agreed):
            self._switch()

    def leave(self) -> None:
        """The loop has ended: what it was about to time of a trial is timed in the next one. Where loops are too short
        for that, there is no trial."""
        if not self._stages or self._is_timed:
            return
        self._stages[-1] = []
        self._wait, self._cut = self._untimed, self._cut + 1
        if self._cut > MOST_CUT:
            if len(self._stages) == 2:  # the other way was tried
                self.ahead = not self.ahead
            self._stages, self._cut, self._left = [], 0, LAST


class SharedAutotuner:
    """That of several ranks, which plan alike: as the first of them finds out by its `autotuner`, if it has one, and
    tells the others with its forwards. A rank without one, as its storage is another, does as they do."""

    def __init__(self, autotuner: Autotuner | None, agreement: Agreement) -> None:
        self._autotuner, self._agreement = autotuner, agreement

    @property
    def ahead(self) -> bool:
        """Whether all plan ahead, by the last forward."""
        return self._agreement.plans_ahead

    def step(self) -> None:
        """See `Autotuner.step`."""
        if self._autotuner is not None:
            self._autotuner.step()
            self._agreement.offer(ahead=self._autotuner.ahead)

    def leave(self) -> None:
        """See `Autotuner.leave`."""
        if self._autotuner is not None:
            self._autotuner.leave()
            self._agreement.offer(ahead=self._autotuner.ahead)


def _spans(events: list[torch.cuda.Event]) -> list[float]:
    """Milliseconds of the spans of one part."""
    return [float(begin.elapsed_time(end)) for begin, end in pairwise(events)]


def _usual(spans: list[float]) -> float:
    """The lower median: some are disturbed."""
    return sorted(spans)[(len(spans) - 1) // 2]
