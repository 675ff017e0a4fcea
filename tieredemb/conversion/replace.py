"""Puts tiered tables into an existing model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from tieredemb.config import Capacity
from tieredemb.conversion.assignment import Assigned, Optimizers, assign
from tieredemb.conversion.caches import Settings, make_twins
from tieredemb.conversion.carried import carries, release
from tieredemb.conversion.found import Choice, Found, choose, find
from tieredemb.conversion.known_regularisers import Weights
from tieredemb.conversion.left_over import left_over, put_in_place
from tieredemb.conversion.places import listed
from tieredemb.conversion.take_over import take_over
from tieredemb.errors import ConfigError
from tieredemb.pipeline.planned_calls import plan_calls


def replace_embedding_bags(
    model: nn.Module,
    capacity: Capacity = 0.01,
    *,
    optimizer: Optimizers = None,
    include: Choice = None,
    exclude: Choice = None,
    **keywords: Any,
) -> nn.Module:
    """Swaps every `nn.EmbeddingBag` and `nn.Embedding` in `model` for its tiered twin, keeping weights and settings.

    Tables of one width, device, dtype and kind of optimizer share one cache, as in a collection: room in it goes to
    the rows that are looked up most, whichever table's they are. They move, flush, close, and are saved by
    `save_checkpoint` together; lookups, steps, `state_dict()`, `stats()` and copies are each table's own, with the
    numbers of tables apart. A call for each (`include`) gives caches of their own.

    `capacity`: of the whole model: rows and bytes are divided among the caches by their rows, a share is that of each ·
    `optimizer`: the torch optimizer that was built over the model's parameters, or several: each table then trains as
    its weight did, by the optimizer, in the param group and with the state that its weight had there. Or the class of
    one that the tables will `follow`, or an optimizer of tieredemb, applied in backward; without one they are not
    trained. A weight that carries an optimizer (`apply_optimizer_in_backward`) goes on by that, unless `optimizer` is a
    class or one of tieredemb · `include`, `exclude`: which embeddings: names as in `model.named_modules()`, patterns
    ("user*"), or a function of name and module · `keywords`: those of `TieredEmbeddingBag` (policy, storage, …).

    A twin is on the device of the weight that it replaces, unless `device` names another. A module that occurs in
    several places is replaced by one, also where plain lists, dicts and attributes of the model's modules hold it; a
    frozen one stays frozen. With `File(path)` tables that share a cache share the file; where there are several
    caches each file is `path` plus the name of its first module. Files that have rows already are refused with
    `StorageExistsError`, unless `File(path, keep=True)` goes on with them or `fresh=True` discards them.

    Of a model that was built on the meta device (`with torch.device("meta")`) no table is ever held whole: each row is
    generated when it is first used, as torch's `reset_parameters()` begins it, or by `init`: `Normal(…)`,
    `Uniform(…)`, a function of rows and a generator, or a dict of these by names and patterns of embeddings. Such a
    table is on `device`, or else on torch's default device. Dense layers stay on the meta device.

    Returns the model, or the twin if `model` is itself an embedding. `describe(model)` tells what it is now.

    An embedding that a twin could not stand for stays as it is, and a warning says why: a subclass with behaviour of
    its own, hooks, weights tied to those of another module. Warned of, too, is who still holds an old weight, as what
    it does to that no longer happens. Raises `ConfigError` and `UnsupportedError` before anything is replaced, where
    the optimizer has an option that tables lack, for one, or has none of the weights that require a gradient.

    >>> model = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum"), nn.Linear(4, 1))
    >>> optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-5)
    >>> type(tieredemb.replace_embedding_bags(model, capacity=0.1, optimizer=optimizer)[0]).__name__
    'TieredEmbeddingBag'
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    converted, remarks, old = _convert(model, capacity, optimizer, include, exclude, keywords)
    for line in (*remarks, *left_over(model, old)):
        warnings.warn(line, stacklevel=2)
    return converted


def _convert(
    model: nn.Module,
    capacity: Capacity,
    optimizer: Optimizers,
    include: Choice,
    exclude: Choice,
    keywords: dict[str, Any],
) -> tuple[nn.Module, list[str], Weights]:
    """The converted model, what the caller is to be warned of, and the old weights, which nothing here holds then."""
    chosen = choose(find(model), include, exclude)
    able = [each for each in chosen if each.reason is None]
    _check_not_averaged(model, able)
    assigned = assign(able, optimizer)
    remarks = [*_remarks(chosen, able, assigned, optimizer), *_remarks_on_carried(able, assigned)]
    twins = make_twins(able, assigned, capacity, _settings(keywords))
    old = {each.name: weakref.ref(each.module.weight) for each in able}
    modules = {each.name: weakref.ref(each.module) for each in able}
    carrying = [each for each in able if carries(each)]  # whose weights torch holds
    del chosen  # nothing here is to hold the others from here on
    take_over(model, able, twins, assigned)
    while carrying:
        release(carrying.pop())
    if "" in twins:
        return twins[""], remarks, {}  # the caller has the old one
    held: dict[nn.Module, nn.Module] = {
        module: twins[name] for name, ref in modules.items() if (module := ref()) is not None
    }
    weights = _parameters_for(old, twins)
    if held or weights:
        put_in_place(model, held, weights)
    if len(twins) > 1:
        for each in {model, _holder(model, list(twins))}:
            plan_calls(each)
    return model, remarks, old


