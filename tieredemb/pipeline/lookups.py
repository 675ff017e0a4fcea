"""Where the ids of a batch are that a model will look up: learned from a batch that it has looked up, or told.

A batch is anything: tensors in mappings, sequences, dataclasses and other objects, and what has `values()` and
`offsets()` as TorchRec's `KeyedJaggedTensor` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tieredemb.errors import ConfigError
from tieredemb.modules.ahead import Given, identity
from tieredemb.modules.base import TieredModule

Path = tuple[tuple[str, Any], ...]  # steps from a batch to a tensor: ("item", key), ("attribute" or "call", name)
Lookup = tuple[TieredModule, Given]  # a forward that will come, by its inputs

DEEPEST = 8  # steps that are followed into a batch
JAGGED = ("values", "offsets")
PLAIN = (str, bytes, int, float, complex, type(None), range)  # what holds no tensor


def tensors_of(batch: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """All dense tensors in a batch, and how to get to each in a batch of the same form."""
    todo: deque[tuple[Path, Any]] = deque([((), batch)])
    seen: set[int] = set()
    while todo:
        path, value = todo.popleft()
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield path, value
        elif len(path) < DEEPEST and id(value) not in seen:
            seen.add(id(value))
            todo += [((*path, step), part) for step, part in _parts(value) if not isinstance(part, PLAIN)]


def _parts(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(value, Mapping):
        yield from ((("item", key), part) for key, part in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, PLAIN):
        yield from ((("item", i), part) for i, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
        if all(callable(getattr(value, name, None)) for name in JAGGED):
            yield from ((("call", name), getattr(value, name)()) for name in JAGGED)
        yield from ((("attribute", name), part) for name, part in vars(value).items())


def resolve(batch: Any, path: Path) -> Any:
    """What is at `path` in a batch."""
    for kind, name in path:
        if kind == "item":
            batch = batch[name]
        else:
            batch = getattr(batch, name) if kind == "attribute" else getattr(batch, name)()
    return batch


@dataclass(frozen=True)
class Learned:
    """How the lookups of a model come from a batch: for each forward its module, and its inputs as paths; offsets that
    were in no batch are a tensor, the same each time."""

    forwards: tuple[tuple[TieredModule, tuple[Path | torch.Tensor, ...]], ...]

    def __call__(self, batch: Any) -> list[Lookup]:
        return [
            (module, tuple(part if isinstance(part, torch.Tensor) else resolve(batch, part) for part in inputs))
            for module, inputs in self.forwards
        ]


def learn(batch: Any, seen: Sequence[Lookup]) -> tuple[Learned, list[TieredModule]]:
    """How the lookups `seen` came from `batch`, but for those of other ids (computed, or of another batch); and the
    modules whose lookups all were such."""
    paths: dict[tuple[Any, ...], Path] = {}
    for path, tensor in tensors_of(batch):
        paths.setdefault(identity((tensor,)), path)
    forwards = []
    for module, given in seen:
        ids, *rest = (paths.get(identity((tensor,))) for tensor in given)
        if ids is None:
            continue
        found = [tensor if path is None else path for path, tensor in zip(rest, given[1:], strict=True)]
        forwards.append((module, (ids, *found)))
    found_for = [module for module, _ in forwards]
    return Learned(tuple(forwards)), [module for module in dict.fromkeys(m for m, _ in seen) if module not in found_for]


class Told:
    """The lookups that a user's function names: for a model of one tiered module its inputs, else a mapping from
    modules or their names to inputs. Inputs are ids, (ids, offsets), or a list of such for several forwards."""

    def __init__(self, modules: Mapping[str, TieredModule], ids_of: Callable[[Any], Any]) -> None:
        self._modules = modules
        self._ids_of = ids_of

    def __call__(self, batch: Any) -> list[Lookup]:
        told = self._ids_of(batch)
        if not isinstance(told, Mapping):
            if len(self._modules) != 1:
                raise ConfigError(
                    f"ids_of must return a mapping for a model of {len(self._modules)} tiered modules, from "
                    f"{', '.join(map(repr, self._modules))} to inputs; got {type(told).__name__}"
                )
            told = {next(iter(self._modules)): told}
        return [
            (self._module(key), inputs)
            for key, value in told.items()
            for inputs in map(_inputs, value if isinstance(value, list) else [value])
        ]

    def _module(self, key: Any) -> TieredModule:
        if isinstance(key, TieredModule) and any(key is module for module in self._modules.values()):
            return key
        if not isinstance(key, str) or key not in self._modules:
            raise ConfigError(
                f"ids_of names {key!r}, which is no tiered module of the model; there are "
                f"{', '.join(map(repr, self._modules))}"
            )
        return self._modules[key]


def _inputs(value: Any) -> Given:
    inputs = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(inputs) <= 2 or not all(isinstance(part, torch.Tensor) for part in inputs):
        raise ConfigError(f"ids_of must name ids, or (ids, offsets), as tensors; got {value!r}")
    return inputs
