"""Puts tiered tables into an existing model."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import nn

from tieredemb.config import Capacity
from tieredemb.conversion.assignment import Assigned, Optimizers, assign
from tieredemb.conversion.found import Choice, Found, choose, find
from tieredemb.conversion.known_regularisers import Weights
from tieredemb.conversion.left_over import left_over, put_in_place
from tieredemb.errors import ConfigError
from tieredemb.lookup.optimizer import state_width
from tieredemb.modules.base import TieredModule
from tieredemb.modules.embedding import TieredEmbedding
from tieredemb.modules.embedding_bag import TieredEmbeddingBag
from tieredemb.storage.base import RowLayout
from tieredemb.storage.file.tier import File
from tieredemb.tables.followed_optimizer import FollowedOptimizer
from tieredemb.tables.group import slot_bytes
from tieredemb.tables.shares import Sharer, shares

_LISTED = 5  # names in a warning


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

    `capacity`: of the whole model: rows and bytes are divided among the tables by their rows, a share is that of each ·
    `optimizer`: the torch optimizer that was built over the model's parameters, or several: each table then trains as
    its weight did, by the optimizer, in the param group and with the state that its weight had there. Or the class of
    one that the tables will `follow`, or an optimizer of tieredemb, applied in backward; without one they are not
    trained · `include`, `exclude`: which embeddings: names as in `model.named_modules()`, patterns ("user*"), or a
    function of name and module · `keywords`: those of `TieredEmbeddingBag` (policy, storage, device, …).

    A twin is on the device of the weight that it replaces, unless `device` names another. A module that occurs in
    several places is replaced by one, also where plain lists, dicts and attributes of the model's modules hold it; a
    frozen one stays frozen. With `File(path)` each table gets a file of its own, `path` plus the module's name. Returns
    the model, or the twin if `model` is itself an embedding. `describe(model)` tells what it is now.

    An embedding that a twin could not stand for stays as it is, and a warning says why: a subclass with behaviour of
    its own, hooks, weights tied to those of another module. Warned of, too, is who still holds an old weight, as what
    it does to that no longer happens. Raises `ConfigError` and `UnsupportedError` before anything is replaced, where
    the optimizer has an option that tables lack, for one, or has none of the weights.

    >>> model = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum"), nn.Linear(4, 1))
    >>> optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-5)
    >>> type(replace_embedding_bags(model, capacity=0.1, optimizer=optimizer)[0]).__name__
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
    assigned = assign(able, optimizer)
    twins = _make_twins(able, assigned, capacity, keywords)
    _follow(able, twins, assigned)
    remarks = _remarks(chosen, able, assigned, optimizer)
    if "" in twins:
        return twins[""], remarks, {}  # the caller has the old one
    old = {each.name: weakref.ref(each.module.weight) for each in able}
    _swap(model, {each.module: twins[each.name] for each in able})
    return model, remarks, old


def _make_twins(
    found: list[Found], assigned: Mapping[str, Assigned], capacity: Capacity, keywords: dict[str, Any]
) -> dict[str, TieredModule]:
    """A twin of each, all of them or none."""
    twins: dict[str, TieredModule] = {}
    try:
        for each, part in zip(found, _shares(found, assigned, capacity, keywords), strict=True):
            twins[each.name] = _twin(each, {**keywords, "capacity": part, "optimizer": assigned[each.name].given})
    except BaseException:
        for twin in twins.values():
            twin.close()
        raise
    return twins


def _shares(
    found: list[Found], assigned: Mapping[str, Assigned], capacity: Capacity, keywords: dict[str, Any]
) -> list[Capacity]:
    sharers = []
    for each in found:
        (rows, width), config = each.module.weight.shape, assigned[each.name].config
        dtype = keywords.get("dtype") or each.module.weight.dtype
        layout = RowLayout(rows=1, width=width, dtype=dtype, state_width=state_width(config, width))
        device = torch.device(keywords.get("device") or each.module.weight.device)
        sharers.append(Sharer(rows, slot_bytes(layout, device)))
    return shares(capacity, sharers) if sharers else []


def _twin(found: Found, keywords: dict[str, Any]) -> TieredModule:
    module = found.module
    keywords = {"device": module.weight.device, **keywords}
    storage = keywords.get("storage")
    if isinstance(storage, File) and found.name:
        keywords["storage"] = replace_fields(storage, path=f"{storage.path}.{found.name}")
    shared: dict[str, Any] = {
        "max_norm": module.max_norm,
        "norm_type": module.norm_type,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "padding_idx": module.padding_idx,
        "sparse": module.sparse,
        "_weight": module.weight.detach(),
    }
    make: Callable[..., TieredModule] = TieredEmbedding
    if isinstance(module, nn.EmbeddingBag):
        make = TieredEmbeddingBag
        shared |= {"mode": module.mode, "include_last_offset": module.include_last_offset}
    twin = make(*module.weight.shape, **shared, **keywords)
    twin.train(module.training)
    return twin


def _follow(found: list[Found], twins: Mapping[str, TieredModule], assigned: Mapping[str, Assigned]) -> None:
    """The twins take the places that the weights have in their optimizers, all or none, and are as frozen as they."""
    with contextlib.ExitStack() as undo:
        for twin in twins.values():
            undo.callback(twin.close)
        for optimizer in {id(each.follows): each.follows for each in assigned.values() if each.follows}.values():
            undo.callback(
                _put_back, optimizer, [list(g["params"]) for g in optimizer.param_groups], {**optimizer.state}
            )
        for each in found:
            to_follow = assigned[each.name].follows
            if to_follow is not None:
                followed = twins[each.name].engine.optimizer
                assert isinstance(followed, FollowedOptimizer)
                undo.callback(followed.unfollow)
                twins[each.name].follow(to_follow, instead_of=[each.module.weight])
            twins[each.name].requires_grad_(assigned[each.name].trains)
        undo.pop_all()


def _put_back(optimizer: torch.optim.Optimizer, params: list[list[torch.Tensor]], state: dict[Any, Any]) -> None:
    for group, its_params in zip(optimizer.param_groups, params, strict=True):
        group["params"][:] = its_params
    optimizer.state.clear()
    optimizer.state.update(state)


def _swap(model: nn.Module, twins: Mapping[nn.Module, TieredModule]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in twins:
                setattr(parent, name, twins[child])
    put_in_place(model, twins)


def _remarks(
    chosen: list[Found], able: list[Found], assigned: Mapping[str, Assigned], optimizer: Optimizers
) -> list[str]:
    """What the caller is warned of, one text each."""
    remarks = []
    left = [f"{each.shown} {each.reason}" for each in chosen if each.reason]
    if left:
        remarks.append(f"left as they are, as tiered twins could not stand for them: {_listed(left)}")
    if not able:
        remarks.append("nothing was replaced: the model has no nn.Embedding or nn.EmbeddingBag that was to be")
    trained = [each for each in able if each.module.weight.requires_grad]
    if optimizer is None and any(each.module.training for each in trained):
        remarks.append(
            "these tables will not train, as no optimizer was given; pass optimizer= (the torch optimizer built over "
            "model.parameters(), or one of tieredemb), or call model.eval() before to say that they only serve"
        )
    elif optimizer is not None:
        alone = [each.shown for each in trained if not assigned[each.name].trains]
        if alone:
            remarks.append(
                f"not trained, as no optimizer given has their weights: {_listed(alone)}; pass all optimizers, as "
                f"optimizer=[one, other]"
            )
    return remarks


def _listed(texts: list[str]) -> str:
    rest = len(texts) - _LISTED
    return "; ".join(texts[:_LISTED]) + (f"; and {rest} more" if rest > 0 else "")
