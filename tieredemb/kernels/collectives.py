"""CUDA graphs that hold collectives of a process group: they are freed before the group ends, and not waited for as if
every rank were there.

NCCL's end of a communicator waits until no graph holds one of its collectives: `destroy_process_group()` would wait for
ever while a captured step is alive, which a variable of the user's keeps alive as long as it likes. And a graph's end
waits for its replay, which waits for a rank that has gone, until its communicators are given up.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")
PATIENCE, POLL = 10.0, 2e-5  # seconds: how long a replay is waited for, and how often it is asked
LAST = 2.0  # seconds: how long what a GPU does is waited for once a rank has gone


class Holder(Protocol):
    """What holds such graphs."""

    def is_over(self, patience: float | None) -> bool:
        """Whether its replays end within `patience` seconds, by default those that ranks wait for each other."""

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


def free_all(*awaited: torch.cuda.Event, patience: float | None = None) -> None:
    """Frees the graphs of all holders that are alive. Where a replay is not over in time (see `Holder`), or what is
    `awaited`, it waits for a rank that has gone: then it first gives up all communicators of NCCL, so that GPUs stop
    waiting, and what they find has no meaning."""
    holders = list(_HOLDERS)
    ends = all(holder.is_over(patience) for holder in holders) and all(is_over(each, patience) for each in awaited)
    given_up = [] if ends else [*map(_give_up, _of_nccl())]
    for holder in holders:
        holder.free()
    for each in given_up:
        each.join(PATIENCE)


def end_waits(device: torch.device) -> None:
    """Ranks exchange nothing any more, as one has gone, say: no GPU is to wait for another."""
    if torch.cuda.is_current_stream_capturing():
        return
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # of a GPU that has failed itself
        ends = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ends.record()
        free_all(ends, patience=LAST)


def _of_nccl() -> Iterator[Any]:
    """The communicators of all process groups."""
    if dist.is_initialized() and dist.is_nccl_available():
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):  # of hosts alone
                backend = group._get_backend(torch.device("cuda"))
                if isinstance(backend, dist.ProcessGroupNCCL):
                    yield backend


def _give_up(backend: Any) -> threading.Thread:
    """Has GPUs leave what they do by a communicator. That takes until no graph holds a collective of it: so others
    wait for it, and each communicator has a thread of its own."""
    thread = threading.Thread(target=backend.abort, name="tieredemb-abort", daemon=True)
    thread.start()
    return thread


def _freeing(function: Callable[P, R]) -> Callable[P, R]:
    """The function, before which graphs are freed."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        free_all()
        return function(*args, **keywords)

    call.frees_graphs = True  # type: ignore[attr-defined]
    return call
