"""The tables that follow one torch optimizer: it tells of its steps once, for all of them.

A model may have many tables, each with a module of its own. What its optimizer does reaches them through one set of
hooks, which know the tables weakly, and what a param group means is read once for all tables in it.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import is_
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tieredemb.config import OptimizerConfig
from tieredemb.kernels.tracing import untraced
from tieredemb.tables.param_groups import SeenGroups, is_plain, is_same, options_in
from tieredemb.tables.torch_kinds import as_numbers, config_of, is_known


class Follower(Protocol):
    """One set of tables, as the steps of its optimizer see it."""

    def check_options_now(self) -> None:
        """Raises `ConfigError` where the param group means what the tables' rows cannot be trained by."""

    @staticmethod
    def check_steps(those: Sequence[Any]) -> Sequence[Any]:
        """Those, of this kind, of whose tables a step of the optimizer is one, too. Raises what it would raise beside
        that, before anything changes."""

    cache_key: Hashable  # equal of tables that share a cache, or are looked up together: their steps are one

    def step(self, others: Sequence[Any]) -> None:
        """Takes a step, and those of `others`, which are due with it."""

    in_state_dict: bool  # whether state dicts of the optimizer hold the tables' state

    def add_states(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's `state_dict()`, with the tables' state."""

    def take_states(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Takes the tables' state out of a state dict that the optimizer is about to load."""

    def set_states(self) -> None:
        """The optimizer has loaded the rest."""


class Meaning:
    """What a param group means: a `config`, and its `items` by name."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self.items: tuple[tuple[str, Any], ...] = tuple(asdict(config).items())


class _Group:
    """What one param group means, as it is now; the same object as long as that is the same."""

    def __init__(self) -> None:
        self._meaning: Meaning | None = None
        self._options: dict[str, Any] | None = None  # that it is the meaning of
        self._plain: dict[str, Any] | None = None  # the group as it was, if nothing in it may change in place
        self._values: list[Any] = []  # of it, params among them

    def meaning(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any], *, waits: bool) -> Meaning:
        if self._meaning is not None and self._plain is not None:  # in a step each of many tables asks
            if len(group) == len(self._values) and all(map(is_, group.values(), self._values)):
                return self._meaning
            if is_same(group, self._plain):
                self._values = [*group.values()]
                return self._meaning
        values, group = [*group.values()], options_in(group)
        options = as_numbers(group, waits=waits)
        if self._meaning is None or options != self._options:
            self._meaning, self._options = Meaning(config_of(kind, options)), options
        self._plain, self._values = group if is_plain(group.values()) else None, values
        return self._meaning


class _Keywords(dict[str, Any]):
    """What a step is called with: it lives as long as the step, which an exception may end."""


class Followers:
    """Those of one optimizer, in the order in which they came to follow it. See `followers_of`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._kind, self._optimizer = type(optimizer), weakref.ref(optimizer)
        self._those: list[weakref.ref[Any]] = []
        self._due: list[weakref.ref[Any]] = []  # with the step that has begun
        self._groups: dict[tuple[int, bool], _Group] = {}
        self._checked: SeenGroups | None = None  # the param groups as they were when all of those took them for good
        # of a step that has begun a reference that is empty once it has ended, and its thread. Its own code records no
        # gradients, as hooks and closures of a step do, and what follows an exception
        self.begun: tuple[weakref.ref[_Keywords], int] | None = None
        mine = weakref.ref(self)

        @untraced
        def before(_: Any, args: Any, kwargs: Any) -> Any:
            me = mine()
            return None if me is None else me._before(args, kwargs)

        @untraced
        def after(_: Any, args: Any, kwargs: Any) -> None:
            me = mine()
            if me is not None:
                me._after()

        def saving(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            for each in reversed(_listed(mine)):  # who takes a part of a state dict first has put it in last
                state_dict = each.add_states(state_dict)
            return state_dict

        def loading(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            for each in _listed(mine):
                state_dict = each.take_states(state_dict) or state_dict
            return state_dict

        def loaded(_: Any) -> None:
            for each in _listed(mine):
                each.set_states()

        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            optimizer.register_state_dict_post_hook(saving),
            optimizer.register_load_state_dict_pre_hook(loading),
            optimizer.register_load_state_dict_post_hook(loaded),
        ]
        steps = self._handles[1].hooks_dict_ref()  # a user's hook may call zero_grad(): nothing is left to do in torch
        if steps is not None:
            steps.move_to_end(self._handles[1].id, last=False)

    def come_last(self) -> None:
        """Its hook is the last of those that come before a step: what others do to gradients is done by then."""
        before = self._handles[0].hooks_dict_ref()
        if before is not None and next(reversed(before), None) != self._handles[0].id:
            before.move_to_end(self._handles[0].id)

    def add(self, follower: Follower) -> None:
        """It follows the optimizer, too, which keeps nobody alive. A second call does nothing."""
        those, self._checked = self.listed(), None
        if not any(each is follower for each in those):
            self._those = [weakref.ref(each) for each in (*those, follower)]

    def remove(self, follower: Follower) -> None:
        """It does no longer."""
        self._those = [weakref.ref(each) for each in self.listed() if each is not follower]

    def listed(self) -> list[Follower]:
        """All of them."""
        return [found for each in self._those if (found := each()) is not None]

    def recheck(self) -> None:
        """Before the next step all are asked whether they take the param groups for good."""
        self._checked = None

    def meaning(self, index: int, group: Mapping[str, Any], *, waits: bool) -> Meaning:
        """What the param `group`, number `index`, means now; for a learning rate that is a tensor on a GPU only if it
        `waits` for that."""
        known = self._groups.get((index, waits))
        if known is None:
            known = self._groups[index, waits] = _Group()
        return known.meaning(self._kind, group, waits=waits)

    @contextlib.contextmanager
    def states_left_out(self) -> Iterator[None]:
        """Inside, state dicts of the optimizer are of its other params alone, and loading one leaves the tables' state
        as it is."""
        before = [(each, each.in_state_dict) for each in self.listed()]
        try:
            for each, _ in before:
                each.in_state_dict = False
            yield
        finally:
            for each, was in before:
                each.in_state_dict = was

    # --- a step -----------------------------------------------------------------------------------------------------

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the optimizer's step; returns what that is to be called with. The step of a closure begins when that
        has run."""
        self.begun, self._due, keywords = None, [], _Keywords(kwargs)
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        begun = weakref.ref(keywords), threading.get_ident()
        self._check_options()
        if closure is None:
            self._check_steps()
            self.begun = begun
            return args, keywords

        def run() -> Any:
            self.begun = None
            result = closure()
            self._check_options()
            self._check_steps()
            self.begun = begun
            return result

        if len(args) < 2:
            keywords["closure"] = run
            return args, keywords
        return (args[0], run, *args[2:]), keywords

    def _check_options(self) -> None:
        """Raises `ConfigError` where a param group means what rows cannot be trained by. Of groups that are as they
        were nobody is asked again."""
        if self._checked is not None and self._checked.are_there():
            return
        self._checked, optimizer = None, self._optimizer()
        for each in self.listed():
            each.check_options_now()
        if optimizer is not None:
            self._checked = SeenGroups(optimizer)

    def _check_steps(self) -> None:
        """Raises what a step would raise, and finds out whose it is."""
        of_kind: dict[type[Follower], list[Follower]] = {}
        for each in self.listed():
            of_kind.setdefault(type(each), []).append(each)
        due: list[Follower] = []
        for kind, followers in of_kind.items():  # warnings name who has called step(), by their distance from there
            due += kind.check_steps(followers)
        self._due = [weakref.ref(each) for each in due]

    def _after(self) -> None:
        """After the optimizer's step: tables that are looked up together take theirs as one."""
        self.begun, found, self._due = None, self._due, []
        due: dict[Hashable, list[Follower]] = {}
        for each in filter(None, [each() for each in found]):
            due.setdefault(each.cache_key, []).append(each)
        for first, *others in due.values():
            first.step(others)


_FOLLOWERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, Followers] = weakref.WeakKeyDictionary()


def followers_of(optimizer: torch.optim.Optimizer) -> Followers:
    """Those of an optimizer, which live as long as it."""
    found = _FOLLOWERS.get(optimizer)
    if found is None:
        found = _FOLLOWERS[optimizer] = Followers(optimizer)
    return found


@untraced
def _come_last(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before the hooks of any optimizer's step."""
    found = _FOLLOWERS.get(optimizer)
    if found is not None:
        found.come_last()


register_optimizer_step_pre_hook(_come_last)


_FOUND: list[weakref.ref[torch.optim.Optimizer]] = []  # the last one that was looked for, which many tables may share


def optimizer_with(param: torch.Tensor) -> torch.optim.Optimizer | None:
    """The one torch optimizer that has `param` among its params, of all that are alive; None where there is none, or
    several. Looks at all objects, unless the one found last has it."""
    for known in (each() for each in _FOUND):
        if known is not None and _has(known, param):
            return known
    kinds = {kind for kind in _all_kinds(torch.optim.Optimizer) if is_known(kind)}
    found: list[torch.optim.Optimizer] = [
        each for each in gc.get_objects() if type(each) in kinds and _has(each, param)
    ]
    if len(found) != 1:
        return None
    _FOUND[:] = [weakref.ref(found[0])]
    return found[0]


def _all_kinds(kind: type[Any]) -> Iterator[type[Any]]:
    below: list[type[Any]] = kind.__subclasses__()
    for each in below:
        yield each
        yield from _all_kinds(each)


def _has(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> bool:
    groups: Sequence[dict[str, Any]] = optimizer.__dict__.get("param_groups", ())  # one that is being built has none
    return any(one is param for group in groups for one in group["params"])


def _listed(followers: weakref.ref[Followers]) -> list[Follower]:
    found = followers()
    return [] if found is None else found.listed()
