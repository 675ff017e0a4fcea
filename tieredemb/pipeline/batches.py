"""Finds and replaces tensors in batches of any form: in mappings, sequences, dataclasses and other objects, also those
with `values()` and `offsets()`, as TorchRec's `KeyedJaggedTensor`."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

R = TypeVar("R")
Path = tuple[tuple[str, Any], ...]  # steps from a batch to a tensor: ("item", key), ("attribute" or "call", name)

DEEPEST = 8  # how many steps deep tensors are searched for
JAGGED = ("values", "offsets")
PLAIN = (str, bytes, int, float, complex, type(None), range)  # types without tensors


def tensors_of(batch: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """All dense tensors in a batch, each with its path, which is the same in batches of one form."""
    todo: deque[tuple[Path, Any]] = deque([((), batch)])
    seen: set[int] = set()
    while todo:
        path, value = todo.popleft()
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_nested:
                yield path, value
        elif len(path) < DEEPEST and id(value) not in seen:
            seen.add(id(value))
            todo += [((*path, step), part) for step, part in _parts(value) if not isinstance(part, PLAIN)]


def are_on_gpu(batch: Any) -> bool:
    """Whether all tensors in a batch are on a GPU."""
    for part in _flat(batch):  # fast, as it runs in each step
        if not (isinstance(part, torch.Tensor) and part.is_cuda):
            break
    else:
        return True
    return all(tensor.is_cuda for _, tensor in tensors_of(batch))


def _flat(batch: Any) -> Collection[Any]:
    """The parts of a batch, if it is a simple container."""
    if type(batch) in (list, tuple):
        found: Collection[Any] = batch
    elif type(batch) is dict:
        found = batch.values()
    else:
        found = getattr(batch, "__dict__", {}).values() if dataclasses.is_dataclass(batch) else ()
    return found or (None,)


def _parts(value: Any) -> list[tuple[tuple[str, Any], Any]]:
    """The parts of a batch, or of a part of it, each with the step that leads there."""
    # the usual types first, as it takes long to check the others
    if type(value) in (tuple, list) or (isinstance(value, Sequence) and not isinstance(value, PLAIN)):
        return [(("item", i), part) for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        return [(("item", key), part) for key, part in value.items()]
    if not hasattr(value, "__dict__") or isinstance(value, (nn.Module, type)):
        return []
    found = [(("attribute", name), part) for name, part in vars(value).items()]
    if all(callable(getattr(value, name, None)) for name in JAGGED):
        found = [*((("call", name), getattr(value, name)()) for name in JAGGED), *found]
    return found


def resolve(batch: Any, path: Path) -> Any:
    """The object at `path` in a batch."""
    for kind, name in path:
        if kind == "item":
            batch = batch[name]
        else:
            batch = getattr(batch, name) if kind == "attribute" else getattr(batch, name)()
    return batch


def map_tensors(
    batch: Any, function: Callable[[torch.Tensor], torch.Tensor], otherwise: Callable[[Any], Any] | None = None
) -> Any:
    """A batch of the same form with `function` applied to its tensors, in mappings, sequences and dataclasses, and
    `otherwise` to other objects."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        parts = {key: map_tensors(value, function, otherwise) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return type(batch)(parts)  # type: ignore[call-arg]
        same = copy.copy(batch)  # keeps its default, its order, …
        same.update(parts)
        return same
    if isinstance(batch, list):
        same_list = copy.copy(batch)
        same_list[:] = [map_tensors(value, function, otherwise) for value in batch]
        return same_list
    if isinstance(batch, tuple) and not callable(getattr(batch, "to", None)):  # a packed sequence moves by its own `to`
        members = (map_tensors(value, function, otherwise) for value in batch)
        return batch._make(members) if hasattr(batch, "_make") else tuple(members)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(
            batch, **{name: map_tensors(getattr(batch, name), function, otherwise) for name in fields}
        )
    return batch if otherwise is None else otherwise(batch)


def do_nothing() -> None:
    """A function to pass when there is nothing to do."""


def detached(function: Callable[[Any], R], batch: Any) -> R:
    """What the function returns, without autograd's graph, which would tie a capture to an earlier step."""
    result: R = map_tensors(function(batch), torch.Tensor.detach)
    return result
