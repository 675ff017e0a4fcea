"""Whose turn it is to run Python: of a thread that computes, or of one that plans beside it and waits in between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol


class Turn(Protocol):
    """What a thread's plan tells of itself."""

    def give(self) -> None:
        """The plan is about to wait for the device or the storage."""

    def take(self) -> None:
        """It has what it waited for, and is about to launch the rest."""


_TURN = threading.local()


@contextlib.contextmanager
def takes_turns(turn: Turn) -> Iterator[None]:
    """Plans that this thread makes inside tell `turn`."""
    _TURN.now = turn
    try:
        yield
    finally:
        _TURN.now = None


def give_turn() -> None:
    turn: Turn | None = getattr(_TURN, "now", None)
    if turn is not None:
        turn.give()


def take_turn() -> None:
    turn: Turn | None = getattr(_TURN, "now", None)
    if turn is not None:
        turn.take()
