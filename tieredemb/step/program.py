"""The program of a batch: the phases of one forward, of its backward and of its update, in their order.

    phase       by                          reads                           writes
    plan        Call.plan, Call.complete    ids, edges of bags, map, cold   keys, homes; slots, map, scores; a ticket,
                                            rows and scores                 which locks the rows
    start       Call.start                  homes, rows, steps taken        rows at the current step; rows in max_norm
    lookup      Call.pool                   homes, rows, edges              the output
    backward    LookupFunction,             gradient of the output          the calls that this backward pass collects;
                BackwardPass                                                the gradient of per-sample weights
    update      host_call.apply,            segments of homes, gradients    rows, optimizer state, dirty bits, steps
                device_update.apply                                         taken
    release     Call.release                                                the ticket: its rows may leave their slots

A plan has phases of its own, which belong to the cache (find, place, publish, move). Both devices have all of these
phases: `host_call` for the CPU, `device_call` and `device_update` for GPUs. On one device results have the same bits,
however a batch is run.

**Who runs the phases.** A module's forward calls `Engine.lookup`.
    - A forward without gradient over memory of the CPU mostly needs no plan: `Call.read` (`reading.py`) returns its
      output, or None if it does need one. Any other forward takes the plan that was made ahead for its input tensors,
      or plans now. Then it starts and looks up. If no row is to be trained, it is then released.
    - A forward whose inputs are known early is planned by `Engine.plan_ahead`. Several forwards, of tables that share
      caches, are planned as one by `pipeline.plan_groups` (`Forwards`). The forward that takes such a plan completes
      it.
    - A plan ahead that failed raises nothing, unless its cache has become unusable: its forward plans anew, and raises
      if that fails too.
    - A forward inside a backward pass is a recomputation (activation checkpointing): its plan scores nothing, and its
      gradient goes to the outermost pass.
    - `CallContext.apply` receives the calls that a backward pass has collected, in the order of their forwards. They
      are updated as one, as a dense gradient would be: at once, when the outermost pass has ended; at the end of
      `accumulate()`; or in the step of a torch optimizer that the tables follow. Then they are released; earlier, if a
      gradient has become rows of its own (`host_row_update`, `device_row_update`). A backward that fails updates
      nothing, and its calls are released.

**On which thread or stream.**
    - CPU: a phase is done when its method returns. Plans ahead run one after another on one thread of the loop; the
      forward that takes a plan waits for it.
    - GPU, rows reached by kernels: phases launch on the current stream, and the host never waits, except with
      check_ids="always". Plans ahead are launched on one side stream. The stream that first uses the rows of such a
      plan waits for the event `ticket.ready`. Within a plan, publishing and the sort for the update run on a side
      stream while the rows move. If plan and lookup are in one graph, the sort also runs beside the lookup, and joins
      the stream at the end of the lookup (`ticket.side_done`).
    - GPU, rows that pass through the host (`File`, `Pmem`): a plan that is needed now waits for the report of missed
      rows, reads storage and sends the rows. For a plan ahead, copy threads read storage once the report is there, and
      `complete` sends the rows: with the next plan, or for the forward that takes this one. If that takes long, a
      worker thread makes the whole plan.
    - Updates run on the autograd thread that ends the backward, or on the thread that calls the optimizer's step or
      `accumulate()`, and on its stream.

**How a GPU launches them.**
    - Launched: kernel by kernel.
    - Recorded (`recorded_plans`, `recorded_updates`): what has the same form for the third time is captured as a small
      graph, and replayed from then on. If a plan is made now, plan and lookup are one graph: `plan` replays it, and
      `pool` returns the output. With maxima, `max_norm`, a dense optimizer, rows below bags or weights of samples, the
      lookup is launched. If the plan is made ahead, or over storage that the host reads, the lookup has its own graph,
      which `pool` replays. So has an update. For each plan the host makes tickets, and counts a batch. Recomputations
      are launched.
    - Captured (`pipeline.ring`): `graph_step` runs a few steps eagerly, and then captures a whole step: the methods
      above run while the stream is captured, and launch into the graph. A step that goes ahead captures three graphs,
      each of which computes one batch, moves the rows of the next, and plans the one after that. A replay runs none of
      these methods: the graph plans, looks up and updates. The host copies the batch to be planned into the graph's
      buffers, raises errors that earlier batches have reported, sends learning rates, enters the batches that the
      replay leaves in flight into the ledger, and releases the batch that was computed.

**Errors in ids or offsets.** A CPU raises in `plan`, before anything changes. A GPU sets a flag: a bad id reads zeros,
after bad offsets nothing is read, the batch updates no row, and a later forward or whole-cache call raises. A batch
that is too large raises in `plan`, and so does a bad id with check_ids="always".
"""

