"""Fetching ahead: while a batch computes, the rows of the next ones come.

A batch is planned from its ids before its forward, which finds its plan by the tensors that it is given
(`step.planned_forwards`). Plans follow one another in the order of the batches. A row that a batch in flight uses does
not move, and an update changes it where it is: what a later forward reads is never stale.
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
from tieredemb.pipeline.backward_thread import backward_on_this_thread
from tieredemb.pipeline.batches import do_nothing
from tieredemb.pipeline.lookups import Learned, Listener, LookupSpec, NamedLookups, divisions_of, learn
from tieredemb.pipeline.plan_executors import PlanExecutors, kind_of
from tieredemb.pipeline.plan_groups import PlannedGroup
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
    """Goes through the batches of `loader` and has the rows of the next `depth` ones planned and fetched while one
    computes; numbers are those of the loop without it, bit for bit.

    `loader`: any iterable of batches, which must not change once they were handed on; where all tables are on one GPU
    batches in host memory are copied there, from pinned memory without waiting · `model`: holds the tiered modules ·
    `ids_of`: a function that names what a batch's forwards will look up: ids or (ids, offsets), the very tensors, or
    what a collection takes by name; a list of such for several forwards; for several tiered modules a mapping
    from them, or from their names, to these. Without it the first batch shows which of its tensors reach which module,
    and fetching ahead starts with the second; ids that the model computes cannot be guessed, which a warning says.

    Where the host is what the loop waits for, nothing can be hidden: steps on a GPU, over tiers that its kernels reach,
    are timed now and then, of several ranks on the first, and planned ahead while that makes them faster. Backward
    passes inside of the loop run on its thread, if one GPU has the whole model, and not on autograd's. Plans ahead
    lock rows: those of `depth` batches more than without. Leaving the loop drops them. An exception of the loader
    comes at its batch. Returns an iterable with the length of `loader`, for any number of loops, one at a time. Raises
    `ConfigError`.

    >>> model = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4, optimizer=tieredemb.SGD(lr=0.1)), nn.Linear(4, 1))
    >>> for ids in tieredemb.prefetch(torch.randint(1000, (5, 8, 3)), model):
    ...     model(ids).sum().backward()
    """
    return Prefetch(loader, model, depth, ids_of=ids_of)


def autotuner_of(modules: Iterable[LookupModule], depth: int) -> Autotuner | SharedAutotuner | None:
    """What finds out whether planning ahead pays: where all plans are launches on one GPU, and cost the host alone."""
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
    """A batch, or what the loader raised in its place; its plans, once there are any."""

    def __init__(
        self,
        batch: B,
        receive: Callable[[], None] = do_nothing,
        *,
        error: BaseException | None = None,
    ) -> None:
        self.batch = batch
        self.receive = receive  # to be called before the batch is used, on each stream that uses it
        self.is_received = False  # by the step that it is one of the next batches for
        self.error = error
        self.planned: list[PlannedGroup] = []

    def drop(self, *, wait: bool = False) -> int:
        """Drops the plans that no forward took; returns how many were made in vain. `wait`: until these are made,
        and it is known whether they fail."""
        planned, self.planned = self.planned, []
        return sum(among.drop(each, wait=wait) for among, each in planned)


class Run(Generic[B]):
    """One loop over the batches. `named`: what a batch's forwards look up, where the user has named it."""

    def __init__(
        self, prefetch: Prefetch[B], executors: PlanExecutors, named: Callable[[B], list[LookupSpec]] | None
    ) -> None:
        self.queue: deque[_Fetched[B]] = deque()
        self.named = named
        self._prefetch = prefetch
        self._executors = executors
        self._divisions = divisions_of(prefetch.modules.values())
        # a captured step that plans by itself again takes the loop over with its first batch: plans before are in vain
        self._lookups = None if prefetch.model in _LEFT_TO_STEPS else named
        self._planners: list[Callable[[], object]] = []  # drop what captured steps have planned in place of this loop
        self.requested_ahead = 0  # how many of the next batches such a step is given
        self._current: _Fetched[B] | None = None
        self._observed: list[LookupSpec] = []  # forwards of the current batch, while it is to be learned from
        self._listener: Listener | None = None
        self._warned = False
        for planned in _planned(prefetch).difference(*(_planned(run._prefetch) for run in _running())):
            planned.drop_all()  # plans of a loop whose end was interrupted
        self._listen(named is None and prefetch.depth > 0)
        _RUNNING.append(weakref.ref(self))

    def fetch(self, source: Iterator[B]) -> bool:
        """Queues the next batch and begins to plan it; returns whether that was the last."""
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
        """The next batch; raises what the loader raised in its place."""
        self._current = current = self.queue.popleft()
        if current.error is not None:
            raise current.error
        if self._prefetch.autotuner is not None and self._lookups is not None and not self._planners:
            self._prefetch.autotuner.step()
        current.receive()
        return current.batch

    def finish(self) -> None:
        """The batch handed out has been used."""
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
            self._observed.clear()  # one empty tensor is like another
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
        """Whether this very batch is the one in use."""
        return self._prefetch.depth > 0 and self._current is not None and self._current.batch is batch

    def following(self, most: int) -> list[B]:
        """The batches that will be handed out next, as far as they are there already, `most` of them at most."""
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
        """A captured step plans the batches by itself, up to `ahead` ones. `drop_plans` is called when the loop is
        left."""
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
        with contextlib.ExitStack() as each:  # one that is interrupted keeps no other from its end
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
                return  # a forward that nothing was planned for divides the capacity, once those before it are over
        try:
            lookups = self._lookups(fetched.batch)
        except Exception as error:
            if not isinstance(self._lookups, Learned):
                fetched.error = error  # the user's function has failed; it comes at its batch
            return  # a batch of another form than the one that was learned from plans when its forward comes
        self._executors.plan(lookups, fetched.planned)

    def _listen(self, on: bool) -> None:
        if on:
            self._listener = Listener(self.observe)
        elif self._listener is not None:
            self._listener.leave()

    def observe(self, forward: Forward) -> None:
        """A forward has come, of any module and thread."""
        if self._current is not None and any(forward.module is module for module in self._prefetch.modules.values()):
            self._observed.append(LookupSpec(forward.module, forward.given, forward.trains))


def _planned(prefetch: Prefetch[Any]) -> set[PlannedForwards]:
    return {module.planned for module in prefetch.modules.values()}


_LEFT_TO_STEPS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models for whose loops captured steps have planned
_RUNNING: list[weakref.ref[Run[Any]]] = []  # one whose beginning was interrupted goes when nobody has it


def _running() -> list[Run[Any]]:
    return [run for known in tuple(_RUNNING) if (run := known()) is not None]


def _leave(run: Run[Any]) -> None:
    """The loop is over."""
    _RUNNING[:] = [known for known in _RUNNING if known() not in (None, run)]


def running(batch: Any) -> Run[Any] | None:
    """The loop that fetches ahead and has handed this very batch out, if any."""
    if not _RUNNING:
        return None
    return next((run for run in reversed(_running()) if run.has_handed_out(batch)), None)
