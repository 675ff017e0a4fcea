"""Updates of eager steps on a GPU, recorded as graphs where they come again and again: of forwards whose plans are
recorded, which leave what an update reads in the same places each time, but for the gradients."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from tieredemb.kernels import recording
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recording import Recording, Repeats
from tieredemb.kernels.streams import current_stream
from tieredemb.step.recorded_plans import when_left

if TYPE_CHECKING:
    from tieredemb.cache.device.plan import OverflowRows
    from tieredemb.step.device_call import DeviceCall
    from tieredemb.step.recorded_plans import Recorded
    from tieredemb.tables.table_set import Place, TableSet

Key = tuple[object, ...]
MOST_UPDATES = 16  # that are recorded of one set of tables, those used last
ALIGNMENT = 16  # bytes, that kernels read at once of a gradient where it lies


class _Update:
    """A recorded update. `plans`: of its forwards, which keep what it reads · `kept`: what else it reads · `grad`: the
    gradients put together, where they are of several forwards."""

    def __init__(
        self, plans: Sequence[Recorded], kept: Sequence[object], grad: torch.Tensor | None, graph: Recording
    ) -> None:
        self.plans = plans
        self.kept = kept
        self.grad = grad
        self.graph = graph
        self.stream = current_stream().cuda_stream  # whose memory `grad` is of

    def size_bytes(self) -> int:
        """Of what it keeps for itself."""
        return 0 if self.grad is None else self.grad.nbytes


class RecordedUpdates:
    """Those of one set of tables, or of all that share its caches, while they are in one place."""

    def __init__(self, place: Place) -> None:
        self.place = when_left(place, self)
        self._keys: Repeats[Key] = Repeats()
        self._updates: OrderedDict[Key, _Update] = OrderedDict()
        self._disturbed = 0  # recordings that have failed

    def forget(self) -> None:
        """The tables are elsewhere: nothing keeps what was there."""
        self._updates.clear()

    def run(
        self,
        calls: Sequence[DeviceCall],
        grads: Sequence[torch.Tensor],
        overflow: Sequence[OverflowRows],
        kept: Sequence[torch.Tensor],
        launch: Callable[[Sequence[torch.Tensor]], None],
    ) -> bool:
        """Updates by a replay of what `launch` launches for the gradients of `calls`, or those put together; returns
        whether it did. `overflow`: where rows without a slot are, of each group · `kept`: tensors that it reads. The
        caller holds the rows, and their device is the current one."""
        plans = [call.recorded for call in calls]
        if any(plan is None for plan in plans) or torch.cuda.is_current_stream_capturing():
            return False
        if (len(grads) == 1 and grads[0].data_ptr() % ALIGNMENT) or not all(grad.numel() for grad in grads):
            return False
        made = cast("list[Recorded]", plans)
        key: Key = (
            *[plan.number for plan in made],
            *[grad.shape for grad in grads],
            *[each.data_ptr() for each in kept],
            *[0 if away.records is None else away.records.data_ptr() for away in overflow],
            *[(away.weight, away.state) if away.slotless else None for away in overflow],
        )
        update = self._updates.get(key)
        if update is None:
            if self._disturbed == recording.MOST_DISTURBED or self._keys.count(key) <= recording.TIMES:
                return False
            try:
                update = self._record(made, grads, kept, launch)
            except Exception as error:
                recording.note_failure(error)
                self._disturbed += 1
                return False
            self._updates[key] = update
            calls[0].parts[0].group.cache.recorded.add(update)
            if len(self._updates) > MOST_UPDATES:
                self._keys.put_off(self._updates.popitem(last=False)[0])
        self._updates.move_to_end(key)
        if update.grad is None:
            update.graph.replay([grads[0].data_ptr()])
        else:
            torch.cat(list(grads), out=update.grad)
            update.graph.replay([])
            if torch._C._cuda_getCurrentRawStream(update.grad.get_device()) != update.stream:
                update.grad.record_stream(current_stream())
        return True

    @staticmethod
    def _record(
        plans: Sequence[Recorded],
        grads: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        launch: Callable[[Sequence[torch.Tensor]], None],
    ) -> _Update:
        grad = None
        if len(grads) > 1:
            with no_inference():
                shape = sum(len(each) for each in grads), grads[0].shape[1]
                grad = torch.empty(shape, dtype=grads[0].dtype, device=grads[0].device)
        graph = Recording(grads[0].device, plans[0].compute_pool)
        with graph.recorded([grads[0]] if grad is None else []):
            launch(grads if grad is None else [grad])
        return _Update(plans, [*kept], grad, graph)


_UPDATES: weakref.WeakKeyDictionary[TableSet, RecordedUpdates] = weakref.WeakKeyDictionary()


def updates_of(tables: TableSet) -> RecordedUpdates:
    """Those of the set, where it is now."""
    found, place = _UPDATES.get(tables), tables.placed.now
    if found is None or found.place() is not place:
        found = _UPDATES[tables] = RecordedUpdates(place)
    return found
