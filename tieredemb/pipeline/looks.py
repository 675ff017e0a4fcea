"""What several ranks find out of batches before a captured step computes them: their ids are looked at on a stream of
its own, which waits for the batch and for nothing else, while the GPU is busy with the steps before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tieredemb.errors import TieredEmbError
from tieredemb.kernels.streams import current_stream, on_stream
from tieredemb.pipeline.batches import tensors_of
from tieredemb.pipeline.lookups import LookupSpec
from tieredemb.step.agreement import Agreement, Looked

# has the current stream wait for a batch; returns whether it is known when that is there
Receive = Callable[[Any], bool]


class Looks:
    """Of batches that are to be computed on a `device`, by ranks with an `agreement`."""

    def __init__(self, device: torch.device, agreement: Agreement) -> None:
        self._agreement, self._device = agreement, device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._begun: list[tuple[Any, Looked]] = []  # batches, held so that no other takes their place in memory

    def begin(self, batch: Any, lookups: Callable[[Any], Sequence[LookupSpec]], receive: Receive) -> None:
        """Begins to look at what a batch's `lookups` will look up, unless that was done. Does not synchronise."""
        if not self._has(batch):
            looked: Looked
            try:
                of_ranks = [each.given for each in lookups(batch) if each.module.agreement is self._agreement]
                with self._looking(batch, receive):
                    looked = self._agreement.look_at(of_ranks)
            except Exception as error:  # of another form
                looked = _Failed(error)
            self._begun.append((batch, looked))

    def fits(self, batch: Any) -> bool:
        """Whether a batch that was begun with may be computed by a graph. Waits until that is known. Raises what is
        wrong with its ids."""
        return next(looked for known, looked in self._begun if known is batch).fits()

    def goes_ahead(self, batch: Any) -> bool:
        """The same of one that has yet to be asked for: it will be told then what is wrong with it."""
        try:
            return self._has(batch) and self.fits(batch)
        except Exception:
            return False

    def keep(self, batches: Sequence[Any]) -> None:
        """Forgets all but these, once nothing reads them any more."""
        begun, self._begun = self._begun, []
        for known, looked in begun:
            if any(known is batch for batch in batches):
                self._begun.append((known, looked))
            else:
                with contextlib.suppress(TieredEmbError):
                    looked.fits()

    def _has(self, batch: Any) -> bool:
        return any(known is batch for known, _ in self._begun)

    @contextlib.contextmanager
    def _looking(self, batch: Any, receive: Receive) -> Iterator[None]:
        """The stream on which ids are looked at is current."""
        current = current_stream(self._device.index)
        with on_stream(self._stream):
            # whoever has made a batch on the GPU has done so on the current stream, for all that is known
            if not receive(batch) and any(tensor.is_cuda for _, tensor in tensors_of(batch)):
                self._stream.wait_stream(current)
            yield


class _Failed:
    """What could not be looked at."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fits(self) -> bool:
        raise self._error
