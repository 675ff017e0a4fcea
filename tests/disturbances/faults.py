"""Makes the library's system calls fail: each of them, by its position, once or for good, with an error or a Ctrl-C.

The seam is `tieredemb.storage.system`: every call of the file tier and of checkpoints goes through it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Any

from disturbed import Disturbance

from tieredemb.storage.system import System, system

CALLS = sorted(name for name in vars(System) if not name.startswith("_"))


class Faults(Disturbance):
    """At event number `at`, a system call: raises `OSError` of `code` instead of it, or with `code` None lets it happen
    and then raises `KeyboardInterrupt`. `for_good`: every later call of its kind fails too. Files outside of the
    directory `disk` are of another disk, and sound."""

    def __init__(self, disk: Any, at: int | None = None, code: int | None = None, *, for_good: bool = False) -> None:
        super().__init__(at)
        self.disk, self.code, self.for_good = str(disk), code, for_good
        self.failing = ""  # the call that fails for good
        self.called: list[str] = []

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        for name in CALLS:
            setattr(system, name, self._wrapped(name, getattr(system, name)))
        try:
            yield
        finally:
            for name in CALLS:
                delattr(system, name)  # the class's own is there again

    def _wrapped(self, name: str, call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            if not self._is_here(args[0]):
                return call(*args)
            hit = self.hit()
            self.called.append(name)
            if hit and self.for_good:
                self.failing = name
            if hit and self.code is None:
                call(*args)
                raise KeyboardInterrupt
            if self.code is not None and (hit or name == self.failing):
                if name == "close":  # a descriptor is gone in any case
                    call(*args)
                raise OSError(self.code, f"planted in {name}")
            return call(*args)

        return wrapped

    def _is_here(self, target: Any) -> bool:
        if isinstance(target, mmap.mmap):
            return True  # row files alone are mapped
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
        return str(path).startswith(self.disk)
