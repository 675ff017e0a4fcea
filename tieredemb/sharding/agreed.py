"""Calls that take effect once all ranks can make them: each announces first, and all raise the error of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

R = TypeVar("R")
Announce = Callable[..., None]  # takes the error of this rank, or None; raises the error of any rank on all
Change = Callable[[Callable[[], None]], None]  # calls its argument once it has space, before it changes anything


def agreed(announce: Announce, action: Callable[[], R]) -> R:
    """Calls `action`, and returns its result once it has succeeded on all ranks. Raises on all of them the error of
    one."""
    failed: Exception | None = None
    try:
        done = action()
    except Exception as error:
        failed = error
    announce(failed)
    return done


def change_on_all_ranks(announce: Announce, changes: Sequence[Change], then: Callable[[], None] = lambda: None) -> None:
    """Makes the `changes` of this rank, and then calls `then`, once all ranks have space for theirs; else nothing
    changes. Raises on all ranks the error of one."""
    is_announced, is_ready, failed = False, False, None

    def make(rest: Sequence[Change]) -> None:
        nonlocal is_announced, is_ready
        if rest:
            rest[0](lambda: make(rest[1:]))
        else:
            is_announced = True
            announce()
            is_ready = True

    try:
        make(changes)
        then()
    except Exception as error:
        if is_announced and not is_ready:  # the error of another rank
            raise
        failed = error
    announce(failed)
