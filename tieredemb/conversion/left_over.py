"""Finds what still references a replaced embedding or its weight, and so would use values that no longer train.

`named_modules()` finds modules; code also keeps them in plain lists, dicts and attributes, and keeps weights in lists
for regularisation. If the model itself does so, the reference is replaced by the twin, or by the table's parameter. For
other references to weights a warning names the objects that hold them, if Python's garbage collector finds these.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tieredemb.conversion.known_regularisers import KNOWN, Weights
from tieredemb.errors import some_of

_DEPTH = 6  # of containers and objects nested in each other
_ITEMS = 10_000  # of a container that is searched: a longer one holds data
_SILENT = (nn.Embedding, nn.EmbeddingBag, types.CellType)  # not named themselves, but by what references them
_CONTAINERS = (list, tuple, set, frozenset, dict, *_SILENT)
_PASSING = (types.FrameType, types.GeneratorType, Iterator, nn.Parameter)  # reference it for a moment, or not at all
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.dtype, torch.device, type,
          types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)  # fmt: skip


def put_in_place(
    model: nn.Module, twins: Mapping[nn.Module, nn.Module], weights: Mapping[int, nn.Parameter] | None = None
) -> None:
    """Has the plain attributes of the model's modules, and the lists, dicts and objects in them, hold the twins of
    modules that they held, and the parameters of twins in the place of weights. `weights`: those in the place of
    weights of other modules, by the weights' identities."""
    new = dict(weights or {})
    for module, twin in twins.items():
        one, other = (each._parameters.get("weight") for each in (module, twin))
        if one is not None and other is not None:
            new[id(one)] = other
    seen: set[int] = {id(twins)}
    for module in list(model.modules()):
        for name, value in list(vars(module).items()):
            if name not in ("_modules", "_parameters", "_buffers"):
                now = _exchanged(value, twins, new, seen, _DEPTH)
                if now is not value:
                    vars(module)[name] = now


def _exchanged(
    value: Any,
    twins: Mapping[nn.Module, nn.Module],
    weights: Mapping[int, nn.Parameter],
    seen: set[int],
    depth: int,
) -> Any:
    """`value`, or its twin, or a tuple that contains twins; other containers are changed in place."""
    if type(value) in weakref.ProxyTypes:  # which pass for what they point at
        return value
    if isinstance(value, nn.Module):
        return twins.get(value, value)
    if isinstance(value, nn.Parameter):
        return weights.get(id(value), value)
    if isinstance(value, _PLAIN) or id(value) in seen or depth == 0:
        return value
    seen.add(id(value))
    if type(value) is tuple and len(value) <= _ITEMS:
        items = tuple(_exchanged(each, twins, weights, seen, depth - 1) for each in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    keyed: Any = ()
    if isinstance(value, (list, dict)) and len(value) <= _ITEMS:
        keyed, inside = list(value.items() if isinstance(value, dict) else enumerate(value)), value
    elif type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
        inside = vars(value)
        keyed = list(inside.items())
    for key, each in keyed:
        now = _exchanged(each, twins, weights, seen, depth - 1)
        if now is not each:
            inside[key] = now
    return value


def left_over(model: nn.Module, old: Weights) -> list[str]:
    """Warnings: what still references old weights, and what will no longer happen because of that."""
    remarks = [text for known in KNOWN for text in known(model, old)]
    if any(ref() is not None for ref in old.values()):
        gc.collect()  # modules refer to themselves
    held: dict[str, list[str]] = {}
    for name, ref in old.items():
        weight = ref()
        for holder in () if weight is None else _holders(weight):
            held.setdefault(holder, []).append(name)
        del weight
    for holder, names in held.items():
        remarks.append(
            f"the old weights of {some_of(names)} live on, held by {holder}: they take memory and train no longer, so "
            f"what is done to them there (a regulariser, another optimizer, a score) does not happen to the tables. "
            f"Drop them there; for an L2 regulariser give the tables' param group weight_decay=2 * l2; pass several "
            f"optimizers as optimizer=[one, other]"
        )
    return remarks


def _holders(weight: torch.Tensor) -> list[str]:
    """Who holds a tensor, in words: the objects at the end of the containers that refer to it."""
    return list(dict.fromkeys(_ends(weight, set(), _DEPTH)))


def _ends(target: Any, seen: set[int], depth: int) -> list[str]:
    """What refers to `target`, or to the containers that do. No generator: the collector would find that, too."""
    ends: list[str] = []
    referrers = gc.get_referrers(target)
    seen |= {id(target), id(referrers)}
    for holder in referrers:
        if id(holder) in seen or isinstance(holder, _PASSING):
            continue
        seen.add(id(holder))
        if isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder:
            ends.append(f"a variable of {holder['__name__']}")
        elif isinstance(holder, _CONTAINERS):
            inner = _ends(holder, seen, depth - 1) if depth else []
            ends += inner or ([] if isinstance(holder, _SILENT) else [f"a {type(holder).__name__}"])
        elif isinstance(holder, types.FunctionType):
            ends.append(f"the function {holder.__qualname__}")
        else:
            ends.append(f"a {type(holder).__qualname__}")
    return ends
