"""Listeners of forwards: how `pipeline` learns what a model looks up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tieredemb.modules.lookup_module import LookupModule
    from tieredemb.step.batch import Batch, Given


@dataclass(frozen=True)
class Forward:
    """One forward of a module as its caller asked for it. `given`: see `Batch` · `weights`: of the samples ·
    `ends_bags`: whether the offsets name the end of the last bag · `trains`: whether a backward is expected to update
    rows."""

    module: LookupModule
    given: Given
    weights: torch.Tensor | None
    ends_bags: bool
    trains: bool


LISTENERS: list[Callable[[Forward], object]] = []


def notify_listeners(module: LookupModule, batch: Batch, *, trains: bool) -> None:
    """Calls the listeners with a forward of `module`."""
    offsets = batch.given[1] if batch.names_ends and len(batch.given) > 1 else None
    ends_bags = isinstance(offsets, torch.Tensor) and len(offsets) == batch.edges
    for listener in tuple(LISTENERS):
        listener(Forward(module, batch.given, batch.weights, ends_bags, trains))


@contextlib.contextmanager
def observe_forwards(listener: Callable[[Forward], object] | None = None) -> Iterator[list[Forward]]:
    """The forwards of all modules inside the context, of any thread; or `listener` is called with each, and may raise
    to refuse it."""
    forwards: list[Forward] = []
    observe = listener or forwards.append
    LISTENERS.append(observe)
    try:
        yield forwards
    finally:
        LISTENERS.remove(observe)
