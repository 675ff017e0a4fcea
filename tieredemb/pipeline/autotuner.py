"""Measures whether planning ahead pays: if a loop is bound by the host, there is nothing to hide, and planning ahead is
more work.

Steps are timed with and without it, by events on the GPU, which include what the GPU waits for. Results of a loop are
the same either way. Captured steps are timed, too: one that goes ahead does more on the host, and rows that are filled
share the bandwidth to cold storage with rows that are used in place.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tieredemb.step.agreement import Agreement

FIRST, REPEAT, LAST = 16, 32, 16384  # steps before a trial: before the first, until two agree, and at most
SPAN = 4  # steps that are timed in one span
SPANS = (2, 4, 2)  # spans of a trial: in the present way, the other way, and the present way again
WORTH = 1.03  # planning ahead has to save more than this, as it costs host time in any case
MOST_CUT = 4  # how often the end of a loop may cut a trial short
UNTIMED = 4  # steps after a switch that are not timed, beside those planned before it


class Autotuner:
    """Decides for the loops over one `device`, whose steps plan `depth` batches ahead if `ahead`. The thread that runs
    the loop calls it.

    A trial times the other way between two halves of the present one, so that changes meanwhile, as in a cache that
    fills, affect both. Hosts have slow periods longer than a trial: so a new finding is followed by another trial soon,
    and the times of both decide. One trial alone does not overrule two that agreed.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.ahead = True
        self.device = device
        self._untimed = UNTIMED + depth
        self._between = REPEAT
        self._left = FIRST  # steps until a trial begins
        self._found: bool | None = None  # by the last trial: whether to plan ahead
        self._spans: dict[bool, list[float]] = {True: [], False: []}  # for each way, of trials that are not confirmed
        self._stages: list[list[torch.cuda.Event]] = []  # of a trial: two successive events enclose a span
        self._wait = 0  # steps until the next event
        self._cut = 0  # how often a loop's end has cut a trial short

    def step(self) -> None:
        """Called before each step. Does not synchronise."""
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
        """Records the beginning or end of a span."""
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
        agreed, agrees = self._between > REPEAT, found == self._found  # the two trials before; this one with the last
        if agrees:
            self._between = min(8 * self._between, LAST)
            self._spans = {True: [], False: []}
        else:
            self._between = REPEAT
        self._found, self._left = found, self._between
        if found != self.ahead and (agrees or not agreed):
            self._switch()

    def leave(self) -> None:
        """Called when the loop has ended: the stage of a trial that was cut short is timed anew in the next loop. If
        loops are too short for that, there are no trials."""
        if not self._stages or self._is_timed:
            return
        self._stages[-1] = []
        self._wait, self._cut = self._untimed, self._cut + 1
        if self._cut > MOST_CUT:
            if len(self._stages) == 2:  # the other way was tried
                self.ahead = not self.ahead
            self._stages, self._cut, self._left = [], 0, LAST


class SharedAutotuner:
    """The autotuner of several ranks, which all plan alike: the first rank decides by its `autotuner`, if it has one,
    and announces that with its forwards. A rank without an autotuner, because of its storage, follows the others."""

    def __init__(self, autotuner: Autotuner | None, agreement: Agreement) -> None:
        self._autotuner, self._agreement = autotuner, agreement

    @property
    def ahead(self) -> bool:
        """Whether all ranks plan ahead, as of the last forward."""
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
    """Milliseconds of the spans between events."""
    return [float(begin.elapsed_time(end)) for begin, end in pairwise(events)]


def _usual(spans: list[float]) -> float:
    """The lower median, as some spans are disturbed."""
    return sorted(spans)[(len(spans) - 1) // 2]
