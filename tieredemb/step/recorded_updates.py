"""Updates of eager steps on a GPU, recorded as graphs where they come again and again: of forwards whose plans are
recorded, which leave what an update reads in the same places each time, but for the gradients."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import torch

from tieredemb.kernels import recording
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recording import Recording, Repeats
from tieredemb.kernels.streams import current_stream
from tieredemb.step.recorded_plans import when_left

if TYPE_CHECKING:
    from tieredemb.cache.device.plan import OverflowRows
    from tieredemb.step.recorded_plans import Recordable, Recorded
    from tieredemb.tables.table_set import Place, TableSet

Key = tuple[object, ...]
MOST_UPDATES = 16  # that are recorded of one set of tables, those used last
ALIGNMENT = 16  # bytes, that kernels read at once of a gradient where it lies


class _Update:
    """A recorded update. `plans`: of its forwards, which keep what it reads · `kept`: what else it reads · `grads`: of
    each block the gradients put together, where they are of several forwards."""

    def __init__(
        self,
        plans: Sequence[Recorded],
        kept: Sequence[object],
        grads: Sequence[torch.Tensor | None],
        graph: Recording,
    ) -> None:
        self.plans = plans
        self.kept = kept
        self.grads = grads
        self.graph = graph
        self.stream = current_stream().cuda_stream  # whose memory `grads` are of

    def size_bytes(self) -> int:
        """Of what it keeps for itself."""
        return sum(grad.nbytes for grad in self.grads if grad is not None)


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
        calls: Sequence[Recordable],
        grads: Sequence[Sequence[torch.Tensor]],
        overflow: Sequence[OverflowRows],
        kept: Sequence[torch.Tensor],
        launch: Callable[[Sequence[Sequence[torch.Tensor]]], None],
    ) -> bool:
        """Updates by a replay of what `launch` launches for the gradients of `calls`, block by block, or those of each
        block put together; returns whether it did. `overflow`: where rows without a slot are, of each group · `kept`:
        tensors that it reads. The caller holds the rows, and their device is the current one."""
        plans = [call.recorded for call in calls]
        if any(plan is None for plan in plans) or torch.cuda.is_current_stream_capturing():
            return False
        single = [its[0] for its in grads if len(its) == 1]
        if not all(grad.numel() for its in grads for grad in its) or any(
            grad.data_ptr() % ALIGNMENT or not grad.is_contiguous() for grad in single
        ):
            return False
        made = cast("list[Recorded]", plans)
        key: Key = (
            *[plan.number for plan in made],
            # a plan with room for samples has updates for any number of them, as kernels read those that it has found
            *[grad.shape[1:] if len(its) == 1 else grad.shape for its in grads for grad in its],
            *[each.data_ptr() for each in kept],
            *[0 if away.records is None else away.records.data_ptr() for away in overflow],
            *[(away.weight, away.state) if away.uncached else None for away in overflow],
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
        with suppress(KeyError):  # another thread may have found the tables elsewhere, and forgotten it
            self._updates.move_to_end(key)
        for its, buffer in zip(grads, update.grads, strict=True):
            if buffer is not None:
                torch.cat(list(its), out=buffer)
        update.graph.replay([grad.data_ptr() for grad in single])
        for buffer in update.grads:
            if buffer is not None and torch._C._cuda_getCurrentRawStream(buffer.get_device()) != update.stream:
                buffer.record_stream(current_stream())
        return True

    @staticmethod
    def _record(
        plans: Sequence[Recorded],
        grads: Sequence[Sequence[torch.Tensor]],
        kept: Sequence[torch.Tensor],
        launch: Callable[[Sequence[Sequence[torch.Tensor]]], None],
    ) -> _Update:
        buffers: list[torch.Tensor | None] = []
        with no_inference():
            for its in grads:
                shape = sum(len(each) for each in its), its[0].shape[1]
                is_one = len(its) == 1
                buffers.append(None if is_one else torch.empty(shape, dtype=its[0].dtype, device=its[0].device))
        graph = Recording(grads[0][0].device, plans[0].compute_pool)
        with graph.recorded([its[0].data_ptr() for its in grads if len(its) == 1]):
            launch([its if buffer is None else [buffer] for its, buffer in zip(grads, buffers, strict=True)])
        return _Update(plans, [*kept], buffers, graph)


_UPDATES: weakref.WeakKeyDictionary[TableSet, RecordedUpdates] = weakref.WeakKeyDictionary()


def updates_of(tables: TableSet) -> RecordedUpdates:
    """Those of the set, where it is now."""
    found, place = _UPDATES.get(tables), tables.placed.now
    if found is None or found.place() is not place:
        found = _UPDATES[tables] = RecordedUpdates(place)
    return found
