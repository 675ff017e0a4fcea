"""Updates of eager steps on a GPU that recur, recorded as graphs: their forwards' plans are recorded, so all that an
update reads has the same addresses each time, except for the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recorder import Recorder
from tieredemb.kernels.recording import Recording
from tieredemb.kernels.streams import current_stream

if TYPE_CHECKING:
    from tieredemb.cache.device.plan import OverflowRows
    from tieredemb.step.device_call import DeviceCall, PlanRecording
    from tieredemb.tables.table_set import TableSet

Grads = Sequence[Sequence[torch.Tensor]]  # for each block the gradients of all forwards, or one joined
Key = tuple[object, ...]
MOST_UPDATES = 16  # recorded for one set of tables: the last ones used
ALIGNMENT = 16  # bytes that kernels read at once from a gradient in place


def replay_update(
    tables: TableSet,
    calls: Sequence[DeviceCall],
    grads: Grads,
    overflow: Sequence[OverflowRows],
    kept: Sequence[torch.Tensor],
    launch: Callable[[Grads], None],
) -> bool:
    """Updates `tables`, or all that share their caches, by a replay of the launches of `launch` for the gradients of
    `calls`; returns False if it did not. `overflow`: for each group, where rows without a slot are · `kept`: tensors
    that the update reads. The caller holds the locks of the rows, whose device is the current one."""
    plans = [call.recorded for call in calls if call.recorded is not None]
    if len(plans) < len(calls) or torch.cuda.is_current_stream_capturing():
        return False
    if not all(grad.numel() for block in grads for grad in block) or any(
        block[0].data_ptr() % ALIGNMENT or not block[0].is_contiguous() for block in grads if len(block) == 1
    ):
        return False
    key: Key = (
        *[plan.number for plan in plans],
        # a plan with a capacity for samples takes any number of them, as kernels read its results
        *[grad.shape[1:] if len(block) == 1 else grad.shape for block in grads for grad in block],
        *[each.data_ptr() for each in kept],
        *[0 if rows.records is None else rows.records.data_ptr() for rows in overflow],
        *[(rows.weight, rows.state) if rows.uncached else None for rows in overflow],
    )
    recorded = tables.placed.now.recorded
    recorder: Recorder[Key, RecordedUpdate] | None = recorded.get(tables)
    if recorder is None:
        recorder = recorded[tables] = Recorder(MOST_UPDATES)
    update = recorder.find(key)
    if update is None:
        make = functools.partial(RecordedUpdate, plans, kept, grads, launch)
        update = recorder.record(key, make, calls[0].parts[0].group.cache.recorded)
    if update is None:
        return False
    update.replay(grads)
    return True


class RecordedUpdate:
    """A recorded update. It keeps what it reads alive: results of the `plans`, and `kept`; for several forwards also a
    buffer for each block's joined gradients."""

    def __init__(
        self,
        plans: Sequence[PlanRecording],
        kept: Sequence[torch.Tensor],
        grads: Grads,
        launch: Callable[[Grads], None],
    ) -> None:
        self._plans, self._kept = plans, [*kept]
        self._buffers: list[torch.Tensor | None] = []
        with no_inference():
            for block in grads:
                shape = sum(len(each) for each in block), block[0].shape[1]
                is_one = len(block) == 1
                self._buffers.append(
                    None if is_one else torch.empty(shape, dtype=block[0].dtype, device=block[0].device)
                )
        self._stream = current_stream().cuda_stream  # the stream on which the buffers were allocated
        self._graph = Recording(grads[0][0].device, plans[0].compute_pool)
        self._record(grads, launch)

    def _record(self, grads: Grads, launch: Callable[[Grads], None]) -> None:
        with self._graph.recorded([block[0].data_ptr() for block in grads if len(block) == 1]):
            launch([block if buffer is None else [buffer] for block, buffer in zip(grads, self._buffers, strict=True)])

    def is_free(self) -> bool:
        """True: nothing is kept between launches."""
        return True

    def replay(self, grads: Grads) -> None:
        """Updates by these gradients."""
        for block, buffer in zip(grads, self._buffers, strict=True):
            if buffer is not None:
                torch.cat(list(block), out=buffer)
        self._graph.replay([block[0].data_ptr() for block in grads if len(block) == 1])
        for buffer in self._buffers:
            if buffer is not None and torch._C._cuda_getCurrentRawStream(buffer.get_device()) != self._stream:
                buffer.record_stream(current_stream())

    def size_bytes(self) -> int:
        """Bytes of its buffers."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)