from __future__ import annotations

import abc
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from tieredemb.cache.base import PlanKind
from tieredemb.errors import BackwardError
from tieredemb.kernels.tracing import callback, is_compiling, untraced
from tieredemb.lookup.options import LookupOptions
from tieredemb.step.batch import Batch, Given
from tieredemb.step.batch_form import BatchForm, BatchForms
from tieredemb.tables.row_optimizer import RowOptimizer
from tieredemb.tables.table_set import Place, TableSet

if TYPE_CHECKING:
    from tieredemb.kernels.spread import RowSpread

NUMBERS = itertools.count()  # forward order of calls
BACKWARDS: list[Callable[[], object]] = []  # called inside each backward that reaches a module
# calls with the gradients of their outputs, float32 (B, ΣD); and uses of whole tables with their terms
Collected = list[tuple[Any, Any]]


class StackRows(NamedTuple):
    """The output of a batch with a `Stack`: pooled bags (K, D), the rows of the picked ids, (·, D) in the rows' dtype,
    and, if requested, the rows of all ids, (N, D)."""

    bags: torch.Tensor
    rows: torch.Tensor
    every: torch.Tensor | None


class Updater(Protocol):
    """Has the optimizer of the rows, if there is one."""

    @property
    def optimizer(self) -> RowOptimizer | None: ...


@dataclass(frozen=True, eq=False)
class CallContext:
    """What a call needs of the module that makes it. `tables`: looked up in · `options`: how rows are treated ·
    `updater`: has the `optimizer` that updates them, if any · `backward_pass`: collects the gradient · `apply`: called
    with all that one backward pass has collected. A call keeps its context, and so the tables, alive."""

    tables: TableSet
    options: LookupOptions
    updater: Updater
    backward_pass: BackwardPass
    apply: Callable[[Collected], None]

    @functools.cached_property
    def forms(self) -> BatchForms:
        """The known forms of batches of several tables."""
        return BatchForms()

    @property
    def is_dense(self) -> bool:
        """Whether the optimizer changes every row in every step."""
        return self.tables.placed.now.groups[0].is_dense

    @property
    def optimizer(self) -> RowOptimizer | None:
        """The optimizer of the rows now: a module may begin to follow one at any time."""
        return self.updater.optimizer

    def check_trainable(self) -> RowOptimizer:
        """The optimizer; raises `BackwardError` without one (never a silent default learning rate)."""
        optimizer = self.optimizer
        if optimizer is None:
            raise BackwardError(
                f"backward reached {self.tables.named}, built without an optimizer, so it cannot update its rows; pass "
                "optimizer=tieredemb.Adagrad(lr=…), or a torch optimizer, or call tieredemb.follow(model, optimizer) "
                "before, or requires_grad_(False) on the module to keep it as it is"
            )
        if not optimizer.is_there and not optimizer.look_for():
            raise BackwardError(
                f"backward reached {self.tables.named}, which is to follow a torch optimizer and does not yet, so "
                f"nothing would update its rows: none has it among its params, or several do; build the optimizer of "
                f"the model's parameters, or call tieredemb.follow(model, optimizer) before"
            )
        return optimizer


