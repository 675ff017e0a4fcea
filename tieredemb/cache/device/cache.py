"""The hot cache on a GPU over one key space: the twin of `HostCache`. Over rows that kernels reach, the device says
no word to the host but in whole-cache calls. How batches are planned is in `device_batches`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.changes import Part
from tieredemb.cache.device.batches import DeviceBatches
from tieredemb.cache.device.in_place import InPlace
from tieredemb.cache.device.plan import DevicePlan, Missed
from tieredemb.cache.device.replays import DeviceTicket
from tieredemb.cache.device.rows import DeviceRows
from tieredemb.cache.device.stream_order import StreamOrder
from tieredemb.cache.device.transfer import Transfer
from tieredemb.cache.host.hot_rows import NO_KEY
from tieredemb.cache.tickets import Hold
from tieredemb.config import Policy
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.kernels.streams import on_device, synchronize
from tieredemb.stats import CacheStats
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

LOAD_ROWS = 1 << 20  # rows brought in at once by whole-cache calls


class DeviceCache(DeviceBatches):
    """See `Cache`. Rows of the key ranges `resident`, (first key, rows) each, have slots of their own, from
    `slots` less their number on, in that order.

    Calls may come on any stream (see `StreamOrder`). Raises `DeviceMemoryError` where the slots do not fit.
    """

    def __init__(
        self,
        cold: ColdRows,
        *,
        slots: int,
        policy: Policy | None = None,
        initial: InitialRows,
        lock_window: int = 0,
        device: torch.device,
        resident: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(cold, slots=slots, policy=policy, initial=initial, lock_window=lock_window, device=device)
        self._resident = tuple(resident)
        pinned = sum(rows for _, rows in self._resident)
        self._cached = slots - pinned
        self._batch = self._eager = 0  # see `_restart`
        self._recurring = set()
        self._planning = self._put_off = None
        self.on_flush: list[Callable[[], None]] = []
        self._order = StreamOrder(device)
        self.plan_lock = threading.RLock()  # a plan waits for its storage beside lookups and updates
        with torch.inference_mode(False), torch.cuda.device(device):
            self.hot = DeviceRows(cold.layout, self._cached, pinned, device)
            cold.attach(device)
            self._plan = DevicePlan(self.hot, self._scoring, device)
            kind: type[Transfer] = InPlace
            if not cold.device_readable:
                from tieredemb.cache.device.staged import Staged  # numba takes a second to import

                kind = Staged
            self._transfer: Transfer = kind(cold, self.hot, initial, self._plan, self._grow_beside, self.plan_changes)
            try:
                self._adopt_scores()
                self._restart(fresh=cold.volatile)
            except BaseException:
                self._transfer.finish()  # who has opened the storage closes it now
                raise

    # --- calls ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def entered(self, *, checked: bool = False) -> Iterator[None]:
        """Holds the cache for one call: its locks, its device, and its place behind what other streams have queued.
        `checked`: for a part of a call that was checked as a whole, such as a change that is under way."""
        with self.whole(), on_device(self.device):
            if not checked:
                self._begin_call()
            self._order.whole()
            self._transfer.finish()
            try:
                yield
            finally:
                if not self._transfer.in_place:
                    self._order.touched()

    @contextlib.contextmanager
    def using(self, *tickets: DeviceTicket) -> Iterator[None]:
        """Holds the cache for a call that looks up or updates the rows of `tickets` alone: it does not wait for plans
        that were made ahead for others."""
        with self.lock, on_device(self.device):
            self.check_rows()
            self._order.compute()
            self._transfer.follow()
            for ticket in tickets:
                ticket.failed |= not ticket.ended
                ticket.check()
                if ticket.ready is not None:
                    ticket.ready.wait()
                    ticket.ready = None
            yield

    def hold(self) -> tuple[Hold, torch.cuda.Event]:
        """Where a thread of its own plans ahead: keeps locked what is in flight now, so that nothing moves but what the
        event's stream is through with."""
        with self.lock, on_device(self.device):
            planning = self._planning
            following = self._batch + 1 if planning is None else planning
            return self._book.hold(following), self._order.queued()

    @contextlib.contextmanager
    def ahead(self, inputs: Sequence[torch.Tensor], hold: tuple[Hold, torch.cuda.Event] | None) -> Iterator[None]:
        held, after = hold or (None, None)
        with self.plan_lock, on_device(self.device), self._order.ahead(after):
            for tensor in inputs:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())
            try:
                yield
            finally:
                if held is not None:
                    held.release()

    def memory(self) -> contextlib.AbstractContextManager[None]:
        """Tensors made inside outlast the plan that is made ahead in them; see `StreamOrder`."""
        return self._order.memory()

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        with self.whole():
            self.check_loadable()
            with self.entered(checked=True):
                for update in self.on_flush:
                    update()
                metadata = self.cold.metadata
                metadata.batch = self._plan.batch()  # all replays included; `_batch` knows those that plan ahead
                metadata.policy = self._scoring.name
                self._write_back()

    def dirty_rows(self) -> tuple[Array, Array, Array]:
        hot, first_slot = self.hot, self._cached
        with self.entered(checked=True):
            slots = torch.nonzero((hot.dirty[:first_slot] != 0) & (hot.key >= 0)).flatten()
            found = [(hot.key[slots], slots)]
            for first_key, rows in self._resident:
                slots = torch.nonzero(hot.dirty[first_slot : first_slot + rows]).flatten()
                found.append((slots + first_key, slots + first_slot))
                first_slot += rows
            parts = [(keys, hot.weight[at], hot.state[at].view(torch.int32), hot.score[at]) for keys, at in found]
            rows_of = [(keys, weight, torch.cat([state, score[:, None]], 1)) for keys, weight, state, score in parts]
            rows_of += self._transfer.slotless_rows()
            keys, weight, state = (torch.cat(each).cpu() for each in zip(*rows_of, strict=True))
        order = torch.argsort(keys)
        carrier = self.cold.layout.carrier
        bits = weight[order].contiguous().view(torch.uint8).numpy().view(carrier)
        return keys[order].numpy(), bits.reshape(-1, self.cold.layout.columns), state[order].numpy().view(np.uint32)

    def check_loadable(self, parts: Iterable[Part] | None = None) -> None:
        self.complete_last()  # of a batch that was given up: its victims are not to be written behind the call
        super().check_loadable(parts)
        self._transfer.finish()  # the rows of the storage may be about to be replaced

    def _begin_call(self) -> None:
        self.complete_last()
        super()._begin_call()

    def drop_slots(self, missed: Missed) -> None:
        """After a plan whose `missed` rows may not have arrived in the slots that are theirs already: such slots are
        emptied, and all others written back. The cache begins anew, without rows. Synchronises."""
        with self.entered(checked=True):
            synchronize(self.device)
            homes = self._plan.placed(missed)
            slots = homes[homes >= 0]
            self.hot.key[slots] = NO_KEY
            self.hot.dirty[slots] = 0
            records = -2 - homes[homes <= -2]
            if len(records):
                self._plan.records.free(records)
            self._write_back()
            self._restart(fresh=False)

    def _write_back(self) -> None:
        """All dirty rows, and the scores of the cached ones. Synchronises."""
        self._transfer.write_back(0, self._cached, None)
        first_slot = self._cached
        for first_key, rows in self._resident:
            self._transfer.write_back(first_slot, rows, first_key)
            first_slot += rows
        self._transfer.settle()
        synchronize(self.device)

    def _write_back_range(self, start: int, stop: int) -> None:
        with self.entered(checked=True):
            self._write_back()

    def _reload_range(self, start: int, stop: int) -> None:
        with self.entered(checked=True):
            key = self.hot.key
            slots = torch.nonzero((key >= start) & (key < stop)).flatten()
            for part in torch.split(slots, LOAD_ROWS):
                self._load(key[part], part.to(torch.int32))
            first_slot = self._cached
            for first_key, rows in self._resident:
                low, high = max(start, first_key), min(stop, first_key + rows)
                self._load_range(low, first_slot + low - first_key, high - low)
                first_slot += rows
            self._transfer.reload()

    def check_idle(self, call: str) -> None:
        with self.whole():
            self.complete_last()
            super().check_idle(call)

    def forget(self) -> None:
        with self.entered(checked=True):
            super().check_idle("load a checkpoint")
            self._adopt_scores()
            self._restart(fresh=False)

    def _restart(self, *, fresh: bool) -> None:
        """Empties the cached slots and brings the rows of resident tables in; none was ever written if `fresh`."""
        synchronize(self.device)  # cold rows may have been replaced on the host
        self.hot.reset()
        self._batch = self._eager = self.cold.metadata.batch
        self._book.reset()
        self._plan.restart(self._batch)
        self._transfer.restart()
        counted = self._plan.totals_kept()  # as of batches alone
        first_slot = self._cached
        for first_key, rows in self._resident:
            if fresh:
                self._transfer.generate(first_key, first_slot, rows)
            else:
                self._load_range(first_key, first_slot, rows)
            first_slot += rows
        self.hot.score[self._cached :].fill_(MIN_SCORE)
        self._plan.set_totals(counted)

    def _load_range(self, first_key: int, first_slot: int, rows: int) -> None:
        for start in range(0, rows, LOAD_ROWS):
            span = torch.arange(start, min(start + LOAD_ROWS, rows), device=self.device)
            self._load(span + first_key, (span + first_slot).to(torch.int32))

    def _load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Brings cold rows into slots that are theirs. A row never written is generated, and stays clean in the slot
        of a resident table, whose score is never written back."""
        self._transfer.load(keys, slots)
        resident = slots[slots >= self._cached].long()
        self.hot.dirty[resident] = 0
        self.hot.score[resident] = MIN_SCORE

    def stats(self) -> CacheStats:
        with self.entered():
            totals = self._plan.totals()
        layout = self.cold.layout
        return CacheStats(
            batches=totals["batches"],
            lookups=totals["lookups"],
            hits=totals["hits"],
            unique=totals["unique"],
            rows_filled=totals["filled"],
            bytes_filled=(totals["filled"] - totals["generated"]) * layout.row_bytes,
            evictions=totals["evicted"],
            rows_written_back=totals["written_back"],
            bytes_written_back=totals["written_back"] * layout.row_bytes + totals["scores_written"] * 4,
            rows_overflow=totals["overflow"],
        )

    def memory_report(self) -> dict[str, Any]:
        with self.lock:
            batch = {"plans": self._book.size_bytes() + self._plan.size_bytes()}
            batch["records"] = self._plan.records.size_bytes()
            return {
                "cache": self.hot.size_bytes(),
                "batch": batch | self._transfer.size_bytes(),
                "cold": {"tier": self.cold.kind} | self.cold.size_bytes(),
            }

    def _release(self) -> None:
        self._put_off = None
        self._transfer.finish()
        synchronize(self.device)  # kernels may still read cold rows
