"""A captured step of several ranks that plans the batch which it computes: all replay their graphs, or all capture
them, or all run the function.

What they do they agree on before each step, between hosts, while their GPUs are busy with the step before.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

from tieredemb.kernels.collectives import hold, is_over
from tieredemb.kernels.streams import on_device, on_stream, own_stream
from tieredemb.pipeline.batches import tensors_of
from tieredemb.pipeline.buffers import waits_to_load
from tieredemb.pipeline.captured import StepFunction
from tieredemb.pipeline.uncapturable import explain
from tieredemb.step.agreement import Agreement

R = TypeVar("R")
REPLAYS, CAPTURES = 1, 2  # what a rank could do: all do the first that all can


class StepTogether(Generic[R]):
    """The step of this rank. It plans the batch that it computes."""

    def __init__(self, step: StepFunction[R], agreement: Agreement) -> None:
        self._step, self._agreement = step, agreement
        self._buffers = step.buffers.another()
        self._left = step.eager_steps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: R | None = None
        self._ran: torch.cuda.Event | None = None  # comes once the last replay is over
        with on_device(step.device):
            self._beside = own_stream(self, step.device, -1)

    def ends_in_time(self) -> bool:
        """See `Holder`."""
        return self._ran is None or is_over(self._ran, self._agreement.timeout)

    def free(self) -> None:
        """Gives the graph up, before the process group whose collectives it holds; the step is captured anew if it is
        called again."""
        graph, self._graph, self._result = self._graph, None, None
        if graph is not None:
            graph.reset()

    def run(self, batch: Any) -> R:
        """Runs the step on a batch. A collective."""
        step = self._step
        with on_device(step.device):
            with step.locked:
                way = self._agree(batch)
                if not way & REPLAYS and way & CAPTURES:
                    way = self._capture()
                if way & REPLAYS and self._graph is not None:
                    self._graph.replay()
                    self._ran = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._ran.record()
                    return self._result  # type: ignore[return-value]
            self._left -= 1
            with step.on_buffers():
                return step.beside(lambda: step.heard(self._buffers.batch))

    def _agree(self, batch: Any) -> int:
        """What all ranks can do with their batches, of which this one's is in the buffers then."""
        step, mine = self._step, 0
        failed: Exception | None = None
        try:
            fresh = self._may_replay()  # which puts the buffers behind the last call, too
            if waits_to_load(batch):
                self._agreement.wait_for_stream()
            self._buffers.load(batch)
            if fresh and not step.accumulates():
                mine = REPLAYS * (self._graph is not None) | CAPTURES * (self._left <= 0)
            if mine & REPLAYS:  # what it may raise all ranks are to hear of
                step.before_replay()
            if mine:
                mine *= self._fits(batch)
        except Exception as error:
            failed = error
        return self._agreement.agree(mine, failed, step=step.number, updates=step.trains and bool(mine & REPLAYS))

    def _fits(self, batch: Any) -> bool:
        """Whether a graph takes as many ids, which are looked at beside the step before where hosts have them."""
        given = [each.given for each in self._step.lookups(batch) if each.module.agreement is self._agreement]
        if any(tensor.is_cuda for _, tensor in tensors_of(batch)):  # which the current stream has made
            return (self._ran is None or is_over(self._ran)) and self._agreement.takes(given)
        with on_stream(self._beside):
            return self._agreement.takes(given)

    def _may_replay(self) -> bool:
        fresh = True
        for cache in self._step.caches:  # each is to be asked
            fresh &= cache.may_replay()
        return fresh

    def _capture(self) -> int:
        """Captures the step on all ranks, or on none: of what fails on one nothing has happened. Returns what all can
        do then."""
        step = self._step
        self.free()
        hold(self)
        graph, buffers = torch.cuda.CUDAGraph(), self._buffers.batch
        given = [lookup.given for lookup in step.lookups(buffers)]
        try:
            result = self._captured(graph, given)
            mine = REPLAYS * self._may_replay()  # not if the function leaves batches in flight
        except Exception as error:
            self._agreement.not_captured(error)
            raise
        way = self._agreement.agree(mine, step=step.number)  # raises where another has failed
        self._graph, self._result = graph, result
        return way

    def _captured(self, graph: torch.cuda.CUDAGraph, given: list[Any]) -> R:
        step = self._step
        try:
            with step.on_buffers(), self._agreement.capturing(given), step.capture(graph):
                return step.heard(self._buffers.batch)
        except RuntimeError as error:
            explain(error)
            raise
        finally:
            step.after_capture()
