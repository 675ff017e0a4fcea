"""Large work in chunks: all threads take them one by one, for what mostly runs without the GIL.

A few chunks a thread are one round, which is one call of `parallel_for`: between rounds an interrupt ends the work, and
others may use the threads. Each thread has a number, for memory of its own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from tieredemb.kernels.cpu import num_threads, parallel_for

T = TypeVar("T")
_ROUND = 8  # chunks a thread takes: fewer, and threads wait for the last of a round more often


def each(
    work: Callable[[T, int], int],
    chunks: Iterable[T],
    advance: Callable[[int], object] = lambda done: None,
    threads: int | None = None,
) -> None:
    """Calls `work(chunk, thread)` for each chunk, in any order, on `threads` threads with numbers from 0 on; by default
    those that kernels use. `chunks` are made on the calling thread, and `advance` is called there with the sums of what
    `work` returns. Raises what a call has raised; then others may not have been made.

    `work` may call nothing that runs on several threads itself, but where `threads` is 1: it would wait for its own.
    """
    left, threads = iter(chunks), threads or num_threads()
    while some := deque(itertools.islice(left, _ROUND * threads)):
        advance(sum(parallel_for(_take, list(range(min(threads, len(some)) + 1)), work, some)))


def _take(thread: int, _: int, work: Callable[[T, int], int], left: deque[T]) -> int:
    """Works on chunks until none is left."""
    done = 0
    while True:
        try:
            chunk = left.popleft()
        except IndexError:
            return done
        done += work(chunk, thread)
