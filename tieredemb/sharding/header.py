"""What ranks tell each other before they exchange anything: the words of a header."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

WORDS = 6  # before the counts: phase, number, whether it failed, a course's two, and the flag; see `Exchange.header`


class Phase(enum.IntEnum):
    """What a rank is about to do."""

    PLAN = 0
    FORWARD = 1
    ROWS = 2
    BACKWARD = 3
    STEP = 4
    UPDATE = 5
    READ = 6
    WRITE = 7
    READ_STATE = 8
    WRITE_STATE = 9
    SAVE = 10
    LOAD = 11
    FOLLOW = 12
    NORM = 13
    WHOLE = 14  # whichever of these

    @property
    def told(self) -> str:
        return _TOLD[self]


_TOLD = {
    Phase.PLAN: "plans a batch ahead",
    Phase.FORWARD: "looks up a batch",
    Phase.ROWS: "sends rows of a batch",
    Phase.BACKWARD: "updates rows in a backward",
    Phase.STEP: "begins a captured step",
    Phase.UPDATE: "ends an accumulate()",
    Phase.READ: "reads whole tables, as state_dict() does",
    Phase.WRITE: "sets whole tables, as load_state_dict() does",
    Phase.READ_STATE: "reads the optimizer's state, as its state_dict() does",
    Phase.WRITE_STATE: "sets the optimizer's state, as its load_state_dict() does",
    Phase.SAVE: "saves a checkpoint",
    Phase.LOAD: "loads a checkpoint",
    Phase.FOLLOW: "follows an optimizer",
    Phase.NORM: "reads the norm of a gradient",
    Phase.WHOLE: "reads or writes whole tables",
}


class Course(NamedTuple):
    """What updates of rows go by, which is to be equal on all ranks: `before`, up to a header, and `next`, at the one
    that it announces, of ranks where that is not 0; and what that is of, `told`, by name."""

    before: int
    next: int
    told: Callable[[], dict[str, object]]


NO_COURSE = Course(0, 0, dict)


class Header(NamedTuple):
    """What each rank has announced: `counts`, int64 (W, K), what each sends to this one · `flags`, int64 (W,)."""

    counts: torch.Tensor
    flags: Array
