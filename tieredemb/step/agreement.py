"""What ranks that look up together agree on around a step that is a CUDA graph. A graph holds their collectives, so all
of them replay theirs, or none does."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence

from tieredemb.step.batch import Given

UNKNOWN_IDS = (
    "a captured step of several ranks looks up ids that are none of its batch's tensors, which cannot be known to fit "
    "what the ranks exchange before it is replayed; compute them before, and put them into the batch"
)


class Agreement(abc.ABC):
    """That of the ranks of one module. Where it says so a call is a collective, in which hosts wait for each other."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `UnsupportedError` where no graph can hold what the ranks exchange."""

    @property
    @abc.abstractmethod
    def plans_ahead(self) -> bool:
        """Whether eager steps plan the next batch ahead, which all ranks do or none does: as the first rank has offered
        with its last forward."""

    @property
    @abc.abstractmethod
    def timeout(self) -> float:
        """Seconds that ranks wait for each other."""

    @abc.abstractmethod
    def offer(self, *, ahead: bool) -> None:
        """This rank would plan `ahead`, or not."""

    @abc.abstractmethod
    def wait_for_stream(self) -> None:
        """Waits for the current stream, before this rank agrees to anything. Raises `PeerError` where that waits for a
        rank that has gone."""

    @property
    @abc.abstractmethod
    def form(self) -> object:
        """The size of what a step would exchange that is captured now: all ranks know the same. A graph of another size
        is captured anew."""

    @abc.abstractmethod
    def takes(self, given: Sequence[Given]) -> bool:
        """Whether a graph takes as many ids as those of lookups that are to come, `given`. Raises what is wrong with
        them. On a GPU they are looked at on the current stream, for which the host waits."""

    @abc.abstractmethod
    def took(self, calls: Sequence[object]) -> bool:
        """The same of the `calls` that a graph has planned, which is over: of more ids it has planned some. What they
        look up counts for the room that later graphs have."""

    @abc.abstractmethod
    def are_as_now(self, calls: Sequence[object]) -> bool:
        """Whether what would be exchanged for a plan now has the form that it had for the `calls`, which were planned
        before: all ranks find the same."""

    @abc.abstractmethod
    def begin_step(self) -> int:
        """The number of a further step, which all ranks are about to do together: in the order in which they first
        have."""

    @abc.abstractmethod
    def agree(self, mine: int, error: Exception | None = None, *, step: int = 0, updates: bool = False) -> int:
        """The bits that all ranks have set in `mine`. `step`: which they do, by its number · `updates`: this rank could
        replay it, with the options that its GPU has. Raises on all ranks the `error` that one has met, or
        `PeerError` where they do other steps, or have other options. A collective."""

    @abc.abstractmethod
    def capturing(
        self, given: Sequence[Given], *, planned: Sequence[Given] = ()
    ) -> contextlib.AbstractContextManager[Callable[[], object]]:
        """A step is captured inside; what this yields counts what a replay sends other ranks: it is called once for
        each. `given`: the inputs that it looks up; of one that goes ahead, those that it plans
        · `planned`: of one that goes ahead, the inputs that it looks up, which an earlier step has planned; a forward
        that is computed again asks for them again. There are no others. A collective, until the capture begins."""

    @abc.abstractmethod
    def behind_rows(self, exchanges: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """A step computes inside, whose first lookup calls `exchanges` once its own rows are sent: exchanges follow one
        another in the order in which they are called, and what is not urgent is not to keep others waiting."""

    @abc.abstractmethod
    def not_captured(self, error: Exception) -> None:
        """The capture has ended in an `error`, which its caller goes on to raise. Others raise it too, in their next
        call at the latest, as far as they do not know of it. A collective where they do not."""
