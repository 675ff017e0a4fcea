"""What ranks that look up together agree on around a step that is a CUDA graph. A graph holds their collectives, so all
of them replay theirs, or none does."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from tieredemb.step.batch import Given

UNKNOWN_IDS = (
    "a captured step of several ranks looks up ids that are none of its batch's tensors, which cannot be known to fit "
    "max_ids before it is replayed; compute them before, and put them into the batch"
)


class Looked(Protocol):
    """Lookups that are to come on one rank, whose ids are being looked at."""

    def fits(self) -> bool:
        """Whether a graph takes as many ids. Waits until that is known. Raises what is wrong with them."""


class Agreement(abc.ABC):
    """That of the ranks of one module. Every call but `check` and `look_at` is a collective, in which hosts wait for
    each other."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `UnsupportedError` where no graph can hold what the ranks exchange."""

    @abc.abstractmethod
    def look_at(self, given: Sequence[Given]) -> Looked:
        """Begins to look at the ids of lookups that are to come, `given`: on a GPU on the current stream, for which
        the host does not wait."""

    @abc.abstractmethod
    def agree(self, mine: int, error: Exception | None = None) -> int:
        """The bits that all ranks have set in `mine`. Raises on all ranks the `error` that one has met."""

    @abc.abstractmethod
    def capturing(self, given: Sequence[Given]) -> contextlib.AbstractContextManager[None]:
        """A step is captured inside, whose lookups are those of the inputs `given`, and no others."""

    @abc.abstractmethod
    def behind_rows(self, exchanges: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """A step computes inside, whose first lookup calls `exchanges` once its own rows are sent: exchanges follow one
        another in the order in which they are called, and what is not urgent is not to keep others waiting."""

    @abc.abstractmethod
    def not_captured(self, error: Exception) -> None:
        """The capture has ended in an `error`, which its caller goes on to raise. Others raise it too, in their next
        call at the latest, as far as they do not know of it."""
