"""CPU kernels of the copy threads (`copy_threads`): the board that a job is put on, and what threads do with it."""

from __future__ import annotations

from tieredemb.kernels.constants import REPORT_NUMBER
from tieredemb.kernels.cpu import jit
from tieredemb.kernels.native import (
    SEMAPHORE_BYTES,
    atomic_add,
    atomic_exchange,
    atomic_load,
    copy_bytes,
    copy_line_past,
    load_byte,
    load_long,
    load_word,
    prefetch_to_read,
    prefetch_to_write,
    semaphore_post,
    semaphore_wait,
    sleep_microseconds,
    yield_core,
)

# Byte offsets on the board. Counters have cache lines of their own: rows claimed, threads at work on the job, whether
# there is a job, whether one waits for a report, whether that wait was aborted, the number of the job that was opened
# last, threads that are yet to be woken up. Then the words of the job and of the one that waits (`CopyJob.words`), and
# the semaphores that threads sleep on.
NEXT, AT_IT, OPEN, AWAITED, ABORTED, OPENED, TO_WAKE, JOB, WAITING, SLEEP, WATCH = (
    0, 64, 128, 192, 256, 320, 384, 448, 576, 704, 768,
)  # fmt: skip
END = WATCH + SEMAPHORE_BYTES
JOB_WORDS = 13
CHUNK = 64  # rows claimed at once: some 10 microseconds
ALONE = 512  # rows that one thread has moved before another has woken up
AHEAD = 8  # rows that are prefetched before they are moved
LOOKS, NAP = 64, 20  # how often a thread looks for a report without a break, and microseconds between further looks
LINE = 64


@jit
def row_copy(target: int, source: int, size: int) -> None:
    """Copies whole cache lines past the caches: to read memory that is overwritten took a fifth of the time
    (H200's host, 15 threads)."""
    if (size | target) % LINE != 0:
        copy_bytes(target, source, size)
        return
    for line in range(0, size, LINE):
        copy_line_past(target + line, source + line)


@jit
def rows_gather(
    lo: int, hi: int, keys: int, weights: int, states: int, row: int, state: int, to: int, to_state: int
) -> None:
    """Copies the rows keys[lo:hi] of `weights` and `states`, `row` and `state` bytes each, to rows lo … hi - 1 of `to`
    and `to_state`; where the score, which ends the state, is zero the state alone."""
    for i in range(lo, hi):
        if i + AHEAD < hi:
            key = load_long(keys + 8 * (i + AHEAD))
            prefetch_to_read(states + key * state)
            for line in range(0, row, LINE):
                prefetch_to_read(weights + key * row + line)
        key = load_long(keys + 8 * i)
        copy_bytes(to_state + i * state, states + key * state, state)
        if load_word(to_state + i * state + state - 4) != 0:
            row_copy(to + i * row, weights + key * row, row)


@jit
def rows_scatter(
    lo: int, hi: int, keys: int, weights: int, states: int, row: int, state: int, of: int, of_state: int, dirty: int
) -> None:
    """Copies rows lo … hi - 1 of `of` and `of_state` to the rows keys[lo:hi]; of a row that is not dirty the score. A
    state is written after its weights: a row counts as written once it has a score."""
    for i in range(lo, hi):
        if i + AHEAD < hi:
            key = load_long(keys + 8 * (i + AHEAD))
            prefetch_to_write(states + key * state)
            if load_byte(dirty + i + AHEAD) != 0:
                prefetch_to_write(weights + key * row)  # for the page: lines are overwritten
        key = load_long(keys + 8 * i)
        if load_byte(dirty + i) != 0:
            row_copy(weights + key * row, of + i * row, row)
            copy_bytes(states + key * state, of_state + i * state, state)
        else:
            score = state - 4
            copy_bytes(states + key * state + score, of_state + i * state + score, 4)


@jit
def job_work(board: int) -> None:
    """Copies the rows of the job that no thread has claimed yet."""
    job = board + JOB
    n, keys, weights, states = load_long(job), load_long(job + 8), load_long(job + 16), load_long(job + 24)
    row, state, rows, row_states = load_long(job + 32), load_long(job + 40), load_long(job + 48), load_long(job + 56)
    dirty = load_long(job + 64)
    while True:
        lo = atomic_add(board + NEXT, CHUNK)
        if lo >= n:
            return
        hi = min(n, lo + CHUNK)
        if dirty == 0:
            rows_gather(lo, hi, keys, weights, states, row, state, rows, row_states)
        else:
            rows_scatter(lo, hi, keys, weights, states, row, state, rows, row_states, dirty)


