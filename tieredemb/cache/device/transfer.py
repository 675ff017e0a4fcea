"""Moves rows between a GPU's slots and cold storage: in place by kernels (`in_place`), or staged through the host
(`staged`).

Missed rows are filled in phases: they get slots, some from victims (`place`); the map and homes name these (`publish`);
and the rows move (`move`). If kernels reach the cold rows, `start` launches all phases; or each is launched later, by
itself. If rows pass through the host, `start` requests a report of them from the device, and `move` waits for it and
does the rest.
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
    """Moves the rows of one cache, under its lock of plans. `can_defer`: whether rows may be filled later. Their
    transfer may be launched twice, by the replay of a captured step, or because an interrupt hides whether it was
    launched: the device knows which rows have arrived."""

    can_defer = False

    # --- a plan -----------------------------------------------------------------------------------------------------

    def retire(self, lag: int) -> None:  # noqa: B027 - rows used in place need no write-back
        """Called before a plan that keeps the `lag` batches before it locked: drops rows without a slot that are no
        longer used."""

    def reserve(self, rows: int) -> None:  # noqa: B027
        """Called before a plan after which up to `rows` rows may have no slot."""

    @abc.abstractmethod
    def start(self, plan: BatchPlan) -> None:
        """Begins to fill the missed rows of a batch: chooses victims, gives their slots to the missed keys, publishes
        these, resolves homes, moves and scores rows. What has to wait for the host is left to `move`; in a plan ahead
        other work runs in between."""

    def place(self, plan: BatchPlan, lag: int) -> None:  # noqa: B027 - part of `move` if rows pass through the host
        """Gives slots to missed rows, unless that was done; slots of the `lag` batches before are locked."""

    def publish(self, plan: BatchPlan) -> None:  # noqa: B027
        """After `place`, unless it was done: publishes the slots, as the next plan needs. `move` may run beside it."""

    @abc.abstractmethod
    def move(self, plan: BatchPlan) -> None:
        """Fills the rows, on the current stream. May wait for the device and the storage. A failing storage raises its
        error, and no row has changed."""

    def may_record(self) -> bool:
        """Whether the next plan may be recorded or replayed. Changes nothing: another plan may follow instead."""
        return True

    @abc.abstractmethod
    def overflow(self, uncached: bool) -> OverflowRows:
        """Where rows without a slot are now. `uncached`: whether the batch may have such rows."""

    def overflow_now(self, planned: OverflowRows) -> OverflowRows:
        """Where the rows without a slot are now of a batch that was `planned` to use them."""
        return planned

    def wait_for_uncached(self) -> None:  # noqa: B027
        """Has the current stream wait for rows without a slot, before it uses them."""

    # --- recorded plans ---------------------------------------------------------------------------------------------
    # if rows pass through the host, two graphs: one up to the report of missed rows, and one that fills the rows

    def recording(self, ids: int) -> HostPhase | None:
        """The host's part of a plan of `ids` ids that is about to be recorded, for its `start`; None if launches alone
        move rows. The recorded `move` is for plans whose missed rows all get slots; else `move` launches. May
        synchronise."""
        return None

    def record_move(self, plan: BatchPlan, graph: Recording) -> None:  # noqa: B027
        """Records the launches of `move` for a plan whose `start` is recorded."""

    def expect(self, plan: BatchPlan) -> list[int]:
        """Called before a recorded plan is replayed: returns the values of `BatchPlan.changing` for it."""
        return []

    def await_report(self, plan: BatchPlan) -> None:  # noqa: B027
        """Called after the launches of `start`, or their replay: begins the host's part. In a plan ahead, rows are
        gathered as soon as they are reported."""

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def drain(self) -> None:  # noqa: B027 - rows in place have moved already
        """Waits for rows that are being written to cold storage, before that is used otherwise."""

    @abc.abstractmethod
    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        """Writes a range of slots back and leaves them clean. `first_key`: the key of the first slot, for a resident
        table; else each slot has its own key."""

    @abc.abstractmethod
    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Fills `slots` (int32 (K,)), which belong to `keys` already, with the cold rows `keys` (int64 (K,))."""

    def write_back_uncached(self) -> None:  # noqa: B027
        """Writes rows without a slot back."""

    def uncached_rows(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Keys, weights and states with scores of rows without a slot that are not in cold storage."""
        return []

    def reload_uncached(self) -> None:  # noqa: B027
        """Reads rows without a slot again."""

    def restart(self) -> None:  # noqa: B027
        """Drops rows without a slot."""

    def size_bytes(self) -> dict[str, int]:
        """Bytes of buffers."""
        return {}


class SlotsChangeHands(Change):
    """Slots get new keys, whose rows are not being transferred yet: until then the new keys own the old rows."""

    def __init__(self, missed: Missed) -> None:
        self._missed = missed

    def recover(self, cache: Any) -> Suspect:
        cache.drop_slots(self._missed)
        return Suspect(interrupted("moving rows", self.cause))


@contextlib.contextmanager
def slots_change_hands(changes: IntentLog, missed: Missed) -> Iterator[None]:
    """Inside, slots change hands: if that is interrupted, the next call recovers; during a capture nothing is run.
    `changes`: the log of plans."""
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
