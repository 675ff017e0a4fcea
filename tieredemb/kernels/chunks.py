"""Large work in chunks, which all threads take one by one, for work that mostly runs without the GIL.

A few chunks a thread are one round: between rounds an interrupt ends the work, and progress is reported. Each thread
has a number, for its own memory. When a call returns or raises, none of its threads is working any more.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_ROUND = 8  # chunks a thread takes: fewer, and threads wait for the last of a round more often


def each(
    work: Callable[[T, int], int],
    chunks: Iterable[T],
    advance: Callable[[int], object] = lambda done: None,
    threads: int | None = None,
) -> None:
    """Calls `work(chunk, thread)` for each chunk, in any order, on `threads` threads with numbers from 0 on; by default
    as many as kernels use. `chunks` are made on the calling thread, and `advance` is called there with the sums of what
    `work` returns. Raises what a call has raised; then others may not have been made."""
    threads = threads or torch.get_num_threads()
    left, some = iter(chunks), deque[T]()
    pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="tieredemb-chunks")  # it starts threads as needed
    try:
        while some := deque(itertools.islice(left, _ROUND * threads)):
            others = [pool.submit(_take, thread, work, some) for thread in range(1, min(threads, len(some)))]
            advance(_take(0, work, some) + sum(other.result() for other in others))
    finally:
        some.clear()
        _end(pool)


def _take(thread: int, work: Callable[[T, int], int], left: deque[T]) -> int:
    """Works on chunks until none is left."""
    done = 0
    while True:
        try:
            chunk = left.popleft()
        except IndexError:
            return done
        done += work(chunk, thread)


def _end(pool: ThreadPoolExecutor) -> None:
    """Waits until no thread is working, even after an interrupt, which is then raised."""
    interrupt: BaseException | None = None
    while True:
        try:
            pool.shutdown(wait=True, cancel_futures=True)
            break
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