def _parameters_for(old: Weights, twins: Mapping[str, nn.Module]) -> dict[int, nn.Parameter]:
    """The parameters of twins that have one, by the identities of the old weights that are still there."""
    found = {}
    for name, ref in old.items():
        weight, table = ref(), twins[name]._parameters.get("weight")
        if weight is not None and table is not None:
            found[id(weight)] = table
    return found


def _check_not_averaged(model: nn.Module, able: Sequence[Found]) -> None:
    """Raises `ConfigError` where a `DistributedDataParallel` waits for gradients of weights that are to go."""
    weights = {id(each.module.weight) for each in able}
    around = [each for each in model.modules() if isinstance(each, nn.parallel.DistributedDataParallel)]
    waiting = [each for ddp in around if not ddp.find_unused_parameters for each in ddp._module_parameters]
    if any(id(each) in weights for each in waiting):
        raise ConfigError(
            "the model is inside a DistributedDataParallel, which would wait for gradients of weights that are "
            "replaced; convert the model before DistributedDataParallel wraps it"
        )


def _holder(model: nn.Module, names: list[str]) -> nn.Module:
    """The innermost module that holds all of those with these names, and is called: no list or dict of modules."""
    first, *others = (name.split(".")[:-1] for name in names)
    depth = 0
    while depth < len(first) and all(other[depth : depth + 1] == [first[depth]] for other in others):
        depth += 1
    within = [model.get_submodule(".".join(first[:most])) for most in range(depth + 1)]
    return next(
        each for each in reversed(within) if not isinstance(each, nn.ModuleList | nn.ModuleDict) or each is model
    )


def _settings(keywords: dict[str, Any]) -> Settings:
    known = [each.name for each in fields(Settings)]
    if unknown := [name for name in keywords if name not in known]:
        raise TypeError(
            f"replace_embedding_bags() got an unexpected keyword argument {unknown[0]!r}; it takes {', '.join(known)}"
        )
    return Settings(**keywords)


def _followed(assigned: Mapping[str, Assigned]) -> list[torch.optim.Optimizer]:
    """The torch optimizers that tables are to follow, once each."""
    return list({id(each.follows): each.follows for each in assigned.values() if each.follows}.values())


def _of_meta(optimizer: torch.optim.Optimizer, tables: Collection[int]) -> str | None:
    """Warnings for an optimizer that has params without content, in addition to those with ids in `tables`."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    params = [param for param in params if param.is_meta and id(param) not in tables]
    has_state = any(optimizer.state.get(param) for param in params)
    if not params or (torch.__future__.get_swap_module_params_on_conversion() and not has_state):
        return None
    kind = f"torch.optim.{type(optimizer).__name__}"
    way = "" if has_state else ", or call torch.__future__.set_swap_module_params_on_conversion(True) before to_empty()"
    return (
        f"the optimizer has {len(params)} params of dense layers on the meta device; to_empty() puts others in their "
        f"place, which it would not train: convert with optimizer={kind}, the class, build it after to_empty(), and "
        f"let the tables follow(optimizer){way}"
    )


def _remarks(
    chosen: list[Found], able: list[Found], assigned: Mapping[str, Assigned], optimizer: Optimizers
) -> list[str]:
    """What the caller is warned of, one text each."""
    remarks = []
    left = [f"{each.shown} {each.reason}" for each in chosen if each.reason]
    if left:
        remarks.append(f"left as they are, as tiered twins could not stand for them: {listed(left)}")
    if left and not able:
        remarks.append("nothing was replaced")
    elif not able:
        remarks.append("nothing was replaced: the model has no nn.Embedding or nn.EmbeddingBag that was to be")
    tables = {id(each.module.weight) for each in able}
    remarks += [text for each in _followed(assigned) if (text := _of_meta(each, tables))]
    trained = [each for each in able if each.module.weight.requires_grad]
    if optimizer is None and any(each.module.training and assigned[each.name].config is None for each in trained):
        remarks.append(
            "these tables will not train, as no optimizer was given; pass optimizer= (the torch optimizer built over "
            "model.parameters(), or one of tieredemb), or call model.eval() before to say that they only serve"
        )
    elif optimizer is not None:
        alone = [each.shown for each in trained if not assigned[each.name].trains]
        if alone:
            remarks.append(
                f"not trained, as no optimizer given has their weights: {listed(alone)}; pass all optimizers, as "
                f"optimizer=[one, other]"
            )
    return remarks


def _remarks_on_carried(able: list[Found], assigned: Mapping[str, Assigned]) -> list[str]:
    """Of the weights that carry an optimizer which steps in backward: what the tables have of it."""
    remarks = []
    taken = {each.shown: of for each in able if (of := assigned[each.name].carried) is not None}
    if taken:
        by = [f"{shown} by {of.config!r}" for shown, of in taken.items()]
        remarks.append(f"updated in backward, as apply_optimizer_in_backward has set their weights: {listed(by)}")
    remarks += dict.fromkeys(of.remark for of in taken.values() if of.remark)
    left = [each.shown for each in able if each.shown not in taken and carries(each)]
    if left:
        remarks.append(
            f"no longer updated as apply_optimizer_in_backward has set their weights, but by the optimizer= that was "
            f"given: {listed(left)}"
        )
    return remarks