class Call(abc.ABC):
    """One forward of a module, or several forwards that are planned as one (`Forwards`). `context`: of the module ·
    `batch`: B, its samples · `form`: of the batch, if it is of several forwards · `parts`: for each group of tables of
    one width, its bags, its ticket, and what its gradient needs (`HostGroupCall`, `DeviceGroupCall`)."""

    number = -1  # in the order of forwards, once it has started
    forwards: Any = None  # if it is one of several that were planned as one: all of them,
    block = 0  # and the number of its pool among their pools
    consumed = False
    requested: Collected | None = None  # takes the gradient in `torch.autograd.grad`, which trains nothing
    # the backward pass that recomputes this forward, if any: it applies the call, wherever the gradient arrives
    within: weakref.ref[CollectedCalls] | None = None
    keeps_rows = False  # whether the rows of the forward are needed for a gradient of the weights
    # on a GPU: where the rows of picked ids are written; then none of them is returned
    rows_to: RowSpread | None = None

    ids: int  # how many there are
    device_type: str  # of its tables
    gpu = -1  # of several forwards: the number of their tables' GPU
    # of several forwards on the CPU: the ids, int64 (N,), and the offsets, int64 (B,), that were planned for each.
    # Torch does not notice if a tensor is changed through a numpy array over its memory
    planned_inputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def __init__(self, context: CallContext, batch: int, form: BatchForm | None = None) -> None:
        self.context = context
        self.batch = batch
        self.form = form
        self.parts: list[Any] = []

    # --- no plan: a lookup without gradient ---------------------------------------------------------------------------

    @staticmethod
    def read(batch: Batch, context: CallContext, place: Place, kind: PlanKind) -> torch.Tensor | None:
        """The output of a forward without gradient, of tables at `place`; None if it needs a plan. Raises
        `InvalidInputError` before anything changes."""
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
        gets a home, and the rows are locked until the call is released. `kind`: how; `ahead` if it is for a later
        forward · `may_exceed_bags`: whether ids beyond the last bag are remains of longer batches, and no fault ·
        `memory`: on a GPU, the memory to plan into. Raises `InvalidInputError` and, on a CPU, `IdOutOfRangeError`
        before anything changes."""

    def complete(self) -> bool:
        """Fills the rows of a plan made ahead that pass through the host. Returns False if that failed: the forward
        then plans anew."""
        return True

    # --- the forward starts -------------------------------------------------------------------------------------------

    def start(self, *, trains: bool) -> None:
        """The forward starts: gives it its number among all forwards. Brings the rows of a dense optimizer to the
        current step if a backward is expected (`trains`), and scales rows down to `max_norm`. Forwards planned as one
        read copies at the current step; their rows catch up later (`Forwards`)."""
        self.number = next(NUMBERS)
        limits = self.context.options.max_norm is not None
        if self.context.is_dense and (trains or limits):  # a lookup without gradient reads them at the current step
            self.catch_up()
        if self.context.options.max_norm is not None:
            self.limit_norms(self.context.options.max_norm)

    @abc.abstractmethod
    def catch_up(self) -> None:
        """With a dense optimizer: brings the rows of this forward to the current steps of their tables."""

    @abc.abstractmethod
    def limit_norms(self, max_norm: float) -> None:
        """Scales the rows of this forward that are longer than `max_norm` down to it."""

    # --- lookup -------------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Rows of the output: B; N if rows are not pooled; or what the `Stack` has."""

    @abc.abstractmethod
    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        """The pooled rows, (B, ΣD) in the rows' dtype; or if they are not pooled the rows of the ids, (N, D), feature
        by feature."""

    @abc.abstractmethod
    def pool_stack(
        self, weights: torch.Tensor | None, dtype: torch.dtype, *, differentiable: bool, all_rows: bool
    ) -> StackRows:
        """The output of a batch with a `Stack`. `weights`: float32 (N,), used for ids in bags alone · `dtype`: of
        pooled bags · `all_rows`: whether to return the rows of all ids, too."""

    # --- backward and update: `apply` in host_call and device_update, for all calls of a backward pass ----------------

    def weights_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 (N,), given the gradient of the outputs, float32 (B, ΣD)."""
        found = torch.zeros(self.ids, dtype=torch.float32, device=grad.device)
        for part in self.parts:
            part.weights_gradient(grad, found)
        return found

    @abc.abstractmethod
    def weigh(self, scale: torch.Tensor) -> None:
        """If the output has no columns of features: has the gradient of each id's row multiplied by its `scale`,
        float32 (N,), which is 1 in a bag that takes a mean."""

    def tables_of_rows(self) -> torch.Tensor:
        """The table of each row of an output that has no columns of features, int64 (R,)."""
        (part,) = self.parts
        found: torch.Tensor = part.tables_of_rows()
        return found

    # --- release ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Lets its rows leave their slots: after the update, after a lookup without gradient, or when no backward can
        reach it any more."""
        for part in self.parts:
            part.ticket.release()

    @property
    def is_over(self) -> bool:
        """Whether no backward can reach it any more."""
        return self.consumed or not any(part.ticket.lasts for part in self.parts)

    # --- of several forwards ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def join(self, forwards: Sequence[Given]) -> Batch:
        """Joins the inputs of the forwards to one batch to be planned. Raises `InvalidInputError` if one of them is
        wrong, or leaves that to the plan."""

    @abc.abstractmethod
    def pool_blocks(self) -> Sequence[torch.Tensor]:
        """For each pool, the outputs of its forwards, (F·B, D)."""

    @abc.abstractmethod
    def alone(self, block: int, place: int, context: CallContext) -> Call:
        """One of the forwards, that at `place` of a block, as a call of its own over its slice of the plan. `context`:
        of its module."""

    def begin_alone(self) -> None:  # noqa: B027 - a CPU has nothing to begin
        """Called before one of the forwards is looked up by itself."""

    @abc.abstractmethod
    def catch_up_slice(self, forward: Any) -> None:
        """With a dense optimizer: brings the rows of one of them, a `Forward`, to the current step of its table."""

    @abc.abstractmethod
    def catch_up_block(self, block: int, is_as_looked_up: Callable[[int], bool]) -> bool:
        """The same for all forwards in one pool, as one; returns False if that is impossible. `is_as_looked_up`:
        whether the rows of a block are unchanged since the lookup read them."""


