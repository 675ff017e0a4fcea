"""How rows travel between a GPU's slots and cold storage: in place by kernels, or staged through the host.

Both are asked by `DeviceBatches` in the same order: `retire` before a plan finds, `bring` after, and `ask` before it
where other work comes in between.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from tieredemb.cache.changes import Change, ChangeBook, Doubt, interrupted
from tieredemb.cache.device.plan import Away, DevicePlan, Missed
from tieredemb.cache.device.rows import DeviceRows
from tieredemb.kernels.compiler import OPTIONS, blocks_for, kernel
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows

Beside = Callable[[], object]  # launches on the current stream what needs homes, but no rows

MOVE = "cache/device/transfer.cu"
MOVE_BLOCKS, MOVE_THREADS = 32, 1024
SWAP_BLOCKS = 12  # of 1,024 threads saturate PCIe both ways, and slow down the kernels beside them the least


class SlotsChangeHands(Change):
    """Slots have new keys, or are about to, and the rows of these have yet to be on their way: until then the new keys
    own the old rows."""

    def __init__(self, missed: Missed) -> None:
        self._missed = missed

    def settle(self, cache: Any) -> Doubt:
        cache.drop_slots(self._missed)
        return Doubt(interrupted("moving rows", self.cause))


class Transfer(abc.ABC):
    """Moves the rows of one cache. `in_place`: whether rows without a slot stay where they are for as long as a ticket
    uses them."""

    in_place: ClassVar[bool]

    def __init__(
        self,
        cold: ColdRows,
        hot: DeviceRows,
        initial: InitialRows,
        plan: DevicePlan,
        apart: Callable[[], contextlib.AbstractContextManager[None]],
        changes: ChangeBook,
    ) -> None:
        """`apart`: inside its context nothing computes but what the current stream waits for · `changes`: of plans."""
        self._apart = apart
        self._changes = changes
        self.cold = cold
        self.hot = hot
        self.plan = plan
        self.device = hot.weight.device
        self._initial = initial
        self._flags = flags = (*OPTIONS, *cold.layout.flags)
        self._swap = kernel(MOVE, "rows_swap", *flags)
        self._write_back = kernel(MOVE, "rows_write_back", *flags)
        self._side: torch.cuda.Stream | None = None
        self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # at exit is too late to compile, and between the slots' change of hands and their rows' arrival too
        self._write_back.load(self.device.index)
        self._swap.load(self.device.index)
        initial.on_device().load_missed(self.device, cold.layout.device_dtype, cold.layout.width)

    def finish(self) -> None:  # noqa: B027 - rows moved in place are moved
        """Before cold storage is used by others: waits for rows that are being written there."""

    def retire(self, lag: int) -> None:  # noqa: B027 - rows used in place need no farewell
        """Before a batch is planned that keeps the `lag` ones before it locked: gives up rows that are no longer used
        without a slot."""

    def make_room(self, rows: int) -> None:  # noqa: B027
        """Before a plan after which that many rows may be without a slot, if all ids in flight are other rows'."""

    def ask(  # noqa: B027 - rows moved in place are not waited for
        self, missed: Missed, homes: torch.Tensor, *, slotless: bool, ahead: bool
    ) -> Any:
        """Where rows pass through the host, the part of `bring` before it has to wait; the result goes on there.
        `ahead`: whether other things come in between."""

    @abc.abstractmethod
    def bring(
        self,
        missed: Missed,
        homes: torch.Tensor,
        asked: Any = None,
        *,
        slotless: bool,
        scored: bool,
        beside: Beside | None,
    ) -> None:
        """Chooses victims and gives their slots to missed keys, publishes them, resolves `homes`, moves and scores the
        rows. `beside` is called once `homes` are queued, on a stream that need not wait for the rows. `asked`: what
        `ask` has returned for this plan, if it was called."""

    @contextlib.contextmanager
    def _slots_change_hands(self, missed: Missed) -> Iterator[None]:
        """What is done inside belongs together: interrupted, the next call settles it. Of a capture nothing has run."""
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        change = SlotsChangeHands(missed)
        entry = self._changes.begin(change, up=3)
        try:
            yield
        except BaseException as error:
            self._changes.note(error)
            raise
        self._changes.end(entry)

    def follow(self) -> None:  # noqa: B027
        """The current stream is about to use rows without a slot."""

    @abc.abstractmethod
    def away(self, slotless: bool) -> Away:
        """Where rows without a slot are now."""

    @abc.abstractmethod
    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        """Writes a range of slots back and leaves them clean. `first_key`: the key of its first slot where they are a
        resident table's, else the slots' own keys count."""

    @abc.abstractmethod
    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Brings the cold rows `keys` (int64 (K,)) into `slots` (int32 (K,)), which are theirs already."""

    def mark(self) -> None:
        """Keeps what the current stream has queued by now for `aside`."""
        self._mark.record()

    def aside(self, beside: Beside) -> torch.cuda.Event:
        """Calls `beside` on a stream of its own, behind the last `mark`; returns what comes once that is done."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._mark.wait(self._side)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._side):
                beside()
        except BaseException:
            torch.cuda.current_stream().wait_stream(self._side)  # a capture is to end with this error, not with another
            raise
        done.record(self._side)
        return done

    def generate(self, first_key: int, first_slot: int, rows: int) -> None:
        """Generates consecutive rows in consecutive slots."""
        width = self.cold.layout.state_width
        generator = self._initial.on_device()
        generator.generate_range(first_key, first_slot, rows, self.hot.weight, self.hot.state, width)

    def settle(self) -> None:  # noqa: B027
        """Writes back what has no slot."""

    def slotless_rows(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Keys, weights and states with scores of rows without a slot that are not in cold storage."""
        return []

    def reload(self) -> None:  # noqa: B027
        """Reads again what has no slot."""

    def restart(self) -> None:  # noqa: B027
        """Drops what has no slot."""

    def size_bytes(self) -> dict[str, int]:
        """Bytes of buffers."""
        return {}

    def _swap_rows(
        self,
        count: Any,
        n: int,
        keys: Any,
        slots: Any,
        victims: Any,
        needed: int,
        weight: Any,
        state: Any,
        untouched: Any,
        *,
        scored: bool | None,
        most_blocks: int = MOVE_BLOCKS,
    ) -> None:
        """Brings cold rows `keys` of `weight` and `state` into `slots`, after the rows `victims` went back there;
        without keys those that lie there in the order of `slots`, and the victims' rows have gone already. `needed`:
        address of how many victims there are, 0 for none · `scored`: whether this use raises their scores; with None
        it is no use."""
        hot, plan, scoring = self.hot, self.plan, self.plan.scoring
        clock, n_untouched = (0, 0) if scored is None else (plan.clock, plan.untouched)
        self._swap(
            blocks_for(n, 64, most_blocks), MOVE_THREADS, count, keys, slots, victims, needed, SWAP_BLOCKS,
            hot.weight, hot.state, hot.score, hot.dirty, weight, state, untouched, n_untouched, plan.moved, clock,
            scoring.kind, scoring.unit, scoring.remember, scored or False,
        )  # fmt: skip

    def _load_rows(self, source: Any, keys: torch.Tensor, slots: torch.Tensor, weight: Any, state: Any) -> None:
        """Brings the rows of `keys` (int64 (K,)) into `slots` (int32 (K,)), which are theirs, from the rows `source`
        of `weight` and `state` (0: in their order), or generates them."""
        n, slots = len(slots), slots.contiguous()
        count = torch.full((1,), n, dtype=torch.int32, device=self.device)
        untouched = torch.empty(n, dtype=torch.uint8, device=self.device)
        self._swap_rows(count, n, source, slots, 0, 0, weight, state, untouched, scored=None)
        self._generate(count, n, keys, slots, untouched, self.away(False))

    def _generate(
        self, count: Any, n: int, keys: Any, slots: Any, untouched: Any, away: Away, *, some: int = 0
    ) -> None:
        """Generates the untouched of the rows `keys`, in their `slots` or away."""
        hot, width = self.hot, self.cold.layout.state_width
        self._initial.on_device().generate_missed(
            count, n, keys, slots, untouched, hot.weight, hot.state, away.weight, away.state, width,
            by_key=away.by_key, some=some,
        )  # fmt: skip

    def _score_loaded(self, slots: torch.Tensor) -> None:
        """No row in a slot has a score of zero."""
        score = self.hot.score[slots.long()]
        self.hot.score[slots.long()] = torch.where(score == 0, MIN_SCORE, score)
