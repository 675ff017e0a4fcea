"""Puts tiered tables into an existing model."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace as replace_fields
from typing import Any

from torch import nn

from tieredemb.config import Capacity
from tieredemb.errors import ConfigError
from tieredemb.modules.base import TieredModule
from tieredemb.modules.embedding import TieredEmbedding
from tieredemb.modules.embedding_bag import TieredEmbeddingBag
from tieredemb.storage.file.tier import File


def replace_embedding_bags(model: nn.Module, capacity: Capacity = 0.01, **keywords: Any) -> nn.Module:
    """Swaps every `nn.EmbeddingBag` and `nn.Embedding` in `model` for its tiered twin, keeping weights and settings.

    `keywords` are those of `TieredEmbeddingBag` (policy, storage, optimizer, …); a twin is on the device of the weight
    that it replaces, unless they name one. A module that occurs in several
    places is replaced by one; a frozen one (`weight.requires_grad` False) stays frozen. With `File(path)` each table
    gets a file of its own, `path` plus the module's name. Returns the model, or the twin if `model` is itself an
    embedding. Refused, as something would be lost: subclasses, modules with hooks, and weights tied to those of another
    module. Raises before anything is replaced where it can tell.

    >>> model = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum"), nn.Linear(4, 1))
    >>> type(replace_embedding_bags(model, capacity=0.1)[0]).__name__
    'TieredEmbeddingBag'
    """
    kinds = (nn.EmbeddingBag, nn.Embedding)
    found = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    for name, module in found.items():
        if type(module) not in kinds:
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}, a subclass whose own behaviour a tiered "
                f"twin would lose; replace it by hand"
            )
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise ConfigError(
                f"{name or 'the model'} has hooks, which its twin would lack; remove them, or replace it by hand"
            )
    _refuse_tied(model, found)
    twins = {name: _twin(name, module, capacity, keywords) for name, module in found.items()}
    if "" in twins:
        return twins[""]
    by_module = {found[name]: twin for name, twin in twins.items()}
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is not None and child in by_module:
                setattr(parent, child_name, by_module[child])
    return model


def _refuse_tied(model: nn.Module, found: Container[str]) -> None:
    """Raises `ConfigError` if a weight to be replaced is also a parameter of something else (tied weights)."""
    owners: dict[nn.Parameter, str] = {}
    for owner, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            known = owners.setdefault(param, owner)
            if known != owner and (known in found or owner in found):
                raise ConfigError(
                    f"{known!r} and {owner!r} share one weight ({name}), which a twin would train apart from "
                    f"the other; untie them, or let one module do for both"
                )


def _twin(
    name: str, module: nn.EmbeddingBag | nn.Embedding, capacity: Capacity, keywords: dict[str, Any]
) -> TieredModule:
    keywords = {"device": module.weight.device, **keywords, "capacity": capacity}
    storage = keywords.get("storage")
    if isinstance(storage, File) and name:
        keywords["storage"] = replace_fields(storage, path=f"{storage.path}.{name}")
    if not module.weight.requires_grad:
        keywords.pop("optimizer", None)
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
    twin = make(module.num_embeddings, module.embedding_dim, **shared, **keywords)
    twin.requires_grad_(module.weight.requires_grad)
    twin.train(module.training)
    return twin
