"""The program of a batch: the phases of one forward, of its backward and of its update. `Call` has them in this order.

    phase       method              reads                            writes
    plan        plan, complete      ids, edges of bags, map          homes of the ids; slots, map; a ticket
    start       start               homes, rows, steps taken         rows at the current step, rows within max_norm
    lookup      pool                homes, rows, edges               the output
    backward    (autograd_node)     the gradient of the output       the list of calls of this backward pass
    update      apply               homes, gradients                 rows, optimizer state, dirty bits, steps taken
    release     release                                              the ticket: its rows may leave their slots

A plan has phases of its own (find, place, publish, move), which are the cache's: see docs/design.md, "The program of a
batch". Each phase has a CPU form (`host_call`) and a GPU form (`device_call`, `device_update`), with equal results.

Who runs the phases. `Engine.lookup` plans, starts and looks up one forward. A forward that is known before it comes is
planned by `Engine.plan_ahead`, or with those of other tables by `pipeline.plan_groups`; it starts when it comes, by
`Engine.lookup_planned`. All calls that one backward pass reaches are applied once, at its end or in the step of a torch
optimizer, in the order of their forwards, as a dense gradient would be; then they are released. A forward without
gradient is released after its lookup. A forward inside of a backward pass is a recomputation (activation
checkpointing): its plan scores nothing.

On which stream or thread.
    CPU             A phase is done when its method returns. A plan made ahead runs on a thread of its own.
    GPU             A phase launches kernels on the current stream and waits for nothing. A plan made ahead has a stream
                    of its own; `start` makes the computing stream wait for it (`ticket.ready`). Within a plan, what
                    needs homes but no rows (sorting for the update) runs on a side stream beside the rows that move,
                    and the update waits for it (`ticket.side_done`).
    GPU, staged     Rows of files and of other memory that no kernel reaches pass through the host: `plan` reports what
                    is missed, `complete` waits for the report, reads storage and brings the rows in.

How a GPU runs the phases. The bits are equal.
    launched        Kernel by kernel, as the methods say.
    replayed        A plan that comes again and again, with its lookup, is recorded as a CUDA graph, and so is an update
                    (`recorded_plans`, `recorded_updates`). `plan` then replays the graph, and `start` and `pool` find
                    the output there. The host still makes a ticket and counts the batch for each plan.
    captured        In `graph_step`, or a graph of the user's own, the same methods run once, while the stream is
                    captured, and nothing in them is recorded. A replay runs all kernels of the step and no Python:
                    shapes and dtypes are those of the capture, a wrong id sets a flag that a later call raises, and
                    batches are counted on the device. Of the cache's books a replay changes only what it leaves in
                    flight for the next one (`pipeline`).
"""

from __future__ import annotations

import abc
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.errors import BackwardError
from tieredemb.lookup.options import LookupOptions
from tieredemb.step.backward_pass import BackwardPass, Collected, CollectedCalls
from tieredemb.step.batch import Batch, Given
from tieredemb.step.batch_form import BatchForm, BatchForms
from tieredemb.tables.row_optimizer import RowOptimizer
from tieredemb.tables.table_set import Place, TableSet

if TYPE_CHECKING:
    from tieredemb.kernels.spread import RowSpread

NUMBERS = itertools.count()  # forward order of calls


class StackRows(NamedTuple):
    """An output that has a `Stack`: its pooled bags (K, D), and the rows of the ids that are picked, (·, D) in the
    rows' dtype; and where they are asked for those of all ids, (N, D)."""

    bags: torch.Tensor
    rows: torch.Tensor
    every: torch.Tensor | None


class Updater(Protocol):
    """Who has the optimizer of the rows, if there is one."""

    @property
    def optimizer(self) -> RowOptimizer | None: ...


