"""Whole steps as one CUDA graph: captured from a user's function for eager steps, and replayed."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from tieredemb.config import is_whole, plain
from tieredemb.errors import InvalidInputError, UnsupportedError, shown
from tieredemb.kernels.captures import CAPTURING
from tieredemb.modules.forwards import Forward, observe_forwards
from tieredemb.modules.inputs import MAX_IDS
from tieredemb.pipeline.autotuner import Autotuner
from tieredemb.pipeline.batches import detached, do_nothing, tensors_of
from tieredemb.pipeline.buffers import OtherShapesError
from tieredemb.pipeline.prefetch import Run, running
from tieredemb.pipeline.summary import ACCUMULATES, FIRST, NO_GPU, OTHER_SHAPES, StepSummary
from tieredemb.step.agreement import UNKNOWN_IDS
from tieredemb.step.planned_forwards import identity

if TYPE_CHECKING:  # modules that capture are imported only with a GPU
    from tieredemb.pipeline.captured import StepFunction
    from tieredemb.pipeline.forms import Forms
    from tieredemb.step.agreement import Agreement

R = TypeVar("R")
MANY_EAGER = 16  # batches of other shapes after which ranks warn that none was captured
AHEAD = 2  # batches that a step goes ahead: it fills the rows of one, and plans the other


class GraphStep(Generic[R]):
    """A step that runs as a CUDA graph; see `graph_step`."""

    def __init__(self, step: Callable[[Any], R], example_batch: Any = None, *, max_ids: int | None = None) -> None:
        if not callable(step) or isinstance(step, type):
            raise InvalidInputError(f"step must be a function of a batch, got {shown(step)}")
        max_ids = plain(max_ids)
        if max_ids is not None and not (is_whole(max_ids) and 0 <= max_ids <= MAX_IDS):
            raise InvalidInputError(f"max_ids must be a number of ids, 0 … {MAX_IDS}, got {shown(max_ids)}")
        self._function = step
        self._example = example_batch
        self._max_ids = max_ids
        self._step: StepFunction[R] | None = None  # known once a first batch was observed
        self._forms: Forms[R] | None = None  # the same
        # finds out whether going ahead in a loop pays; several ranks have none: they always go ahead
        self._autotuner: Autotuner | None = None
        self._agreement: Agreement | None = None  # if several ranks run the step
        self._summary = StepSummary()

    def summary(self) -> StepSummary:
        """How its calls were run so far: how many were replayed, captured and eager, and why the latter were."""
        return replace(self._summary, eager=self._summary.eager.copy())

    def __call__(self, batch: Any) -> R:
        """Runs the step on `batch`: the first times by calling the function, then by replay. Returns what the function
        returns, with its tensors detached."""
        step = self._step
        due = [] if step is None else [division for division in step.divisions if division.request_if_due()]
        if due and not self._planned_from(batch):  # existing plans are used first
            self._drop_plans()
            for division in due:
                division.divide()
            due = []
        if step is not None and not step.is_current():
            self._forget()
            step = None
        if step is None:
            return self._first(batch)
        if CAPTURING and threading.get_ident() in CAPTURING:  # asking torch takes 1.3 µs of each replay
            raise UnsupportedError(
                "a captured step is called inside another one that is being captured, which cannot hold its replay; "
                "call the function that it was made of there"
            )
        if step.accumulates():
            return self._eagerly(step, batch, ACCUMULATES)
        forms, loop = self._forms, self._take_planning_over(step, batch)
        assert forms is not None
        if loop is not None and self._autotuner is not None:
            self._autotuner.step()
        if self._agreement is not None:
            return self._among_ranks(self._agreement, step, forms, batch, loop)
        try:
            return self._run(forms, batch, loop, drains=bool(due))
        except OtherShapesError:  # nothing has changed yet
            pass
        if not forms.change(batch):
            return self._eagerly(step, batch, OTHER_SHAPES)
        return self._run(forms, batch, loop, drains=bool(due))

    def _among_ranks(
        self, agreement: Agreement, step: StepFunction[R], forms: Forms[R], batch: Any, loop: Run[Any] | None
    ) -> R:
        """The step of several ranks, whose graphs have the shapes of the first batch. If one rank has a batch of other
        shapes, all run the function; if one has more ids than its buffers hold, it enlarges them, and all run the
        function until they have captured anew."""
        try:
            is_known = bool(self._planned_from(batch)) or not forms.has_other_shapes(batch) or forms.grow(batch)
            forms.ring(0 if loop is None else AHEAD)  # made here, where errors are announced to the other ranks
        except Exception as error:
            agreement.agree(0, error, step=step.number)
            raise
        if is_known:
            return self._run(forms, batch, loop)
        self._drop_plans()
        agreement.agree(0, step=step.number)
        self._summary.eager[OTHER_SHAPES] += 1
        if self._summary.eager[OTHER_SHAPES] == MANY_EAGER and not self._summary.captured:
            warnings.warn(
                f"a captured step of several ranks has run {MANY_EAGER} batches as the function, and captured none: "
                f"its graphs have the shapes of the first batch, and these have others; begin with one like most, or "
                f"make a new graph_step",
                stacklevel=3,
            )
        with step.on_buffers():  # as on other ranks, so that all count the same ids
            return step(batch)

    def _run(self, forms: Forms[R], batch: Any, loop: Run[Any] | None, *, drains: bool = False) -> R:
        """Runs a batch of the present form. Raises `OtherShapesError` for another form."""
        reach, most = (0, 0) if loop is None else self._reach(forms, batch, loop, drains=drains)
        ring = forms.ring(reach)
        try:
            return ring.run(batch) if loop is None else ring.run(batch, loop.following(most), loop.named)
        except Exception:
            if not (loop is not None and reach == 0 and ring.has_failed_to_capture and self._autotuner is not None):
                raise
            # the capture had no effect: the loop continues as before the trial, without further trials
            self._autotuner = None
            return self(batch)

    def _take_planning_over(self, step: StepFunction[R], batch: Any) -> Run[Any] | None:
        """The loop that fetches ahead and has handed out the batch, if the step may go ahead of it. The step then plans
        in place of the loop."""
        loop = running(batch)
        if loop is not None:
            if self._agreement is None and not step.gains_ahead:
                loop.leave_planning_to(do_nothing, 0)  # each batch is planned at its call
            elif loop.named or step.lookups.forwards:
                loop.leave_planning_to(self._leave_loop, AHEAD)
                return loop
        return None

    def _reach(self, forms: Forms[R], batch: Any, loop: Run[Any], *, drains: bool) -> tuple[int, int]:
        """In a loop that fetches ahead: how many batches the step goes ahead, and how many of the next ones it is
        given. If going ahead does not pay, the next batch has another form or there is none, or the step `drains`,
        existing plans are used first, so that no batch is planned twice. Several ranks always go ahead."""
        autotuner = self._autotuner
        if not drains and (autotuner is None or autotuner.ahead):
            if autotuner is None or self._planned_from(batch):
                return AHEAD, AHEAD
            following = loop.following(1)
            if following and not forms.has_other_shapes(following[0]):
                return AHEAD, AHEAD
        planned = self._planned_from(batch)
        if planned:
            return AHEAD, planned - 1
        ahead = forms.ring_if_made(AHEAD)
        if ahead is not None:
            ahead.drop_plans()  # they are of other batches
        return 0, 0

    def _planned_from(self, batch: Any) -> int:
        """How many batches are planned ahead, if `batch` is the first of them; else 0."""
        ahead = None if self._forms is None else self._forms.ring_if_made(AHEAD)
        return 0 if ahead is None else ahead.planned_from(batch)

    def _leave_loop(self) -> None:
        """Called when a loop that fetches ahead is over."""
        self._drop_plans()
        if self._autotuner is not None:
            self._autotuner.leave()

    def _eagerly(self, step: StepFunction[R], batch: Any, why: str) -> R:
        """Calls the function for a batch that no graph takes. `why`: for the summary."""
        self._drop_plans()
        self._summary.eager[why] += 1
        return step(batch)

    def _drop_plans(self) -> None:
        """Drops the plans of the batches of the next calls."""
        if self._forms is not None:
            self._forms.drop_plans()

    def _forget(self) -> None:
        """Forgets all graphs, as tables have moved, or began or ceased to train."""
        self._drop_plans()
        self._step = self._forms = None

    def _first(self, batch: Any) -> R:
        """Calls the function, and observes which modules look up which of the batch's tensors."""
        forwards: list[Forward] = []
        thread = threading.get_ident()

        def observe(forward: Forward) -> None:
            if threading.get_ident() != thread:  # another thread's forward
                return
            forwards.append(forward)
            if gpus := _gpus(forwards):
                from tieredemb.pipeline.captured import check_capturable

                for each in forwards:
                    check_capturable(each.module, gpus[0])
                check_agreed(forwards, batch)

        with observe_forwards(observe), observe_ddp() as has_ddp:
            result = detached(self._function, batch)
        if not _gpus(forwards):
            self._summary.eager[NO_GPU] += 1
        else:
            self._summary.eager[FIRST] += 1
            is_clear = all(part.numel() for each in forwards for part in each.given if isinstance(part, torch.Tensor))
            self._prepare(batch, forwards, is_clear=is_clear, has_ddp=bool(has_ddp))
            if self._step is not None:
                self._take_planning_over(self._step, batch)  # else the loop would plan the next batch for nothing
        return result

    def _prepare(self, batch: Any, forwards: list[Forward], *, is_clear: bool, has_ddp: bool) -> None:
        """Prepares buffers and forms from the first batch, if that `is_clear`: empty tensors are all alike."""
        from tieredemb.pipeline.buffers import Buffers
        from tieredemb.pipeline.captured import DDP_STEPS, EAGER_STEPS, StepFunction
        from tieredemb.pipeline.forms import Forms

        agreement, failed = agreement_of(forwards), None
        try:
            if is_clear:
                buffers = Buffers(batch, forwards, self._max_ids, self._example)
                eager_steps = DDP_STEPS if has_ddp else EAGER_STEPS
                step = StepFunction(self._function, batch, forwards, eager_steps)
        except Exception as error:
            failed = error
        if agreement is not None:
            is_clear = bool(agreement.agree(int(is_clear), error=failed))
        if failed is not None:
            raise failed
        if is_clear:
            known = self._autotuner
            if agreement is None and (known is None or known.device != step.device):
                self._autotuner = Autotuner(step.device, AHEAD)
            step.number = 0 if agreement is None else agreement.begin_step()
            self._forms, self._agreement = Forms(step, buffers, agreement, self._summary), agreement
            self._step = step


