"""The forms of batches that a captured step has graphs for. A form is the shapes of a batch's tensors, without the
number of ids: a smaller last batch has another form, and so have the requests of a service."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from tieredemb.pipeline.buffers import Buffers
from tieredemb.pipeline.captured import StepFunction
from tieredemb.pipeline.ring import Ring
from tieredemb.pipeline.summary import StepSummary
from tieredemb.step.agreement import Agreement

R = TypeVar("R")
MOST_FORMS = 8  # forms that are kept: the first one, and the last ones used
MOST_COUNTED = 64  # other forms that are counted: the last ones used
TIMES = 2  # how often a form is seen before it is kept
TIMES_DISPLACED = 16  # the same for a displaced form, so that alternating forms do not displace one another


class Forms(Generic[R]):
    """For each form the buffers, and rings by how many batches they go ahead. One form is the present one. `buffers`:
    of the first form · `agreement`: of the ranks, if several run the step. These keep only the first form, as a graph
    of one rank exchanges with the graphs of the others."""

    def __init__(
        self, step: StepFunction[R], buffers: Buffers, agreement: Agreement | None, summary: StepSummary
    ) -> None:
        self._step, self._agreement, self._summary = step, agreement, summary
        self._first = buffers.form
        self._kept: OrderedDict[Hashable, tuple[Buffers, dict[int, Ring[R]]]] = OrderedDict()
        self._times: OrderedDict[Hashable, int] = OrderedDict()
        self._select(buffers, {})

    def ring(self, reach: int) -> Ring[R]:
        """The ring of the present form that goes `reach` batches ahead."""
        ring = self._rings.get(reach)
        if ring is None:
            ring = self._rings[reach] = Ring(self._step, self._buffers, reach, self._agreement, self._summary)
        return ring

    def ring_if_made(self, reach: int) -> Ring[R] | None:
        """The same; None if it was not made yet."""
        return self._rings.get(reach)

    def has_other_shapes(self, batch: Any) -> bool:
        """Whether a batch has another form than the present one, or more ids than the buffers hold. False for a batch
        that no form takes: the rings refuse it."""
        return self._buffers.has_other_shapes(batch)

    def grow(self, batch: Any) -> bool:
        """Enlarges the buffers of the present form for `batch`, if the batch has this form; returns whether it has."""
        if self._buffers.form_of(batch) != self._buffers.form:
            return False
        self.drop_plans()
        self._select(self._buffers.of_form_of(batch), {})
        return True

    def change(self, batch: Any) -> bool:
        """Switches to the form of a `batch` with other shapes, with buffers for all its ids. Returns False if the form
        was not seen often enough to be kept."""
        self.drop_plans()
        form = self._buffers.form_of(batch)
        buffers, rings = self._kept.get(form, (None, {}))
        if buffers is None:
            times = self._times[form] = self._times.pop(form, 0) + 1
            if len(self._times) > MOST_COUNTED:
                self._times.popitem(last=False)
            if times < TIMES:
                return False
            buffers = self._buffers.of_form_of(batch)
        elif buffers.has_other_shapes(batch):
            buffers, rings = buffers.of_form_of(batch), {}
        self._select(buffers, rings)
        return True

    def drop_plans(self) -> None:
        """Drops the plans of the batches of the next calls, which are all of the present form."""
        for ring in list(self._rings.values()):
            ring.drop_plans()

    def _select(self, buffers: Buffers, rings: dict[int, Ring[R]]) -> None:
        self._buffers, self._rings = buffers, rings
        self._kept[buffers.form] = buffers, rings
        self._kept.move_to_end(buffers.form)
        if len(self._kept) > MOST_FORMS:
            displaced = next(form for form in self._kept if form != self._first)
            del self._kept[displaced]
            self._times.pop(displaced, None)  # moved to the end, as the last one used
            self._times[displaced] = TIMES - TIMES_DISPLACED
