"""Puts torch's embeddings back into a model whose tables are tiered."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tieredemb.conversion.places import listed, params_of, put_back, swap
from tieredemb.conversion.torch_modules import KINDS, bytes_of, followed_by, torch_module, torch_state
from tieredemb.errors import ConfigError, DeviceMemoryError, StorageFullError
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.modules.one_table import OneTable
from tieredemb.pipeline.planned_calls import plan_no_calls
from tieredemb.tables.followed_optimizer import FollowedOptimizer
from tieredemb.tables.fused_optimizer import FusedOptimizer
from tieredemb.tables.row_state import steps_of
from tieredemb.tables.table_set import available_memory_bytes, free_bytes


def restore_embedding_bags(model: nn.Module) -> nn.Module:
    """Swaps every `TieredEmbeddingBag` and `TieredEmbedding` in `model` for torch's module, with the rows as they are
    now: the way back from `replace_embedding_bags`, for `torch.export`, ONNX, TorchScript, and all other tools.

    Names, settings, device and hooks stay; a frozen table is a frozen weight. The weight has the dtype of the table's
    outputs. Where a table follows a torch optimizer, the weight takes its place there, with its state in torch's form:
    training goes on as torch's would. An optimizer of tieredemb stays behind with its state; build one of torch's.

    Returns the model, or torch's module if `model` is itself a table. Row files stay as they are and are closed, once
    nobody holds the tables any more. To keep the tiered model too, restore a copy: `copy.deepcopy(model)`.

    Raises `StorageFullError` or `DeviceMemoryError`, with the bytes that are needed and those that are available,
    where memory does not hold all tables as tensors, and `StorageError` while gradients wait for a step or batches are
    in flight; nothing has changed then. Warns of tables that torch has no module for: collections, subclasses.
    Synchronises with a GPU.

    >>> model = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum"), nn.Linear(4, 1)).eval()
    >>> tieredemb.restore_embedding_bags(tieredemb.replace_embedding_bags(model))[0]
    EmbeddingBag(1000, 4, mode='sum')
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    tables = {name: each for name, each in model.named_modules() if isinstance(each, LookupModule)}
    able = {name: each for name, each in tables.items() if isinstance(each, KINDS) and _reason(each) is None}
    remarks = _remarks(tables, able)
    _check(able)
    restored = _exchange(model, able)
    del tables, able
    gc.collect()  # modules refer to themselves: caches are freed and files closed now
    for line in remarks:
        warnings.warn(line, stacklevel=2)
    return restored


class _Restored(NamedTuple):
    """A table that follows a torch optimizer, and what takes its place there. `name`: of the param."""

    followed: FollowedOptimizer
    param: nn.Parameter
    state: dict[str, Any]
    name: str


def _exchange(model: nn.Module, able: Mapping[str, OneTable]) -> nn.Module:
    """Makes all modules of torch, and then puts them in the places of the tables: all or none."""
    made: dict[nn.Module, nn.Module] = {}
    trained: list[_Restored] = []
    for name, each in able.items():
        made[each] = own = torch_module(each)
        followed, param = followed_by(each), own.weight
        assert isinstance(param, nn.Parameter)
        if followed is not None:
            trained.append(_Restored(followed, param, torch_state(each, param), f"{name}.weight".removeprefix(".")))
    with contextlib.ExitStack() as undo:
        for optimizer in {id(each.followed.optimizer): each.followed.optimizer for each in trained}.values():
            assert optimizer is not None
            undo.callback(put_back, optimizer, *params_of(optimizer))
        for followed, param, state, name in trained:
            followed.put_param(param, state, name)
        undo.callback(swap, model, {own: each for each, own in made.items()})
        swap(model, made)
        for followed, *_ in trained:
            assert followed.optimizer is not None
            undo.callback(followed.listen, followed.optimizer)
            followed.unfollow()
        undo.pop_all()
    plan_no_calls(model)
    return made.get(model, model)


def _reason(module: LookupModule) -> str | None:
    """Why torch has no module that does what this one does."""
    if not isinstance(module, KINDS):
        return f"is a {type(module).__name__}, which torch has no module for; state_dict() has copies of its tables"
    if type(module) not in KINDS:
        return f"is a {type(module).__name__}, a subclass that may do anything"
    own = [name for name in module._parameters if name not in module.table_parameters]
    if own or module._buffers or module._modules:
        return "has more than its table"
    return None


def _remarks(tables: Mapping[str, LookupModule], able: Mapping[str, OneTable]) -> list[str]:
    """What the caller is warned of, one text each. Synchronises with a GPU."""
    remarks = []
    left = [f"{name!r} {_reason(each)}" if name else f"the model {_reason(each)}" for name, each in tables.items()]
    left = [text for text, name in zip(left, tables, strict=True) if name not in able]
    if left:
        remarks.append(f"left as they are, as torch has nothing to stand for them: {listed(left)}")
    elif not able:
        remarks.append("nothing was restored: the model has no TieredEmbedding or TieredEmbeddingBag")
    fused = [name for name, each in able.items() if _has_state_of_its_own(each)]
    if fused:
        remarks.append(
            f"the state of optimizers of tieredemb is not taken along: {listed(list(map(repr, fused)))}; to train on, "
            f"build a torch optimizer over model.parameters(). save_checkpoint(directory) of a table, before, keeps it"
        )
    return remarks


def _has_state_of_its_own(module: OneTable) -> bool:
    return isinstance(module.engine.optimizer, FusedOptimizer) and steps_of(module.tables, 0) > 0


def _check(able: Mapping[str, OneTable]) -> None:
    """Raises what `restore_embedding_bags` does, before it changes anything."""
    for each in able.values():
        each.engine.check_no_gradient("restore the tables")
        each.engine.drop_planned()
        for group in each.tables.groups if each.is_trainable else ():  # a backward would update the tables
            group.cache.check_idle("restore the tables")
    by_device: dict[torch.device, list[OneTable]] = {}
    for each in able.values():
        by_device.setdefault(each.tables.config.device, []).append(each)
    for device, modules in by_device.items():
        _check_memory(device, modules)


def _check_memory(device: torch.device, modules: Sequence[OneTable]) -> None:
    sizes = [bytes_of(each) for each in modules]
    weights, states = (sum(each) for each in zip(*sizes, strict=True))
    on_gpu = device.type == "cuda"
    available = free_bytes(device) if on_gpu else available_memory_bytes()
    if weights + states <= available:
        return
    raise (DeviceMemoryError if on_gpu else StorageFullError)(
        f"{len(modules)} tables as tensors need {_shown(weights + states)} (weights {_shown(weights)}, optimizer state "
        f"{_shown(states)}), {_shown(available)} of {device if on_gpu else 'memory'} are available; free memory, "
        f"restore on a machine that holds them, or restore a part of the model, as model.user = "
        f"tieredemb.restore_embedding_bags(model.user). save_checkpoint(directory) saves tables of any size, and "
        f"tieredemb.scores(table, x) multiplies with them. Nothing was changed"
    )


def _shown(size: int) -> str:
    return f"{size:,} bytes ({size / 2**30:.1f} GiB)"
