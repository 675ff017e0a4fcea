"""How rows travel between a GPU's slots and cold storage: in place by kernels (`in_place`), or staged through the host
(`staged`).

What a plan misses comes in phases: victims give their slots to it (`place`), the map and homes name these (`publish`),
and the rows move (`move`). Where kernels reach the cold rows `start` launches all phases, or each comes on its own,
later. Rows that pass through the host have to be waited for: `start` asks the device what they are, and `move` does the
rest.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tieredemb.cache.changes import Change, IntentLog, Suspect, interrupted
from tieredemb.cache.device.plan import BatchPlan, Missed, OverflowRows
from tieredemb.kernels.recording import Recording

if TYPE_CHECKING:
    from tieredemb.cache.device.staging import HostPhase


class Transfer(abc.ABC):
    """Moves the rows of one cache, under its lock of plans. `can_defer`: whether rows may be left for later. What
    fills them may be launched again, by the replay of a captured step, or where an interrupt leaves open whether it
    was: the device knows."""

    can_defer = False

    # --- a plan -----------------------------------------------------------------------------------------------------

    def retire(self, lag: int) -> None:  # noqa: B027 - rows used in place need no farewell
        """Before a batch is planned that keeps the `lag` ones before it locked: drops rows that are no longer used
        without a slot."""

    def reserve(self, rows: int) -> None:  # noqa: B027
        """Before a plan after which that many rows may be without a slot, if all ids in flight are other rows'."""

    @abc.abstractmethod
    def start(self, plan: BatchPlan) -> None:
        """Begins to fill what a batch misses: victims are chosen, their slots given to the missed keys and
        published, homes resolved, rows moved and scored. What has to wait for the host is left to `move`; of a plan
        that is made ahead other work comes before that."""

    def place(self, plan: BatchPlan, lag: int) -> None:  # noqa: B027 - part of `move` where rows wait for the host
        """Gives slots to what is missed, unless that is done; those of the `lag` batches before are locked."""

    def publish(self, plan: BatchPlan) -> None:  # noqa: B027
        """Behind `place`, unless it is done: what has to come before the next plan begins. `move` may run beside."""

    @abc.abstractmethod
    def move(self, plan: BatchPlan) -> None:
        """Brings the rows in, on the current stream. May wait for the device and the storage. A storage that fails
        raises its error, and no row has changed."""

    def may_record(self) -> bool:
        """Whether the plan that comes next may be recorded or replayed. Changes nothing: whoever asks may plan nothing
        then, and another plan come first."""
        return True

    @abc.abstractmethod
    def overflow(self, uncached: bool) -> OverflowRows:
        """Where rows without a slot are now, for a batch that is `uncached` or not."""

    def overflow_now(self, planned: OverflowRows) -> OverflowRows:
        """Where the rows are now that a batch was `planned` to use without a slot."""
        return planned

    def wait_for_uncached(self) -> None:  # noqa: B027
        """Before the current stream uses rows without a slot: it waits for them."""

    # --- recorded plans ---------------------------------------------------------------------------------------------
    # where rows pass through the host two graphs: one up to the report of what is missed, one that fills the rows

    def recording(self, ids: int) -> HostPhase | None:
        """Before a plan of `ids` ids is recorded, of which all that are missed are to get slots: what its `start` is
        given for the host's part. Where some do not, `move` launches. None where launches alone move rows. May
        synchronise."""
        return None

    def record_move(self, plan: BatchPlan, graph: Recording) -> None:  # noqa: B027
        """Records what `move` launches for a plan whose `start` is recorded."""

    def expect(self, plan: BatchPlan) -> list[int]:
        """A recorded plan is about to be replayed: the values of `BatchPlan.changing` for it."""
        return []

    def await_report(self, plan: BatchPlan) -> None:  # noqa: B027
        """Behind what `start` launches, or its replay: what the host is to do. Of a plan that is made ahead rows are
        gathered as soon as they are reported."""

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def drain(self) -> None:  # noqa: B027 - rows moved in place are moved
        """Before cold storage is used otherwise: waits for rows that are being written there."""

    @abc.abstractmethod
    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        """Writes a range of slots back and leaves them clean. `first_key`: the key of its first slot where they are a
        resident table's, else the slots' own keys count."""

    @abc.abstractmethod
    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Brings the cold rows `keys` (int64 (K,)) into `slots` (int32 (K,)), which are theirs already."""

    def write_back_uncached(self) -> None:  # noqa: B027
        """Writes the rows back that have no slot."""

    def uncached_rows(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Keys, weights and states with scores of rows without a slot that are not in cold storage."""
        return []

    def reload_uncached(self) -> None:  # noqa: B027
        """Reads the rows again that have no slot."""

    def restart(self) -> None:  # noqa: B027
        """Drops the rows that have no slot."""

    def size_bytes(self) -> dict[str, int]:
        """Bytes of buffers."""
        return {}


class SlotsChangeHands(Change):
    """Slots have new keys, or are about to, and the rows of these have yet to be on their way: until then the new keys
    own the old rows."""

    def __init__(self, missed: Missed) -> None:
        self._missed = missed

    def recover(self, cache: Any) -> Suspect:
        cache.drop_slots(self._missed)
        return Suspect(interrupted("moving rows", self.cause))


@contextlib.contextmanager
def slots_change_hands(changes: IntentLog, missed: Missed) -> Iterator[None]:
    """What is done inside belongs together: interrupted, the next call recovers. Of a capture nothing has run.
    `changes`: those of plans."""
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    change = SlotsChangeHands(missed)
    record = changes.begin(change, up=3)
    try:
        yield
    except BaseException as error:
        changes.note(error)
        raise
    changes.clear(record)
