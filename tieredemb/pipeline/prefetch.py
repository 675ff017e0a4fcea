"""Fetching ahead: while a batch computes, the rows of the next ones are fetched.

A batch is planned from its ids before its forward, which finds its plan by its input tensors
(`step.planned_forwards`). Plans are made in the order of the batches. A row that a batch in flight uses does not move,
and an update changes it in place: no later forward reads a stale row.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tieredemb.config import is_whole, plain
from tieredemb.errors import ConfigError, shown, some_of
from tieredemb.modules.forwards import Forward
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.pipeline.autotuner import Autotuner, SharedAutotuner
from tieredemb.pipeline.batches import do_nothing
from tieredemb.pipeline.lookups import Learned, Listener, LookupSpec, NamedLookups, divisions_of, learn
from tieredemb.pipeline.plan_executors import PlanExecutors, kind_of
from tieredemb.pipeline.plan_groups import PlannedGroup
from tieredemb.step.backward_thread import backward_on_this_thread
from tieredemb.step.planned_forwards import PlannedForwards

B = TypeVar("B")


class Prefetch(Generic[B]):
    """The batches of `loader`, each planned and fetched before it is handed out; see `prefetch`."""

    def __init__(
        self, loader: Iterable[B], model: nn.Module, depth: int = 1, *, ids_of: Callable[[B], Any] | None = None
    ) -> None:
        depth = plain(depth)
        if not is_whole(depth) or depth < 0:
            raise ConfigError(f"depth must be a number of batches, 0 or more, got {shown(depth)}")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if ids_of is not None and (not callable(ids_of) or isinstance(ids_of, type)):
            raise ConfigError(f"ids_of must be a function of a batch, got {shown(ids_of)}")
        if isinstance(loader, type) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise ConfigError(f"loader must be an iterable of batches, as a DataLoader, got {shown(loader)}")
        self.loader = loader
        self.depth = depth
        self.modules = {name: part for name, part in model.named_modules() if isinstance(part, LookupModule)}
        if not self.modules:
            raise ConfigError(
                "the model has no tiered tables, so there is nothing to prefetch; see replace_embedding_bags"
            )
        if depth and any(_waits(module) for module in self.modules.values()):
            warnings.warn(
                "tables on a GPU with check_ids='always' plan nothing ahead, as every forward waits for the GPU; build "
                "them with check_ids='deferred'",
                stacklevel=3,
            )
        self._named = None if ids_of is None else NamedLookups(self.modules, ids_of)
        self.autotuner = autotuner_of(self.modules.values(), depth)
        self.model = model

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[B]:
        source, devices = iter(self.loader), [module.tables.config.device for module in self.modules.values()]
        with (
            PlanExecutors(self.modules) as executors,
            contextlib.closing(Run(self, executors, self._named)) as run,
            backward_on_this_thread(self.model, devices) if self.depth else contextlib.nullcontext(),
        ):
            ended = False
            while True:
                while not ended and len(run.queue) <= max(self.depth, run.requested_ahead):
                    ended = run.fetch(source)
                if not run.queue:
                    return
                yield run.hand_out()
                run.finish()


def prefetch(
    loader: Iterable[B], model: nn.Module, depth: int = 1, *, ids_of: Callable[[B], Any] | None = None
) -> Prefetch[B]:
    """Iterates over the batches of `loader`, and plans and fetches the rows of the next `depth` ones while one
    computes; results are those of the loop without it, bit for bit.

    `loader`: any iterable of batches, which must not change once they were yielded; if all tables are on one GPU,
    batches in host memory are copied there, from pinned memory without waiting · `model`: holds the tiered modules ·
    `ids_of`: a function that returns what a batch's forwards will look up: ids or (ids, offsets), the very tensors, or
    what a collection takes by name; a list of such for several forwards; for several tiered modules a mapping from
    them, or from their names, to these. Without it the first batch shows which of its tensors reach which module, and
    fetching ahead starts with the second; ids that the model computes cannot be guessed, and cause a warning.

    If the loop is bound by the host, nothing can be hidden: so steps on a GPU, over tiers that its kernels reach, are
    timed now and then, of several ranks on the first, and planned ahead only while that makes them faster. Backward
    passes inside the loop run on its thread, not on autograd's, if one GPU has the whole model. Plans ahead lock the
    rows of `depth` more batches. Leaving the loop drops them. An exception of the loader is raised at its batch.
    Returns an iterable with the length of `loader`, for any number of loops, one at a time. Raises
    `ConfigError`.

    >>> model = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4, optimizer=tieredemb.SGD(lr=0.1)), nn.Linear(4, 1))
    >>> for ids in tieredemb.prefetch(torch.randint(1000, (5, 8, 3)), model):
    ...     model(ids).sum().backward()
    """
    return Prefetch(loader, model, depth, ids_of=ids_of)


def autotuner_of(modules: Iterable[LookupModule], depth: int) -> Autotuner | SharedAutotuner | None:
    """Finds out whether planning ahead pays: if all plans are launches on one GPU, which cost only host time."""
    given = list(modules)
    kinds = {kind_of(module) for module in given}
    agreements = [module.agreement for module in given if module.agreement is not None]
    if depth == 0 or len(agreements) > 1:
        return None
    device, waits = next(iter(kinds))
    autotuner = Autotuner(device, depth) if len(kinds) == 1 and not waits and device.type == "cuda" else None
    return SharedAutotuner(autotuner, agreements[0]) if agreements else autotuner


def _waits(module: LookupModule) -> bool:
    config = module.tables.config
    return config.device.type == "cuda" and config.check_ids == "always"


class _Fetched(Generic[B]):
    """A batch, or the exception of the loader in its place; and its plans, once there are any."""

    def __init__(
        self,
        batch: B,
        receive: Callable[[], None] = do_nothing,
        *,
        error: BaseException | None = None,
    ) -> None:
        self.batch = batch
        self.receive = receive  # called before the batch is used, on each stream that uses it
        self.is_received = False  # by a step that goes ahead to it
        self.error = error
        self.planned: list[PlannedGroup] = []

    def drop(self, *, wait: bool = False) -> int:
        """Drops the plans that no forward took; returns how many plans were wasted. `wait`: until these are made, and
        it is known whether they fail."""
        planned, self.planned = self.planned, []
        return sum(among.drop(each, wait=wait) for among, each in planned)


class Run(Generic[B]):
    """One loop over the batches. `named`: what a batch's forwards look up, if the user has named it."""

    def __init__(
        self, prefetch: Prefetch[B], executors: PlanExecutors, named: Callable[[B], list[LookupSpec]] | None
    ) -> None:
        self.queue: deque[_Fetched[B]] = deque()
        self.named = named
        self._prefetch = prefetch
        self._executors = executors
        self._divisions = divisions_of(prefetch.modules.values())
        # such a model's captured step takes over planning with its first batch: earlier plans would be wasted
        self._lookups = None if prefetch.model in _LEFT_TO_STEPS else named
        self._planners: list[Callable[[], object]] = []  # drop the plans of captured steps, in place of this loop
        self.requested_ahead = 0  # how many of the next batches such a step requests
        self._current: _Fetched[B] | None = None
        self._observed: list[LookupSpec] = []  # forwards of the current batch, while lookups are learned from it
        self._listener: Listener | None = None
        self._warned = False
        for planned in _planned(prefetch).difference(*(_planned(run._prefetch) for run in _running())):
            planned.drop_all()  # plans that remain of a loop whose end was interrupted
        self._listen(named is None and prefetch.depth > 0)
        _RUNNING.append(weakref.ref(self))

    def fetch(self, source: Iterator[B]) -> bool:
        """Queues the next batch and begins to plan it; returns True at the end of the batches."""
        try:
            fetched: _Fetched[B] = _Fetched(*self._executors.fetch(next(source)))
        except StopIteration:
            return True
        except Exception as error:
            self.queue.append(_Fetched[Any](None, error=error))
            return True
        self.queue.append(fetched)
        self._plan(fetched)
        return False

    def hand_out(self) -> B:
        """The next batch; raises the exception of the loader in its place."""
        self._current = current = self.queue.popleft()
        if current.error is not None:
            raise current.error
        if self._prefetch.autotuner is not None and self._lookups is not None and not self._planners:
            self._prefetch.autotuner.step()
        current.receive()
        return current.batch

    def finish(self) -> None:
        """Called when the batch that was handed out has been used."""
        current, self._current = self._current, None
        assert current is not None
        if self._lookups is None and self.named is not None:
            self._lookups = self.named
            for fetched in self.queue:
                self._plan(fetched)
        if not current.planned and not self._observed:
            return
        planned = sum(each.count for _, each in current.planned)
        if planned and current.drop(wait=not self._warned) == planned and not self._warned:
            self._warned = True
            warnings.warn(
                "prefetch planned a batch that no forward looked up: the model is given other tensors than those "
                "planned (copies, other shapes, ids computed from them); name the ones it is given with ids_of, and "
                "give a captured step the very batch",
                stacklevel=3,
            )
        tensors = (part for lookup in self._observed for part in lookup.given if isinstance(part, torch.Tensor))
        if any(part.numel() == 0 for part in tensors):
            self._observed.clear()  # empty tensors cannot be told apart
        if self._lookups is None and self._observed:
            self._lookups, unknown = learn(current.batch, self._observed)
            self._listen(False)
            self._observed.clear()  # it holds the batch
            if unknown:
                names = [name or "the model" for name, module in self._prefetch.modules.items() if module in unknown]
                warnings.warn(
                    f"prefetch cannot tell from a batch what {some_of(names)} will look up, so nothing is fetched "
                    f"ahead for it: the ids are none of the batch's tensors. Name them with ids_of; where the model "
                    f"computes them, have the loader do that, or loop over the loader itself",
                    stacklevel=3,
                )
            for fetched in self.queue:
                self._plan(fetched)

    def has_handed_out(self, batch: Any) -> bool:
        """Whether this very object is the batch in use."""
        return self._prefetch.depth > 0 and self._current is not None and self._current.batch is batch

    def following(self, most: int) -> list[B]:
        """The batches to be handed out next, as far as they are queued, at most `most`."""
        following: list[B] = []
        for fetched in itertools.islice(self.queue, most):
            if fetched.error is not None:
                break
            if not fetched.is_received:
                fetched.receive()
                fetched.is_received = True
            following.append(fetched.batch)
        return following

    def leave_planning_to(self, drop_plans: Callable[[], object], ahead: int) -> None:
        """Leaves planning to a captured step, which plans up to `ahead` batches by itself. `drop_plans` is called when
        the loop is left."""
        if drop_plans in self._planners:
            return
        self.requested_ahead = max(self.requested_ahead, ahead)
        if self._planners:
            warnings.warn(
                "two captured steps take the batches of one prefetch loop: each plans the next one for itself, and "
                "neither can replay while the other's is in flight; make one step of them",
                stacklevel=3,
            )
        self._planners.append(drop_plans)
        _LEFT_TO_STEPS.add(self._prefetch.model)
        self._listen(False)
        self._observed.clear()
        self._drop_all()

    def close(self) -> None:
        """Drops all plans that no forward took."""
        with contextlib.ExitStack() as each:  # if one is interrupted, the others run all the same
            each.callback(self._drop_all)
            for drop_plans in self._planners:
                each.callback(drop_plans)
            each.callback(self._listen, False)
            if self._prefetch.autotuner is not None:
                each.callback(self._prefetch.autotuner.leave)
            each.callback(_leave, self)

    def _drop_all(self) -> None:
        for fetched in (*self.queue, *([] if self._current is None else [self._current])):
            fetched.drop()

    def _plan(self, fetched: _Fetched[B]) -> None:
        if self._lookups is None or self._prefetch.depth == 0 or fetched.error is not None:
            return
        if self._planners or not (self._prefetch.autotuner is None or self._prefetch.autotuner.ahead):
            return
        for division in self._divisions:
            if division.request_if_due():
                return  # an unplanned forward divides the capacity, once earlier batches are over
        try:
            lookups = self._lookups(fetched.batch)
        except Exception as error:
            if not isinstance(self._lookups, Learned):
                fetched.error = error  # the user's function has failed: raised at its batch
            return  # a batch of another form than the learned one is planned at its forward
        self._executors.plan(lookups, fetched.planned)

    def _listen(self, on: bool) -> None:
        if on:
            self._listener = Listener(self.observe)
        elif self._listener is not None:
            self._listener.leave()

    def observe(self, forward: Forward) -> None:
        """Called for each forward, of any module and thread."""
        if self._current is not None and any(forward.module is module for module in self._prefetch.modules.values()):
            self._observed.append(LookupSpec(forward.module, forward.given, forward.trains))


def _planned(prefetch: Prefetch[Any]) -> set[PlannedForwards]:
    return {module.planned for module in prefetch.modules.values()}


_LEFT_TO_STEPS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose captured steps plan for their loops
_RUNNING: list[weakref.ref[Run[Any]]] = []  # weak: one whose start was interrupted disappears


def _running() -> list[Run[Any]]:
    return [run for known in tuple(_RUNNING) if (run := known()) is not None]


def _leave(run: Run[Any]) -> None:
    """Removes a loop that is over."""
    _RUNNING[:] = [known for known in _RUNNING if known() not in (None, run)]


def running(batch: Any) -> Run[Any] | None:
    """The loop that fetches ahead and has handed out this very object, if any."""
    if not _RUNNING:
        return None
    return next((run for run in reversed(_running()) if run.has_handed_out(batch)), None)
