"""Messages of the ranks of one host before each exchange, in memory that all of them have mapped. A message by gloo
takes a hundred microseconds and more of each host, where a step has one to three.

Ranks send in turn: a rank sends its next message once it has received one of each other rank. So the last two of each
rank are kept: one that others may still read, and the next. Each has a number, and a checksum, as a processor may see
the stores of another one in any order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import tempfile
import zlib
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.config import Array

if TYPE_CHECKING:
    from tieredemb.sharding.construction import Connections

SHARED = "/dev/shm"  # where files are memory, if there is such a directory
yield_core = getattr(os, "sched_yield", lambda: None)  # not every system has it
POLLS = 1000  # for an expected message, before this process sleeps
LONGEST = 1e-3  # seconds: of a sleep between two later polls, at most
SHARE = 0.1  # of the time waited so far, that a sleep takes
PATIENCE = 0.1  # seconds: how often a rank checks whether another has ended
SEED = 0xFFFFFFFF  # bits of a number that a checksum begins with
NUMBER, CHECK, BEGIN = range(3)  # words of a message: its number, its checksum, and the first of its contents


class Mailbox:
    """The mailbox of one rank, number `rank`. `box`: int64 (2, W, 2 + words), the ranks' messages of even and odd
    numbers · `connections`: to find ranks that have ended · `timeout`: how long a rank waits for another."""

    def __init__(self, box: Array, rank: int, connections: Connections, timeout: timedelta) -> None:
        self._box, self._rank, self._timeout = box, rank, timeout.total_seconds()
        self._connections: Connections | None = connections
        self._others = [number for number in range(box.shape[1]) if number != rank]
        self._number = 0

    def send(self, words: Array) -> None:
        """Sends all ranks `words`, int64 (words,)."""
        self._number += 1
        message = self._box[self._number & 1, self._rank]
        message[BEGIN:] = words
        message[CHECK] = zlib.crc32(words.tobytes(), self._number & SEED)
        message[NUMBER] = self._number

    def receive(self) -> Array:
        """What all ranks have sent, int64 (W, words). Waits for it; raises `RuntimeError` where a rank has ended, or
        takes too long."""
        messages = self._box[self._number & 1]
        found = np.empty((len(messages), messages.shape[1] - BEGIN), np.int64)
        found[self._rank] = messages[self._rank, BEGIN:]
        for number in self._others:
            self._wait_for_message(number, messages[number], found[number])
        return found

    def _wait_for_message(self, rank: int, message: Array, words: Array) -> None:
        """Waits for the `message` of a rank, and copies its contents to `words`."""
        polls, begin, checked, has_ended = 0, 0.0, 0.0, False
        while True:
            if message[NUMBER] == self._number:
                words[:] = message[BEGIN:]
                if message[CHECK] == zlib.crc32(words.tobytes(), self._number & SEED):
                    return
            polls += 1
            if polls < POLLS:
                yield_core()  # to other processes, and then to other threads of this one
                select.select((), (), (), 0)
                continue
            now = monotonic()
            if polls == POLLS:
                begin = checked = now
            if has_ended:  # and had not sent it before
                raise RuntimeError(f"rank {rank} has ended, or has left the group")
            if now - begin > self._timeout:
                raise RuntimeError(f"rank {rank} has sent nothing within {self._timeout:g} s")
            if now - checked > PATIENCE:
                checked, has_ended = now, self._connections is None or rank in self._connections.ended()
            sleep(min(LONGEST, SHARE * (now - begin)))

    def close(self) -> None:
        """Leaves the group: while this refers to its connections they do not end, and the others would not notice."""
        self._connections = None


def open_box(ranks: int, words: int, rank: int, place: str, every: Callable[[Any], list[Any]]) -> Array | None:
    """Memory for the messages of `ranks`, of so many `words` each, that all of them have mapped; None on all ranks
    where one could not. `place`: equal for ranks that may share memory · `every`: sends a value to all ranks, and
    returns those of all."""
    path, token = "", os.urandom(16)
    size = 2 * ranks * (BEGIN + words) * 8
    with contextlib.ExitStack() as at_end:
        if rank == 0:
            with contextlib.suppress(OSError):
                fd, path = tempfile.mkstemp(prefix="tieredemb-", dir=SHARED if os.path.isdir(SHARED) else None)
                at_end.enter_context(contextlib.suppress(FileNotFoundError))  # someone else may have removed it
                at_end.callback(os.unlink, path)
                at_end.callback(os.close, fd)
                os.write(fd, token + bytes(size))
        offers = every((place, path, token))
        places, (_, path, token) = {each for each, _, _ in offers}, offers[0]
        box = _mapped(path, token, size) if path and len(places) == 1 else None
        if not all(every(box is not None)):
            return None
    assert box is not None
    return box.reshape(2, ranks, BEGIN + words)


def _mapped(path: str, token: bytes, size: int) -> Array | None:
    """The numbers behind the `token` that the file begins with; None where the file begins with another one."""
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), len(token) + size)
    except (OSError, ValueError):
        return None
    return np.frombuffer(memory, np.int64, offset=len(token)) if memory[: len(token)] == token else None