def agreement_of(forwards: Sequence[Forward]) -> Agreement | None:
    """The agreement of the ranks, if a step looks up in sharded modules."""
    return next((each.module.agreement for each in forwards if each.module.agreement is not None), None)


def check_agreed(forwards: Sequence[Forward], batch: Any) -> None:
    """Raises `UnsupportedError` if ranks could not agree on a captured step before each replay."""
    shared = list(dict.fromkeys(each.module for each in forwards if each.module.agreement is not None))
    if len(shared) > 1:
        raise UnsupportedError(
            f"a step with {len(shared)} sharded collections cannot be captured in a CUDA graph: put their tables into "
            f"one collection, or call the function itself"
        )
    ids = {identity((tensor,)) for _, tensor in tensors_of(batch)} if shared else set()
    for each in forwards:
        if each.module in shared and identity((each.given[0],)) not in ids:
            raise UnsupportedError(UNKNOWN_IDS)


@contextlib.contextmanager
def observe_ddp() -> Iterator[list[torch.nn.Module]]:
    """Yields the modules of `DistributedDataParallel` whose forwards run inside."""
    found: list[torch.nn.Module] = []
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield found
        return

    def observe(module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            found.append(module)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(observe)
    try:
        yield found
    finally:
        hook.remove()


def _gpus(forwards: list[Forward]) -> list[torch.device]:
    devices = (forward.module.tables.config.device for forward in forwards)
    return [device for device in devices if device.type == "cuda"]


def graph_step(step: Callable[[Any], R], example_batch: Any = None, *, max_ids: int | None = None) -> GraphStep[R]:
    """Runs `step(batch)` as one CUDA graph: forward, backward and fused update of the tiered modules it uses, including
    plan and movement of rows, dense layers and their optimizer.

    The first calls run the function eagerly; then a call is captured, and all later ones are replays, which copy the
    batch into buffers and launch once. Results are those of the function. If batches come from `prefetch`, the step
    fetches the rows of the next batch and plans the one after that while it computes this one; so it requests two
    batches ahead from the loader. In one process steps are timed now and then, and go ahead only while that makes them
    faster; never if all rows are resident and a batch has less than 131,072 ids.

    Batches have one structure and the same dtypes. Ids (and per-sample weights) may differ in number if offsets include
    the end of the last bag. A graph takes as many ids as the first batch, as `example_batch` (no step is run on it), or
    `max_ids`; for a batch with more the step is captured anew, with some to spare. A batch of other shapes, as a
    smaller last one, runs eagerly once, and then gets graphs of its own: eight shapes have graphs at a time, and no
    step goes ahead to a batch of other shapes. `summary()` counts replays, and says why other calls were not replayed.
    What the function returns is detached, and overwritten by a later call; so are gradients that it leaves in `.grad`,
    so let it step its optimizers. Python code, and all in a batch that is no tensor, is that of the capture: learning
    rates of fused optimizers are sent to the GPU before each replay, all else that changes has to be on the GPU
    (torch's `capturable=True`). A call runs eagerly while other batches are in flight, whose locked rows no replay can
    know, and inside `accumulate()`. Other threads' calls of its modules wait while it is captured, so it must not wait
    for theirs.

    A step of several ranks, with a `ShardedTieredEmbeddingBagCollection`, is a graph if GPUs exchange by NCCL: every
    call is a collective, in which all ranks replay it or all run the function: for a batch with too many ids, after
    which all capture a larger graph, and for every batch of other shapes than the first. Ids are checked before: a
    wrong one is refused on all ranks at its own call. With `DistributedDataParallel` the first twelve calls run the
    function, as torch requires.

    On the CPU, where there is nothing to capture, each call runs the function. Raises `UnsupportedError` for what no
    graph can contain: tiers that the host takes part in, `check_ids="always"`, calls in the function that wait for the
    GPU (the message names the line), a torch optimizer that needs `capturable=True`; and if a loss that is kept from an
    eager step on the default stream would end the capture: `del` it, or keep `loss.detach()`. Raises
    `InvalidInputError` for a batch of another structure or other dtypes. A failed capture, even by an error of the
    function, changes nothing: call again, or continue eagerly.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, optimizer=tieredemb.SGD(lr=0.1))
    >>> def step(ids):
    ...     loss = bag(ids).square().mean()
    ...     loss.backward()
    ...     return loss.detach()
    >>> train = tieredemb.graph_step(step)
    >>> for ids in tieredemb.prefetch(torch.randint(1000, (6, 8, 3)), bag):
    ...     loss = train(ids)
    """
    return GraphStep(step, example_batch, max_ids=max_ids)


def graph_forward(
    forward: Callable[[Any], R], example_batch: Any = None, *, max_ids: int | None = None
) -> GraphStep[R]:
    """As `graph_step`, for a function that only looks up: it runs under `torch.no_grad()`.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4)
    >>> serve = tieredemb.graph_forward(bag)
    >>> serve(torch.tensor([[1, 2], [3, 3]])).shape
    torch.Size([2, 4])
    """
    looks_up = torch.no_grad()(forward) if callable(forward) else forward
    return GraphStep(looks_up, example_batch, max_ids=max_ids)