def release_all(calls: Sequence[Any]) -> None:
    """Releases calls and uses of whole tables; forwards that were planned as one in one go."""
    of: dict[Any, list[Any]] = {}
    for call in calls:
        if call.forwards is None:
            call.release()
        else:
            of.setdefault(call.forwards, []).append(call)
    for forwards, those in of.items():
        forwards.release_each(those)


# --- backward: the autograd node of lookups, which does not have tables as inputs -------------------------------------


class Calls(dict[int, Any]):
    """The calls of a node, by the numbers of their outputs. The node alone keeps them alive."""


class LookupFunction(torch.autograd.Function):
    """Autograd node of calls that are looked up as one, with an output for each: one Python call for all of them,
    forward and backward. Tables are no inputs; `hook` (float32 (0,)) requires the gradient in their place. `weights`:
    per-sample weights, for a single call only · `calls`: by the numbers of their outputs; `outputs` may add them while
    it makes these, or they are added later, but before a backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hook: torch.Tensor,
        weights: torch.Tensor | None,
        calls: Calls,
        outputs: Callable[[], Sequence[torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # no zeros for outputs that were not used
        ctx.calls = calls
        found = tuple(outputs())
        ctx.weights_like = None if weights is None else (weights.shape, weights.dtype)
        if not ctx.needs_input_grad[0]:
            release_all([*calls.values()])  # the gradient of weights needs the rows of the forward, which calls keep
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor | None, None, None]:
        if is_compiling() or callback() is not None:
            return _backward_untraced(ctx, *grads)
        # without a graph of the backward, nothing need refuse to differentiate it
        return _backward_once(ctx, *grads) if torch.is_grad_enabled() else _backward(ctx, *grads)


class LookedUp(Protocol):
    """What a node looks up: a `Call`, one of several forwards that share a call, or a forward of several ranks."""

    keeps_rows: bool

    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor: ...


def look_up(hook: torch.Tensor, weights: torch.Tensor | None, make: Callable[[], LookedUp]) -> torch.Tensor:
    """The output of a call that is made inside its autograd node."""
    calls = Calls()

    def outputs() -> list[torch.Tensor]:
        call = calls[0] = make()
        call.keeps_rows = weights is not None and weights.requires_grad
        return [call.pool(weights, differentiable=True)]

    return LOOKUP(hook, weights, calls, outputs)[0]


def check_backward(call: Call) -> None:
    """Raises `BackwardError` if a gradient of the call's output was applied already, or nothing can apply it."""
    if call.consumed:
        raise BackwardError(
            "this forward has been backpropagated already, and its update applied to the rows in place; "
            "run the forward again, or sum the losses and call backward once (retain_graph is not supported)"
        )
    call.context.check_trainable()


