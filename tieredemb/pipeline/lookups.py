"""Which tensors of a batch a model will look up: learned from an earlier batch, or named by the user."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tieredemb.errors import ConfigError
from tieredemb.lookup.bags import Places
from tieredemb.modules.embedding_collection import TieredEmbeddingCollection
from tieredemb.modules.forwards import LISTENERS, Forward
from tieredemb.modules.keyed import KeyedInputs, is_keyed
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.pipeline.batches import Path, resolve, tensors_of
from tieredemb.pipeline.views import View, find_view
from tieredemb.step.batch import Given
from tieredemb.step.planned_forwards import identity
from tieredemb.tables.division import Division


class LookupSpec(NamedTuple):
    """A later forward, by its inputs. `trains`: whether a backward is expected."""

    module: LookupModule
    given: Given
    trains: bool = True


class Listener:
    """Passes forwards, of any module and thread, to a method of the object that learns from them; stops once that
    object is freed, as after an interrupt."""

    def __init__(self, observe: Callable[[Forward], object]) -> None:
        self._observe = weakref.WeakMethod(observe)
        LISTENERS.append(self)

    def __call__(self, forward: Forward) -> None:
        observe = self._observe()
        if observe is None:
            self.leave()
        else:
            observe(forward)

    def leave(self) -> None:
        with contextlib.suppress(ValueError):  # it is removed already, or an interrupt came before it was added
            LISTENERS.remove(self)


class InBatch(NamedTuple):
    """A tensor of a batch, or a `view` of one. `shape`: the required shape; None for any."""

    path: Path
    view: View | None = None
    shape: torch.Size | None = None

    def of(self, batch: Any) -> torch.Tensor:
        """The same tensor of another batch. Raises some error for a batch of another form."""
        found: torch.Tensor = resolve(batch, self.path)
        if self.view is not None:
            found = self.view.of(found)
        if self.shape is not None and found.shape != self.shape:
            raise ValueError(f"a tensor of shape {tuple(self.shape)} was at {self.path}, now one of {found.shape}")
        return found


Inputs = tuple[InBatch | torch.Tensor | Places, ...]


@dataclass(frozen=True)
class Learned:
    """How the lookups of a model follow from a batch: for each forward its module, its inputs, and whether it trains.
    Inputs that were not in the batch, such as offsets, are assumed to stay the same for ids of one shape."""

    forwards: tuple[tuple[LookupModule, Inputs, bool], ...]

    @property
    def identity(self) -> list[Any]:
        """Equal for lookups in the same tables by the same parts of a batch, if other inputs are the same tensors,
        unchanged."""
        return [
            (module, trains, [identity((part,)) if isinstance(part, torch.Tensor) else part for part in inputs])
            for module, inputs, trains in self.forwards
        ]

    def __call__(self, batch: Any) -> list[LookupSpec]:
        found = []
        for module, inputs, trains in self.forwards:
            given: list[torch.Tensor | Places] = []
            for part in inputs:
                if isinstance(part, InBatch):
                    is_whole = part.view is None and part.shape is None
                    part = resolve(batch, part.path) if is_whole else part.of(batch)
                given.append(part)
            found.append(LookupSpec(module, tuple(given), trains))
        return found


def learn(batch: Any, observed: Sequence[LookupSpec]) -> tuple[Learned, list[LookupModule]]:
    """How the lookups `observed` follow from `batch`, without those of other ids (computed, or of another batch); and
    the modules all of whose lookups had such ids."""
    tensors = _Inputs(batch)
    forwards = []
    for module, given, trains in observed:
        ids, *rest = map(tensors.find, given)
        if ids is None:
            continue
        found = [part if place is None else place for place, part in zip(rest, given[1:], strict=True)]
        if any(isinstance(part, torch.Tensor) for part in found):  # offsets may be cut to size
            ids = ids._replace(shape=given[0].shape if isinstance(given[0], torch.Tensor) else None)
        forwards.append((module, (ids, *found), trains))
    found_for = [module for module, _, _ in forwards]
    unknown = [module for module in dict.fromkeys(lookup.module for lookup in observed) if module not in found_for]
    return Learned(tuple(forwards)), unknown


class _Inputs:
    """The tensors of a batch."""

    def __init__(self, batch: Any) -> None:
        self._tensors = list(tensors_of(batch))
        self._alike: dict[tuple[Any, ...], InBatch] = {}
        for path, tensor in self._tensors:
            self._alike.setdefault(identity((tensor,)), InBatch(path))

    def find(self, given: torch.Tensor | Places) -> InBatch | None:
        """The place in the batch of a forward's input; None if it is not there."""
        if not isinstance(given, torch.Tensor):
            return None
        alike = self._alike.get(identity((given,)))
        if alike is not None:
            return alike
        views = ((path, find_view(tensor, given)) for path, tensor in self._tensors)
        return next((InBatch(path, view) for path, view in views if view is not None), None)


