"""The tables that follow one torch optimizer, with one set of hooks around its steps for all of them.

A model may have many tables, each with a module of its own. The hooks reference the tables weakly. The meaning of a
param group is read once for all tables in it.
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
    """One set of tables, for the hooks of its optimizer."""

    def check_options_now(self) -> None:
        """Raises `ConfigError` if the tables' rows cannot be trained by the param group."""

    @staticmethod
    def check_steps(those: Sequence[Any]) -> Sequence[Any]:
        """Returns those, of this kind, whose tables take part in a step of the optimizer. Raises the step's errors,
        before anything changes."""

    cache_key: Hashable  # equal for tables that share a cache, or are looked up as one: they take one step

    def step(self, others: Sequence[Any]) -> None:
        """Takes a step, at once with `others`."""

    in_state_dict: bool  # whether state dicts of the optimizer hold the tables' state

    def add_states(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Adds the tables' state to the optimizer's `state_dict()`."""

    def take_states(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Removes the tables' state from a state dict that the optimizer will load."""

    def set_states(self) -> None:
        """Called when the optimizer has loaded the rest: sets the tables' state."""


class Meaning:
    """The meaning of a param group: a `config`, and its `items` by name."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self.items: tuple[tuple[str, Any], ...] = tuple(asdict(config).items())


class _Group:
    """The present meaning of one param group; the same object while it is unchanged."""

    def __init__(self) -> None:
        self._meaning: Meaning | None = None
        self._options: dict[str, Any] | None = None  # the options of that meaning
        self._plain: dict[str, Any] | None = None  # the group then, if nothing in it can change in place
        self._values: list[Any] = []  # its values, including params

    def meaning(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any], *, waits: bool) -> Meaning:
        if self._meaning is not None and self._plain is not None:  # fast, as each of many tables does this in a step
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
    """The keywords of a step's call: it lives as long as the step, even if an exception ends that."""


class Followers:
    """The followers of one optimizer, in the order in which they began. See `followers_of`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._kind, self._optimizer = type(optimizer), weakref.ref(optimizer)
        self._those: list[weakref.ref[Any]] = []
        self._due: list[weakref.ref[Any]] = []  # followers that take part in the step that has begun
        self._groups: dict[tuple[int, bool], _Group] = {}
        self._checked: SeenGroups | None = None  # the param groups when all followers last accepted them
        # of a step that has begun: a reference that is empty once it has ended, and its thread. Unlike hooks and
        # closures of a step, and code after an exception, its own code records no gradients
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
            for each in reversed(_listed(mine)):  # removed in the reverse order of adding
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
        steps = self._handles[
            1
        ].hooks_dict_ref()  # a user's hook may call zero_grad(): in torch the step then does nothing
        if steps is not None:
            steps.move_to_end(self._handles[1].id, last=False)

    def come_last(self) -> None:
        """Moves its hook behind all others before a step, which may change gradients."""
        before = self._handles[0].hooks_dict_ref()
        if before is not None and next(reversed(before), None) != self._handles[0].id:
            before.move_to_end(self._handles[0].id)

    def add(self, follower: Follower) -> None:
        """Adds a follower, by a weak reference. A second call does nothing."""
        those, self._checked = self.listed(), None
        if not any(each is follower for each in those):
            self._those = [weakref.ref(each) for each in (*those, follower)]

    def remove(self, follower: Follower) -> None:
        """Removes a follower."""
        self._those = [weakref.ref(each) for each in self.listed() if each is not follower]

    def listed(self) -> list[Follower]:
        """All living followers."""
        return [found for each in self._those if (found := each()) is not None]

    def recheck(self) -> None:
        """Has all followers check the param groups before the next step."""
        self._checked = None

    def meaning(self, index: int, group: Mapping[str, Any], *, waits: bool) -> Meaning:
        """The present meaning of the param `group`, number `index`; including a learning rate that is a tensor on a GPU
        only if it `waits` for that."""
        known = self._groups.get((index, waits))
        if known is None:
            known = self._groups[index, waits] = _Group()
        return known.meaning(self._kind, group, waits=waits)

    @contextlib.contextmanager
    def states_left_out(self) -> Iterator[None]:
        """Inside, state dicts of the optimizer have only its other params, and loading one does not change the tables'
        state."""
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
        """Hook before the optimizer's step; returns new arguments for it. With a closure, the step begins when that has
        run."""
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
        """Raises `ConfigError` if rows cannot be trained by a param group. Unchanged groups are not checked again."""
        if self._checked is not None and self._checked.are_there():
            return
        self._checked, optimizer = None, self._optimizer()
        for each in self.listed():
            each.check_options_now()
        if optimizer is not None:
            self._checked = SeenGroups(optimizer)

    def _check_steps(self) -> None:
        """Raises the step's errors, and finds the followers that take part."""
        of_kind: dict[type[Follower], list[Follower]] = {}
        for each in self.listed():
            of_kind.setdefault(type(each), []).append(each)
        due: list[Follower] = []
        for kind, followers in of_kind.items():  # warnings count frames up to the caller of step()
            due += kind.check_steps(followers)
        self._due = [weakref.ref(each) for each in due]

    def _after(self) -> None:
        """Hook after the optimizer's step: tables that are looked up as one take one step."""
        self.begun, found, self._due = None, self._due, []
        due: dict[Hashable, list[Follower]] = {}
        for each in filter(None, [each() for each in found]):
            due.setdefault(each.cache_key, []).append(each)
        for first, *others in due.values():
            first.step(others)


_FOLLOWERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, Followers] = weakref.WeakKeyDictionary()


def followers_of(optimizer: torch.optim.Optimizer) -> Followers:
    """The followers of an optimizer, which live as long as it."""
    found = _FOLLOWERS.get(optimizer)
    if found is None:
        found = _FOLLOWERS[optimizer] = Followers(optimizer)
    return found


@untraced
def _come_last(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Runs before the hooks of any optimizer's step."""
    found = _FOLLOWERS.get(optimizer)
    if found is not None:
        found.come_last()


register_optimizer_step_pre_hook(_come_last)


_FOUND: list[weakref.ref[torch.optim.Optimizer]] = []  # the last one found, which many tables may share


def optimizer_with(param: torch.Tensor) -> torch.optim.Optimizer | None:
    """The living torch optimizer that has `param` among its params; None if there is none, or several. Searches all
    objects, unless the last one found has it."""
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
    groups: Sequence[dict[str, Any]] = optimizer.__dict__.get("param_groups", ())  # none while it is built
    return any(one is param for group in groups for one in group["params"])


def _listed(followers: weakref.ref[Followers]) -> list[Follower]:
    found = followers()
    return [] if found is None else found.listed()
