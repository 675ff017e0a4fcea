"""A captured step that plans the batch which it computes."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

from tieredemb.kernels.streams import on_device
from tieredemb.pipeline.captured import StepFunction
from tieredemb.pipeline.plan_groups import PlanGroups, PlannedGroup, drop_all, plan_at_once
from tieredemb.pipeline.uncapturable import explain

R = TypeVar("R")


class StepAlone(Generic[R]):
    """A step that computes a batch, and plans it before."""

    def __init__(self, step: StepFunction[R]) -> None:
        self._step = step
        self._buffers = step.buffers.another()
        self._left = step.eager_steps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: R | None = None
        self._groups = PlanGroups()
        self._plans_as_one = True

    def run(self, batch: Any) -> R:
        step = self._step
        with on_device(step.device):
            with step.locked:
                fresh = self._may_replay()  # which puts the buffers behind the last call, too
                self._buffers.load(batch)
                if fresh and self._graph is None and self._left <= 0 and not step.accumulates():
                    self._graph = self._capture()
                    fresh = self._may_replay()  # not if the function leaves batches in flight
                if fresh and self._graph is not None:
                    return self._replay(self._graph)
            self._left -= 1
            return self._eagerly()

    def _may_replay(self) -> bool:
        fresh = True
        for cache in self._step.caches:  # each is to be asked
            fresh &= cache.may_replay()
        return fresh

    def _replay(self, graph: torch.cuda.CUDAGraph) -> R:
        self._step.before_replay()
        for division in self._step.divisions:
            division.note_replay()
        graph.replay()
        return self._result  # type: ignore[return-value]

    def _eagerly(self) -> R:
        with self._step.on_buffers():
            return self._step.beside(self._compute)

    def _compute(self) -> R:
        """The function of the batch in the buffers. Tables that share a cache are planned as one before, unless a step
        before has looked up others than those."""
        batch, planned = self._buffers.batch, list[PlannedGroup]()
        if not self._plans_as_one:
            return self._step.heard(batch)
        lookups = [lookup._replace(trains=lookup.trains and self._step.trains) for lookup in self._step.lookups(batch)]
        try:
            plan_at_once(self._groups.of(lookups), planned)
            result = self._step.heard(batch)
            self._plans_as_one = not any(each.left for _, each in planned)
            return result
        finally:
            drop_all(planned)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with self._step.on_buffers(), self._step.capture(graph):
                result = self._compute()
        except RuntimeError as error:
            explain(error)
            raise
        finally:
            self._step.after_capture()
        self._result = result
        return graph
