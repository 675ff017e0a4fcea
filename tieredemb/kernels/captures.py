"""Captures of CUDA graphs that restore torch's state, even if they fail.

A call that no graph can contain makes a capture invalid, and its end then fails. torch's own (`torch.cuda.graph`, up to
2.13 at least) stops there: the captured stream stays the current one, the memory pool stays open, and the default
generator goes on counting for a graph, so that the next random number drawn eagerly is an error. What its
`CUDAGraph::capture_end` leaves undone is done here.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

CAPTURING: set[int] = set()  # threads that are inside a `Capture`
MODE = "thread_local"


class _AtOnce:
    """As `torch.cuda.graph`, which waits for the device and empties the allocator's cache before."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, *, pool: Any, stream: torch.cuda.Stream, capture_error_mode: str
    ) -> None:
        self._graph = graph
        self._pool = pool
        self._stream = stream
        self._on = torch.cuda.stream(stream)
        self._mode = capture_error_mode

    def __enter__(self) -> None:
        around = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(around)  # the beginning may set what random numbers of graphs are drawn from
        self._on.__enter__()
        self._graph.capture_begin(pool=self._pool, capture_error_mode=self._mode)

    def __exit__(self, *error: Any) -> None:
        self._graph.capture_end()
        self._on.__exit__(*error)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """A module that is collected inside a capture closes its caches, which wait for the device."""
    with contextlib.ExitStack() as after:
        if gc.isenabled():
            after.callback(gc.enable)
        gc.disable()
        yield


class Capture:
    """Captures into `graph`, on `stream`, the launches of this thread inside. `pool`: of another graph, to share its
    memory. An exception inside is raised unchanged, whatever it does to the end of the capture; if only the end fails,
    torch's error is raised. In any case streams, generators and the allocator are restored, and what the current stream
    runs afterwards, such as a replay, comes after what the beginning has set for random numbers of graphs.

    `at_once`: does not wait for the device first, nor free the unused memory of torch's allocator."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None, *, at_once: bool = False
    ) -> None:
        self.at_once = at_once
        self._graph = graph
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._is_shared = pool is not None
        self._has_begun = False
        # threads that have nothing to do with the step may go on
        kind = _AtOnce if at_once else torch.cuda.graph
        self._capture = kind(graph, pool=self._pool, stream=stream, capture_error_mode=MODE)

    def __enter__(self) -> None:
        self._around = torch.cuda.current_stream(self._stream.device)
        try:
            self._capture.__enter__()
            self._has_begun = True
            CAPTURING.add(threading.get_ident())
        except BaseException:
            CAPTURING.discard(threading.get_ident())
            self._recover()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            CAPTURING.discard(threading.get_ident())
            self._capture.__exit__(None, None, None)
            self._around.wait_stream(self._stream)
        except BaseException as ended:
            CAPTURING.discard(threading.get_ident())
            self._recover()
            if error is None or not isinstance(ended, RuntimeError):
                raise
        if error is not None:
            torch.clear_autocast_cache()

    def _recover(self) -> None:
        try:
            torch.cuda.set_stream(self._stream)
            if torch.cuda.is_current_stream_capturing():  # interrupted, or the step has left another stream current
                self._has_begun = True
                with contextlib.suppress(RuntimeError):
                    self._graph.capture_end()
            if self._has_begun or not self._is_shared:  # others' part in a pool is not to be given up
                self._release_pool()
            self._release_generator()
            self._around.wait_stream(self._stream)
        finally:
            torch.cuda.set_stream(self._around)
            torch.clear_autocast_cache()  # of casts that were captured and have never run

    def _release_pool(self) -> None:
        """Ends allocations from the pool, and releases this graph's part in it, which the graph does by itself if its
        capture has ended: then it has its pool."""
        try:
            self._graph.pool()
        except RuntimeError:
            for release in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with contextlib.suppress(RuntimeError):  # of what had not begun
                    release(self._stream.device_index, self._pool)

    def _release_generator(self) -> None:
        """The end of any capture makes the default generator count for eager calls again: of one that holds next to
        nothing. A copy in its place would do so too, but not be the one that other graphs draw from."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode=MODE)
        torch.zeros((), device=self._stream.device)  # of an empty graph torch warns
        graph.capture_end()
        graph.reset()
