"""CUDA graphs with collectives of a process group: they are freed before the group ends, also after a rank has left.

NCCL ends a communicator only when no graph contains one of its collectives: `destroy_process_group()` would wait for
ever while a captured step is alive, which a user's variable may keep alive. And freeing a graph waits for its replay,
which may wait for a rank that has left, until its communicators are aborted.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import select
import threading
import weakref
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")
PATIENCE, POLL = 10.0, 2e-5  # seconds: how long to wait for a GPU, and how often to query it
QUICK = 5e-4  # seconds: how long to query it without sleeping, as even the shortest sleep takes a tenth of that
LAST = 5.0  # seconds: how long what a GPU does is waited for once ranks exchange nothing any more


class Holder(Protocol):
    """What holds such graphs."""

    def ends_in_time(self) -> bool:
        """Whether its replays end while ranks wait for each other. Waits for them so long."""

    def free(self) -> None:
        """Gives them up, those too that a GPU is running: it ends them first. Called again, it does nothing."""


def is_over(done: torch.cuda.Event, patience: float | None = None) -> bool:
    """Waits for a replay, or other work of a GPU. Returns False if that does not end within `patience` seconds, by
    default `PATIENCE`: it may wait for a rank that has left, which the hosts learn at their next exchange."""
    begin, patience = monotonic(), PATIENCE if patience is None else patience
    while not done.query():
        waited = monotonic() - begin
        if waited > patience:
            return False
        if waited < QUICK:
            select.select((), (), (), 0)  # which lets other threads go on
        else:
            sleep(POLL)
    return True


class Waiting(Protocol):
    """What has a GPU wait for other ranks by kernels of our own."""

    def ends_in_time(self) -> bool:
        """Whether the GPU is done while ranks wait for each other. Waits for it so long."""

    def end(self) -> None:
        """Ends the waits of this library's kernels for other ranks, now and later."""


_HOLDERS: weakref.WeakSet[Any] = weakref.WeakSet()
_WAITING: weakref.WeakSet[Any] = weakref.WeakSet()


def hold(holder: Holder) -> None:
    """Has `holder` free its graphs before any process group ends, and before the interpreter does."""
    _free_before_ends()
    _HOLDERS.add(holder)


def end_with(waiting: Waiting) -> None:
    """What is `waiting` ends where the communicators of NCCL are given up."""
    _free_before_ends()
    _WAITING.add(waiting)


def _free_before_ends() -> None:
    """Has graphs freed before any process group ends, and before the interpreter does."""
    if not getattr(dist.destroy_process_group, "frees_graphs", False):
        atexit.register(free_all)
        destroy = _freeing(dist.destroy_process_group)
        dist.destroy_process_group = destroy
        dist.distributed_c10d.destroy_process_group = destroy


def free_all() -> None:
    """Frees the graphs of all living holders. If a replay does not end in time, it waits for a rank that has left: then
    all communicators of NCCL are aborted as well, see `end_waits`."""
    _free(aborts=not _is_capturing() and not all(map(_ends_in_time, [*_HOLDERS, *_WAITING])))


def end_waits(device: torch.device) -> None:
    """Called when ranks stop exchanging, as after one has left: frees the graphs of all holders; if `device` is not
    idle within a few seconds, aborts all communicators of NCCL, also those of the user's groups, and ends the waits of
    the library's kernels. So the GPU waits for no other one, and its results are meaningless. Does nothing in a
    capture. Raises nothing."""
    with contextlib.suppress(RuntimeError):  # of a GPU that has failed itself
        if not _is_capturing():
            _free(aborts=not _is_soon_idle(device))


def _is_capturing() -> bool:
    is_used: bool = torch.cuda.is_initialized()
    return is_used and torch.cuda.is_current_stream_capturing()


def _ends_in_time(holder: Any) -> bool:
    """See `Holder`; true for a GPU that has failed."""
    try:
        return bool(holder.ends_in_time())
    except RuntimeError:
        return True


def _is_soon_idle(device: torch.device) -> bool:
    """Whether all that a GPU does ends within `LAST` seconds, or fails."""

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)

    waiting = _started(wait)
    if waiting is not None:
        waiting.join(LAST)
    return waiting is None or not waiting.is_alive()


def _free(*, aborts: bool) -> None:
    """Frees all graphs and, if it `aborts`, all communicators. A communicator ends once no graph contains a collective
    of it, and a graph is freed once its replay is over, which may wait in a collective of any communicator: so all are
    freed at the same time."""
    for waiting in list(_WAITING) if aborts else ():
        waiting.end()
    aborting = [_started(backend.abort) for backend in _of_nccl()] if aborts else []
    for holder in list(_HOLDERS):
        holder.free()
    for thread in aborting:
        if thread is not None:
            thread.join(PATIENCE)


def _started(run: Callable[[], object]) -> threading.Thread | None:
    """A thread that does it, and keeps no process alive. None at the end of Python 3.12, which starts no more."""
    thread = threading.Thread(target=run, name="tieredemb-collectives", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _of_nccl() -> Iterator[Any]:
    """The communicators of all process groups."""
    if dist.is_initialized() and dist.is_nccl_available():
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):  # of hosts alone
                backend = group._get_backend(torch.device("cuda"))
                backend = getattr(backend, "wrapped_pg", backend)  # of TORCH_DISTRIBUTED_DEBUG=DETAIL
                if isinstance(backend, dist.ProcessGroupNCCL):
                    yield backend


def _freeing(function: Callable[P, R]) -> Callable[P, R]:
    """The function, before which graphs are freed."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        free_all()
        return function(*args, **keywords)

    call.frees_graphs = True  # type: ignore[attr-defined]
    return call