def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor | None, None, None]:
    """Collects the gradients of calls' outputs for the update; returns the gradient of per-sample weights."""
    for listener in tuple(BACKWARDS):
        listener()
    calls, (of_rows, of_weights, *_) = ctx.calls, ctx.needs_input_grad
    # not in autograd.grad(…, inputs) or backward(inputs=…), which ask for other gradients than the tables'
    requested = next(iter(calls.values())).requested if calls else None
    trains = requested is None and of_rows and torch._C._will_engine_execute_node(ctx.next_functions[0][0])
    collected = [(calls[at], grad.detach().to(torch.float32)) for at, grad in enumerate(grads) if grad is not None]
    if len(grads) == 1 and collected:  # several are put together by the update
        collected = [(collected[0][0], collected[0][1].contiguous())]
    if trains or requested is not None:
        for call, _ in collected:
            optimizer = call.context.updater.optimizer
            if call.consumed or optimizer is None or not optimizer.is_there:
                check_backward(call)
    weights_grad = None
    if of_weights and collected:
        ((call, grad),), (shape, dtype) = collected, ctx.weights_like
        weights_grad = call.weights_gradient(grad).to(dtype).reshape(shape)
    if requested is not None:
        requested += collected
    elif trains and collected:
        collected[0][0].context.backward_pass.add(*collected)
        for call, _ in collected:
            call.consumed = True
    return None, weights_grad, None, None


_backward_once = once_differentiable(_backward)
_backward_untraced = untraced(_backward_once)


# `LookupFunction.apply` without its support of functorch's transforms, inside of which modules refuse to run
LOOKUP: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, LookupFunction).apply


# --- backward: the calls of one pass, applied at its end --------------------------------------------------------------


def in_forward_order(collected: Collected) -> Collected:
    """Calls, and uses of whole tables, in the order of their forwards."""
    if len(collected) < 2:
        return collected
    numbers = [call.number for call, _ in collected]
    if numbers == sorted(numbers):
        return collected
    return [collected[at] for at in sorted(range(len(numbers)), key=numbers.__getitem__)]


def inside_backward() -> bool:
    """Whether an autograd backward pass runs on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def _backward_depth() -> int:
    """How many backward passes this thread's Python frames are inside of."""
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return depth


class BackwardPass:
    """Collects the calls that each backward pass reaches, and applies them once when its outermost task ends.

    Autograd runs a callback queued inside a nested (checkpointed) backward at the end of that backward. So it is queued
    earlier: by the first forward that is recomputed, on the same thread, whose call then belongs to the outer pass.
    Backward passes of several threads are collected separately, even if one autograd thread serves the GPU nodes of
    all: there a forward is recomputed inside another pass only if Python is still inside that pass.
    """

    def __init__(self) -> None:
        self._of_task: weakref.WeakValueDictionary[int, CollectedCalls] = weakref.WeakValueDictionary()
        self._of_thread: weakref.WeakValueDictionary[int, CollectedCalls] = weakref.WeakValueDictionary()

    def touch(self) -> weakref.ref[CollectedCalls]:
        """Called by every forward inside a backward pass; returns the calls collected by the pass that recomputes
        it."""
        task, thread = torch._C._current_graph_task_id(), threading.get_ident()
        collected = self._of_task.get(task)
        if collected is None or collected.finished:
            depth, around = _backward_depth(), self._of_thread.get(thread)
            if around is not None and not around.finished and depth > around.depth:
                collected = around
                self._of_task[task] = around
            else:
                collected = self._begin(task, depth)
        self._of_thread[thread] = collected
        return weakref.ref(collected)

    def add(self, *gradients: tuple[Any, Any]) -> None:
        """Adds calls with the gradients of their outputs, or uses of whole tables with their terms, as the backward
        reaches them. Several are of one forward pass."""
        within = gradients[0][0].within
        collected = None if within is None else within()
        if collected is None or collected.finished:
            task = torch._C._current_graph_task_id()
            collected = self._of_task.get(task)
            if collected is None or collected.finished:
                collected = self._begin(task, _backward_depth())
        collected.calls.extend(gradients)

    def _begin(self, task: int, depth: int) -> CollectedCalls:
        collected = CollectedCalls(depth)
        torch.autograd.Variable._execution_engine.queue_callback(collected)
        self._of_task[task] = collected
        return collected


class CollectedCalls:
    """The calls of one backward pass, and the callback that has them applied and released. Autograd alone holds it, and
    drops it if the backward fails: its calls then update nothing, and their tickets are released."""

    def __init__(self, depth: int) -> None:
        self.depth = depth  # of backward passes around it on its thread
        self.calls: Collected = []
        self.finished = False

    def __call__(self) -> None:
        if is_compiling() or callback() is not None:
            _apply_untraced(self)
        else:
            _apply(self)


def _apply(collected: CollectedCalls) -> None:
    collected.finished = True
    calls, collected.calls = collected.calls, []
    if calls:
        calls[0][0].context.apply(calls if len(calls) == 1 else in_forward_order(calls))


_apply_untraced = untraced(_apply)
