"""A captured step of several ranks: all replay their graphs, or all capture them, or all run the function.

What they do they agree on before each step, between hosts, while their GPUs are busy with the step before. The ids of
the batch are looked at then, on a stream of their own, which waits for the batch and for nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from tieredemb.kernels.collectives import hold
from tieredemb.kernels.streams import current_stream, on_device, on_stream
from tieredemb.pipeline.batches import tensors_of
from tieredemb.pipeline.captured import StepFunction
from tieredemb.pipeline.uncapturable import explain
from tieredemb.step.agreement import Agreement

R = TypeVar("R")
REPLAYS, CAPTURES = 1, 2  # what a rank could do: all do the first that all can


class StepTogether(Generic[R]):
    """The step of this rank. It plans the batch that it computes."""

    def __init__(self, step: StepFunction[R], agreement: Agreement) -> None:
        self._step, self._agreement = step, agreement
        self._buffers = step.buffers.again()
        self._left = step.eager_steps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: R | None = None
        with on_device(step.device):
            self._checks = torch.cuda.Stream(step.device, priority=-1)  # type: ignore[no-untyped-call]

    def give_up(self) -> None:
        """Nothing is planned ahead."""

    def free(self) -> None:
        """Gives the graph up, before the process group whose collectives it holds; the step is captured anew if it is
        called again."""
        graph, self._graph, self._result = self._graph, None, None
        if graph is not None:
            graph.reset()

    def run(self, batch: Any, receive: Callable[[], bool]) -> R:
        """Runs the step on a batch. A collective. `receive`: has the current stream wait for the batch, if it is
        known when that is on the GPU; returns whether it is."""
        step = self._step
        with on_device(step.device):
            with step.locked:
                way = self._agree(batch, receive)
                if not way & REPLAYS and way & CAPTURES:
                    way = self._capture()
                if way & REPLAYS and self._graph is not None:
                    self._graph.replay()
                    return self._result  # type: ignore[return-value]
            self._left -= 1
            with step.on_buffers():
                return step.beside(lambda: step.heard(self._buffers.batch))

    def _agree(self, batch: Any, receive: Callable[[], bool]) -> int:
        """What all ranks can do with their batches, of which this one's is in the buffers then."""
        step, mine, given = self._step, 0, []
        failed: Exception | None = None
        try:
            fresh = self._may_replay()  # which puts the buffers behind the last call, too
            self._buffers.load(batch)
            given = [lookup.given for lookup in step.lookups(batch)]
            if fresh and not step.accumulates():
                mine = REPLAYS * (self._graph is not None) | CAPTURES * (self._left <= 0)
            if mine & REPLAYS:  # what it may raise all ranks are to hear of
                step.before_replay()
        except Exception as error:
            failed = error
        with self._checking(batch, receive):
            return self._agreement.agree(mine, given, failed)

    def _may_replay(self) -> bool:
        fresh = True
        for cache in self._step.caches:  # each is to be asked
            fresh &= cache.may_replay()
        return fresh

    @contextlib.contextmanager
    def _checking(self, batch: Any, receive: Callable[[], bool]) -> Iterator[None]:
        """The stream on which ids are looked at is current."""
        current = current_stream(self._step.device.index)
        with on_stream(self._checks):
            # whoever has made a batch on the GPU has done so on the current stream, for all that is known
            if not receive() and any(tensor.is_cuda for _, tensor in tensors_of(batch)):
                self._checks.wait_stream(current)
            yield

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
        way = self._agreement.agree(mine)  # raises where another has failed
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
