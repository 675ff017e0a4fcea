"""CUDA graphs that hold collectives of a process group: they are freed before the group ends, and not waited for as if
every rank were there.

NCCL's end of a communicator waits until no graph holds one of its collectives: `destroy_process_group()` would wait for
ever while a captured step is alive, which a variable of the user's keeps alive as long as it likes.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")
PATIENCE, POLL = 10.0, 2e-5  # seconds: how long a replay is waited for, and how often it is asked


class Holder(Protocol):
    """What holds such graphs."""

    def free(self) -> None:
        """Gives them up, those too that a GPU is running: it ends them first. Called again, it does nothing."""


def is_over(replayed: torch.cuda.Event, patience: float | None = None) -> bool:
    """Waits for a replay, or another collective. False where that does not end within `patience` seconds, by default
    `PATIENCE`: it may wait for a rank that has gone, of which the others learn as soon as hosts tell each other
    anything."""
    deadline = monotonic() + (PATIENCE if patience is None else patience)
    while not replayed.query():  # type: ignore[no-untyped-call]
        if monotonic() > deadline:
            return False
        sleep(POLL)
    return True


_HOLDERS: weakref.WeakSet[Any] = weakref.WeakSet()


def hold(holder: Holder) -> None:
    """`holder` is asked to give its graphs up before any process group ends, and before the interpreter does."""
    if not getattr(dist.destroy_process_group, "frees_graphs", False):
        atexit.register(free_all)
        destroy = _freeing(dist.destroy_process_group)
        dist.destroy_process_group = destroy
        dist.distributed_c10d.destroy_process_group = destroy
    _HOLDERS.add(holder)


def free_all() -> None:
    """Frees the graphs of all holders that are alive."""
    for holder in list(_HOLDERS):
        holder.free()


def _freeing(function: Callable[P, R]) -> Callable[P, R]:
    """The function, before which graphs are freed."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        free_all()
        return function(*args, **keywords)

    call.frees_graphs = True  # type: ignore[attr-defined]
    return call
