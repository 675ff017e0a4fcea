"""Decides when a program is recorded: at its third run. Keeps the recordings of the last keys used, frees the others,
and stops after failures."""

from __future__ import annotations

import re
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch

TIMES = 2  # how often a program is launched before it is recorded: first uses must not be captured
MOST_FAILURES = 3  # failures before a recorder stops
MOST_COUNTED = 64  # keys that are counted, the last ones
CAPTURE_ERROR = re.compile(r"captur|error 90\d\b", re.IGNORECASE)  # CUDA's messages, and the driver's numbers


class Replayable(Protocol):
    """A recording."""

    def is_free(self) -> bool:
        """Whether it may be replayed now: nothing uses the results of its last replay."""

    def size_bytes(self) -> int:
        """Bytes of the memory that it keeps."""


K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
Kept = TypeVar("Kept", bound=Replayable)


class Recorder(Generic[K, Kept]):
    """The recordings of one kind of program. `most`: keys whose recordings are kept · `at_once`: recordings of one key,
    which may be in use at the same time. The caller holds a lock wherever several threads use the same recorder."""

    def __init__(self, most: int, at_once: int = 1) -> None:
        self._most, self._at_once = most, at_once
        self._kept: OrderedDict[K, list[Kept]] = OrderedDict()
        self._times: OrderedDict[K, int] = OrderedDict()
        self._failures = 0

    def find(self, key: K) -> Kept | None:
        """A recording of the key that is free. The key counts as the one used last."""
        recordings = self._kept.get(key)
        if recordings is not None:
            for recording in recordings:
                if recording.is_free():
                    self._kept.move_to_end(key)
                    return recording
        return None

    def record(self, key: K, make: Callable[[], Kept], reported: weakref.WeakSet[Kept]) -> Kept | None:
        """Records by `make`, if no recording of the key is free (`find`). Returns None if the program is to be
        launched: it has not run often enough, the maximum number of recordings is in use, or recording has failed.
        `reported`: the recordings that a memory report counts."""
        if self._failures == MOST_FAILURES or not self._is_worth_it(key):
            return None
        recording = attempt(make)
        if recording is None:
            self._failures += 1
            return None
        reported.add(recording)
        self._kept.setdefault(key, []).append(recording)
        if len(self._kept) > self._most:
            displaced, _ = self._kept.popitem(last=False)
            # it has to run more often than others before it is recorded again
            self._times.pop(displaced, None)
            self._times[displaced] = -MOST_COUNTED
        return recording

    def drop(self, is_over: Callable[[K], bool]) -> None:
        """Keeps no recordings of the keys that `is_over` chooses."""
        for key in [key for key in self._kept if is_over(key)]:
            del self._kept[key]

    def _is_worth_it(self, key: K) -> bool:
        recordings = self._kept.get(key)
        if recordings is not None:
            return len(recordings) < self._at_once
        times = self._times[key] = self._times.pop(key, 0) + 1
        if len(self._times) > MOST_COUNTED:
            self._times.popitem(last=False)
        return times > TIMES


def attempt(make: Callable[[], R]) -> R | None:
    """Records by `make`. Returns None if that raises an exception: the program has not run, is launched instead, and
    then raises its errors. Warns, unless no memory was left for the recording, or another thread waited for the whole
    device."""
    try:
        return make()
    except Exception as error:
        if not isinstance(error, torch.OutOfMemoryError) and not CAPTURE_ERROR.search(str(error)):
            warnings.warn(
                f"a plan or an update could not be recorded, and is launched as before, which costs the host more: "
                f"{error}",
                stacklevel=3,
            )
        return None