class NamedLookups:
    """The lookups that a user's function names: for a model of one tiered module its inputs, else a mapping from
    modules or their names to inputs. Inputs are ids, (ids, offsets), what a collection takes by name, or a list of such
    for several forwards."""

    def __init__(self, modules: Mapping[str, LookupModule], ids_of: Callable[[Any], Any]) -> None:
        self._modules = modules
        self._ids_of = ids_of

    def __call__(self, batch: Any) -> list[LookupSpec]:
        named = self._ids_of(batch)
        if not isinstance(named, Mapping) or self._is_input(named):
            if len(self._modules) != 1:
                raise ConfigError(
                    f"ids_of must return a mapping for a model of {len(self._modules)} tiered modules, from "
                    f"{', '.join(map(repr, self._modules))} to inputs; got {type(named).__name__}"
                )
            named = {next(iter(self._modules)): named}
        return [
            LookupSpec(module, _inputs(module, inputs))
            for module, value in ((self._module(key), value) for key, value in named.items())
            for inputs in (value if isinstance(value, list) else [value])
        ]

    def _is_input(self, named: Mapping[Any, Any]) -> bool:
        """Whether the mapping is the input of the only module, from features to ids, and not from modules to inputs."""
        (name, module), *others = self._modules.items()
        return isinstance(module, TieredEmbeddingCollection) and not others and not {name, module} & set(named)

    def _module(self, key: Any) -> LookupModule:
        if isinstance(key, LookupModule) and any(key is module for module in self._modules.values()):
            return key
        if not isinstance(key, str) or key not in self._modules:
            raise ConfigError(
                f"ids_of names {key!r}, which is no tiered module of the model; there are "
                f"{', '.join(map(repr, self._modules))}"
            )
        return self._modules[key]


def _inputs(module: LookupModule, value: Any) -> Given:
    if isinstance(module, TieredEmbeddingCollection) and isinstance(value, Mapping):
        return module.given_by_features(value)
    if isinstance(module, KeyedInputs) and is_keyed(value):
        return module.given_by_keys(value)
    inputs = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(inputs) <= 2 or not all(isinstance(part, torch.Tensor) for part in inputs):
        raise ConfigError(f"ids_of must name ids, or (ids, offsets), as tensors, or a KeyedJaggedTensor; got {value!r}")
    return inputs


def ages_of(lookups: Sequence[LookupSpec]) -> list[bool]:
    """For each forward of one step, whether its plan has a later time than the plan before: true for the first forward
    of tables that share a cache."""
    ages, begun = [], set()
    for lookup in lookups:
        time = lookup.module.tables.step_time
        ages.append(time is None or id(time) not in begun)
        begun.add(id(time))
    return ages


def divisions_of(modules: Iterable[LookupModule]) -> list[Division]:
    """The divisions of capacities that caches of these modules share, each once."""
    found = dict.fromkeys(module.tables.division for module in modules)
    return [division for division in found if division is not None]