@dataclass(frozen=True, eq=False)
class CallContext:
    """What a call needs of who makes it. `tables`: those it looks up in · `options`: how it treats their rows ·
    `updater`: who has the `optimizer` that updates them, if any · `backward_pass`: where its gradient is collected ·
    `apply`: what is called with all that one backward pass has collected. A call keeps it, and so the tables, alive."""

    tables: TableSet
    options: LookupOptions
    updater: Updater
    backward_pass: BackwardPass
    apply: Callable[[Collected], None]

    @functools.cached_property
    def forms(self) -> BatchForms:
        """Of batches of several tables, those that were looked up before."""
        return BatchForms()

    @property
    def is_dense(self) -> bool:
        """Whether the optimizer moves every row in every step."""
        return self.tables.placed.now.groups[0].is_dense

    @property
    def optimizer(self) -> RowOptimizer | None:
        """What updates the rows now: a module may come to follow an optimizer later."""
        return self.updater.optimizer

    def check_trainable(self) -> RowOptimizer:
        """The optimizer; raises `BackwardError` without one (never a silent default learning rate)."""
        optimizer = self.optimizer
        if optimizer is None:
            raise BackwardError(
                f"backward reached {self.tables.named}, built without an optimizer, so it cannot update its rows; pass "
                "optimizer=tieredemb.Adagrad(lr=…), or a torch optimizer, or call requires_grad_(False) on the module "
                "to keep it as it is"
            )
        if not optimizer.is_there and not optimizer.look_for():
            raise BackwardError(
                f"backward reached {self.tables.named}, which is to follow a torch optimizer and does not yet, so "
                f"nothing would update its rows: none has it among its params, or several do; build the optimizer of "
                f"the model's parameters, or call tieredemb.follow(model, optimizer) before"
            )
        return optimizer


class Shareable(abc.ABC):
    """What was planned, of which each forward that it was planned for has its share: one alone has all of it.
    `forwards`: those that it is one of, where several were planned as one, and `block`: of which of their pools."""

    forwards: Any = None
    block = 0

    def share(self, number: int, given: Given) -> Any:
        """The call of the forward of that number, which is `given` these inputs; None where these are known to be
        others by now than those that were planned."""
        return self

    def release_part(self, *numbers: int) -> None:
        """Forwards are over; with the last one the plan is."""
        self.release()

    @abc.abstractmethod
    def release(self) -> None:
        """Keeps no rows in their slots any more."""