@jit
def jobs_serve(board: int) -> None:
    """Works on one job after another, for ever. A thread that wakes up too late for a job may find the next one."""
    while True:
        semaphore_wait(board + SLEEP)  # a signal may end it early: then there is no job
        others_wake(board)
        atomic_add(board + AT_IT, 1)
        if atomic_load(board + OPEN) != 0:
            job_work(board)
        atomic_add(board + AT_IT, -1)


@jit
def others_wake(board: int) -> None:
    """Wakes up the threads that are still to be woken up."""
    if atomic_load(board + TO_WAKE) != 0:
        for _ in range(atomic_exchange(board + TO_WAKE, 0)):
            semaphore_post(board + SLEEP)


@jit
def job_open(board: int) -> None:
    """Opens the job on the board, for threads that are awake."""
    atomic_exchange(board + NEXT, 0)
    atomic_exchange(board + OPENED, load_long(board + JOB + 96))
    atomic_add(board + OPEN, 1)


@jit
def job_begin(board: int, helpers: int) -> None:
    """Opens the job on the board, and wakes up a thread for it, which wakes up the others of `helpers`: that takes 5
    microseconds each."""
    job_open(board)
    if helpers > 0:
        atomic_exchange(board + TO_WAKE, helpers - 1)
        semaphore_post(board + SLEEP)


@jit
def job_await(board: int) -> None:
    """Wakes up the thread that waits for the report of the job that waits."""
    atomic_exchange(board + ABORTED, 0)
    atomic_add(board + AWAITED, 1)
    semaphore_post(board + WATCH)


@jit
def job_abort(board: int) -> None:
    """Ends the wait for the report."""
    atomic_add(board + ABORTED, 1)


@jit
def report_is_there(report: int, number: int, looks: int) -> bool:
    """Whether the report of that number, or a later one, has arrived. Checks at most `looks` times, and sleeps between
    later checks."""
    for look in range(looks):
        if atomic_load(report + 8 * REPORT_NUMBER) >= number:
            return True
        if look >= LOOKS:
            sleep_microseconds(NAP)
    return False


@jit
def jobs_watch(board: int) -> None:
    """Waits for one report after the other, for ever, and opens the job that each report belongs to, once the one
    before is done."""
    while True:
        semaphore_wait(board + WATCH)
        if atomic_load(board + AWAITED) == 0:  # a signal has ended it early
            continue
        waiting = board + WAITING
        rows, report, number, helpers = (
            load_long(waiting), load_long(waiting + 72), load_long(waiting + 80), load_long(waiting + 88),
        )  # fmt: skip
        while not report_is_there(report, number, LOOKS + 1) and atomic_load(board + ABORTED) == 0:
            pass
        count = load_long(report)
        if atomic_load(board + ABORTED) == 0 and count <= rows:
            job_close(board)
            copy_bytes(board + JOB, waiting, 8 * JOB_WORDS)
            atomic_add(board + JOB, count - rows)
            job_open(board)
            for _ in range(min(helpers, count // CHUNK)):
                semaphore_post(board + SLEEP)
        atomic_add(board + AWAITED, -1)


@jit
def job_close(board: int) -> None:
    """Works on the job, if one is open, until all of it is done, and closes it. Then every thread that had begun the
    job has copied its claimed rows, and left; a late thread finds no job."""
    if atomic_load(board + OPEN) == 0:
        return
    job_work(board)
    atomic_exchange(board + TO_WAKE, 0)
    atomic_add(board + OPEN, -1)
    while atomic_load(board + AT_IT) > 0:
        yield_core()  # to a thread that has claimed rows and lost its core


@jit
def job_finish(board: int) -> int:
    """Ends the wait for a report that has arrived, or was aborted, and the open job; returns the number of the job that
    was opened last."""
    while atomic_load(board + AWAITED) != 0:
        yield_core()
    job_close(board)
    opened: int = atomic_load(board + OPENED)
    return opened
