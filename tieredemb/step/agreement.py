"""What distributed ranks agree on around a step that is a CUDA graph. A graph contains their collectives, so all ranks
replay theirs, or none does."""

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
    """The agreement of one module's ranks. Calls marked as collective let hosts wait for each other."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `UnsupportedError` if no graph can contain what the ranks exchange."""

    @property
    @abc.abstractmethod
    def plans_ahead(self) -> bool:
        """Whether eager steps plan the next batch ahead, which all ranks do or none does: as the first rank has
        announced with its last forward."""

    @property
    @abc.abstractmethod
    def timeout(self) -> float:
        """Seconds for which ranks wait for each other."""

    @abc.abstractmethod
    def offer(self, *, ahead: bool) -> None:
        """Announces whether this rank would plan `ahead`."""

    @abc.abstractmethod
    def wait_for_stream(self) -> None:
        """Waits for the current stream, before this rank agrees to anything. Raises `PeerError` if the stream waits for
        a rank that has left."""

    @property
    @abc.abstractmethod
    def form(self) -> object:
        """The size of what a step captured now would exchange, equal on all ranks. A graph of another size is captured
        anew."""

    @abc.abstractmethod
    def takes(self, given: Sequence[Given]) -> bool:
        """Whether a graph can take the ids of later lookups, with the inputs `given`. Raises if these are wrong. On a
        GPU they are checked on the current stream, for which the host waits."""

    @abc.abstractmethod
    def took(self, calls: Sequence[object]) -> bool:
        """Whether a graph, which is over, could take all ids of the `calls` that it has planned; of more ids it plans
        only a part. Their numbers count for the capacity of later graphs."""

    @abc.abstractmethod
    def are_as_now(self, calls: Sequence[object]) -> bool:
        """Whether an exchange for a plan now would have the form that it had for the `calls`, planned before; equal on
        all ranks."""

    @abc.abstractmethod
    def begin_step(self) -> int:
        """The number of a new step that all ranks run, in the order of their first calls."""

    @abc.abstractmethod
    def agree(self, mine: int, error: Exception | None = None, *, step: int = 0, updates: bool = False) -> int:
        """The bits that all ranks have set in `mine`. `step`: its number · `updates`: whether this rank could replay
        it, with the options on its GPU. Raises the `error` of one rank on all of them, or `PeerError` if ranks run
        other steps, or have other options. A collective."""

    @abc.abstractmethod
    def capturing(
        self, given: Sequence[Given], *, planned: Sequence[Given] = ()
    ) -> contextlib.AbstractContextManager[Callable[[], object]]:
        """Inside, a step is captured. Yields a function that counts what a replay sends to other ranks, to be called
        once for each. `given`: the inputs that it looks up, or if it goes ahead, that it plans · `planned`: if it goes
        ahead, the inputs that it looks up, which an earlier step has planned; a recomputed forward requests them again.
        There are no others. A collective until the capture begins."""

    @abc.abstractmethod
    def behind_rows(self, exchanges: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """Inside, a step computes. Its first lookup calls `exchanges` once its own rows are sent: exchanges run in the
        order of their launches, so these, which are less urgent, do not delay it."""

    @abc.abstractmethod
    def not_captured(self, error: Exception) -> None:
        """Announces that the capture has ended in an `error`, which the caller raises. Other ranks raise it too, unless
        they know of it, in their next call at the latest. A collective if they do not know of it."""
