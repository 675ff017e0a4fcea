"""What ranks do once all of them can: each tells the others before, and what one has met all raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

R = TypeVar("R")
Announce = Callable[..., None]  # is given the error that this rank has met, if any, and raises it on all of them
Change = Callable[[Callable[[], None]], None]  # is given what to call once there is space, before anything changes


def agreed(announce: Announce, action: Callable[[], R]) -> R:
    """Does something, and returns what it has returned once all ranks have done it; raises what one has met."""
    failed: Exception | None = None
    try:
        done = action()
    except Exception as error:
        failed = error
    announce(failed)
    return done


def change_on_all_ranks(announce: Announce, changes: Sequence[Change], then: Callable[[], None] = lambda: None) -> None:
    """Makes the `changes` of this rank, and does what belongs to them, `then`, once there is space for all of them on
    all ranks: else nothing changes. Raises on all ranks what one has met."""
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
        if is_announced and not is_ready:  # of another rank
            raise
        failed = error
    announce(failed)
