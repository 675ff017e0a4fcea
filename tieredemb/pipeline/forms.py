"""The forms of batches that a captured step has graphs for. A form is the shapes of a batch's tensors, but for how many
ids there are: a smaller last batch has another one, and so have the requests of a service."""

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
MOST_FORMS = 8  # that have graphs, those used last
MOST_COUNTED = 64  # forms that have none, the last ones
TIMES = 2  # that a form comes before it gets buffers of its own


class Forms(Generic[R]):
    """Of each form the buffers, and the rings by how many batches they go ahead. `buffers`: of the first form ·
    `agreement`: of the ranks that do the step together, if several do. Their graphs have one form: what a rank sends is
    as large as the graphs of the others say."""

    def __init__(
        self, step: StepFunction[R], buffers: Buffers, agreement: Agreement | None, summary: StepSummary
    ) -> None:
        self._step, self._agreement, self._summary = step, agreement, summary
        self._first = buffers.form
        self._kept: OrderedDict[Hashable, tuple[Buffers, dict[int, Ring[R]]]] = OrderedDict()
        self._times: OrderedDict[Hashable, int] = OrderedDict()
        self._turn_to(buffers, {})

    def ring(self, reach: int) -> Ring[R]:
        """That of the present form which goes so many batches ahead."""
        ring = self._rings.get(reach)
        if ring is None:
            captures = self._agreement is None or self._buffers.form == self._first
            ring = self._rings[reach] = Ring(
                self._step, self._buffers, reach, self._agreement, self._summary, captures=captures
            )
        return ring

    def known(self, reach: int) -> Ring[R] | None:
        """That ring, if there is one yet."""
        return self._rings.get(reach)

    def takes(self, batch: Any) -> bool:
        """Whether `batch` has the present form, and no more ids than there is room for. One that no buffers could take
        is for the rings to refuse."""
        return self._buffers.takes(batch)

    def change(self, batch: Any) -> bool:
        """Turns to the form of a `batch` that the present one does not take, or gives this room for more ids. Returns
        False for a form that has not come often enough: it is to be run as the function."""
        self.drop_plans()
        form = self._buffers.form_of(batch)
        buffers, rings = self._kept.get(form, (None, {}))
        if buffers is None:
            times = self._times[form] = self._times.pop(form, 0) + 1
            if len(self._times) > MOST_COUNTED:
                self._times.popitem(last=False)
            if times < TIMES and self._agreement is None:
                return False
            buffers = self._buffers.of_form_of(batch)
        elif not buffers.takes(batch):
            buffers, rings = buffers.larger_for(batch), {}
        self._turn_to(buffers, rings)
        return True

    def _turn_to(self, buffers: Buffers, rings: dict[int, Ring[R]]) -> None:
        self._buffers, self._rings = buffers, rings
        self._kept[buffers.form] = buffers, rings
        self._kept.move_to_end(buffers.form)
        if len(self._kept) > MOST_FORMS:
            displaced, _ = self._kept.popitem(last=False)
            self._times[displaced] = -MOST_COUNTED  # it has to come more often than others before it displaces one

    def drop_plans(self) -> None:
        """Drops the plans of the batches of the next calls, which are all of the present form."""
        for ring in list(self._rings.values()):
            ring.drop_plans()