class Call(Shareable):
    """One forward of a module, or several forwards that are planned as one (`Forwards`). `context`: who makes it ·
    `batch`: B, its samples · `form`: of the batch, where it is of several forwards · `parts`: of each group of tables,
    those of one width, its bags, its ticket, and what its gradient needs (`HostGroupCall`, `DeviceGroupCall`)."""

    number = -1  # in the order of forwards, once it has started
    consumed = False
    requested: Collected | None = None  # where `torch.autograd.grad`, which trains nothing, takes its gradient
    # the backward pass that recomputes this forward, if one does: it applies the call, wherever its gradient comes
    within: weakref.ref[CollectedCalls] | None = None
    keeps_rows = False  # whether the rows of the forward are needed for a gradient of the weights
    # on a GPU: where rows of ids that are picked are written, none of which is returned then
    rows_to: RowSpread | None = None

    device_type: str  # that its tables are on
    gpu = -1  # of several forwards, the number of that which their tables are on
    # of several forwards on the CPU: the ids, int64 (N,), and the offsets, int64 (B,), that were planned for each. A
    # numpy array over the memory of a tensor can change it, and torch does not know
    planned_inputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def __init__(self, context: CallContext, batch: int, form: BatchForm | None = None) -> None:
        self.context = context
        self.batch = batch
        self.form = form
        self.parts: list[Any] = []

    # --- no plan: a lookup without gradient ---------------------------------------------------------------------------

    @staticmethod
    def read(batch: Batch, context: CallContext, place: Place, kind: PlanKind) -> torch.Tensor | None:
        """The output of a forward without gradient that needs no plan, of tables that are at `place`; None of one that
        does. Raises `InvalidInputError` before anything changes."""
        return None

    # --- plan ---------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def plan(
        self,
        batch: Batch,
        kind: PlanKind,
        *,
        may_exceed_bags: bool = False,
        memory: Any = None,
    ) -> None:
        """Checks ids and edges, turns ids into keys of each group, and has the cache of each group plan them: every key
        gets a home, and the rows are locked until the call is released. `kind`: how; `ahead` where the forward has yet
        to come · `may_exceed_bags`: whether ids beyond the last bag are left of longer batches, and no fault ·
        `memory`: on a GPU, where to plan. Raises `InvalidInputError` and, on a CPU, `IdOutOfRangeError` before anything
        changes."""

    def complete(self) -> bool:
        """Brings the plan to its end, where rows pass through the host; returns False if that failed, and the forward
        is to plan anew."""
        return True

    # --- the forward comes --------------------------------------------------------------------------------------------

    def start(self, *, trains: bool) -> None:
        """The forward has come: gives it its number among all forwards. Brings the rows of a dense optimizer to the
        current step if a backward is expected (`trains`), and scales rows down to `max_norm`."""
        self.number = next(NUMBERS)
        limits = self.context.options.max_norm is not None
        if self.context.is_dense and (trains or limits):  # a lookup without gradient reads them at the current step
            self.catch_up()
        if self.context.options.max_norm is not None:
            self.limit_norms(self.context.options.max_norm)

    @abc.abstractmethod
    def catch_up(self) -> None:
        """Brings the rows of this forward to the steps that their tables have taken, of a dense optimizer."""

    @abc.abstractmethod
    def limit_norms(self, max_norm: float) -> None:
        """Scales the rows of this forward down to `max_norm`, where they are longer."""

    # --- lookup -------------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Rows of the output: B, or where rows are not pooled as many as there are ids, or as a `Stack` says."""

    @abc.abstractmethod
    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        """The pooled rows, (B, ΣD) in the rows' dtype; or the rows of the ids, (N, D), feature by feature."""

    @abc.abstractmethod
    def pick(self, ids: torch.Tensor) -> torch.Tensor:
        """Where rows are not pooled, those of some of the ids alone, (K, D): int64 (K,), which of them."""

    @abc.abstractmethod
    def pool_stack(
        self, weights: torch.Tensor | None, dtype: torch.dtype, *, differentiable: bool, all_rows: bool
    ) -> StackRows:
        """The output of a batch that has a `Stack`. `weights`: float32 (N,), of which those of ids in bags count ·
        `dtype`: of pooled bags · `all_rows`: whether the rows of all ids are asked for, too."""

    # --- backward and update: `apply` in host_call and device_update, for all calls of a backward pass ----------------

    @abc.abstractmethod
    def weights_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 (N,), given that of the outputs, float32 (B, ΣD)."""

    @abc.abstractmethod
    def weigh(self, scale: torch.Tensor) -> None:
        """Where the output has no columns of features: the gradient of each id's row is to be multiplied by its
        `scale`, float32 (N,), which is 1 in a bag that takes a mean."""

    @abc.abstractmethod
    def tables_of_rows(self) -> torch.Tensor:
        """The table of each row of an output that has no columns of features, int64 (R,)."""

    # --- release ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Its rows may leave their slots: after the update, after a lookup without gradient, or when nobody can call a
        backward of it any more."""
        for part in self.parts:
            part.ticket.release()

    @property
    def is_over(self) -> bool:
        """Whether no backward of it can come any more."""
        return self.consumed or not any(part.ticket.lasts for part in self.parts)

    # --- of several forwards ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def join(self, forwards: Sequence[Given]) -> Batch:
        """What they are given, as one batch to be planned. Raises `InvalidInputError` for what is wrong with one of
        them, or leaves that to the plan."""

    @abc.abstractmethod
    def pool_blocks(self) -> Sequence[torch.Tensor]:
        """The outputs of those in each pool, (F·B, D)."""

    @abc.abstractmethod
    def alone(self, block: int, place: int, context: CallContext) -> Call:
        """One of them as a call of its own over its slice of the plan: that at `place` of a block, of who has this
        `context`."""

    def begin_alone(self) -> None:
        """One of them is about to be looked up by itself."""

    @abc.abstractmethod
    def catch_up_slice(self, forward: Any) -> None:
        """Brings the rows of one of them, a `Forward`, to the steps that its table has taken, of a dense optimizer."""

    @abc.abstractmethod
    def catch_up_block(self, block: int, is_as_looked_up: Callable[[int], bool]) -> bool:
        """The same of all of them in one pool, as one; returns False where that cannot be. `is_as_looked_up`: whether
        the rows of a block are as the lookup has read them."""


def release_all(calls: Sequence[Any]) -> None:
    """Releases calls and uses of whole tables, forwards that were planned as one together."""
    of: dict[Any, list[Any]] = {}
    for call in calls:
        if call.forwards is None:
            call.release()
        else:
            of.setdefault(call.forwards, []).append(call)
    for forwards, those in of.items():
        forwards.release_those(those)
