"""The torch module that a tiered one stands for, with its rows, and what its optimizer keeps of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tieredemb.conversion.found import Embedding
from tieredemb.modules.embedding import TieredEmbedding
from tieredemb.modules.embedding_bag import TieredEmbeddingBag
from tieredemb.modules.one_table import OneTable
from tieredemb.tables.followed_optimizer import FollowedOptimizer
from tieredemb.tables.torch_kinds import kind_of

KINDS = (TieredEmbedding, TieredEmbeddingBag)


def followed_by(module: OneTable) -> FollowedOptimizer | None:
    """What has the torch optimizer that a module follows; None where it follows none."""
    optimizer = module.engine.optimizer
    return optimizer if isinstance(optimizer, FollowedOptimizer) and optimizer.optimizer is not None else None


def dtype_of(module: OneTable) -> torch.dtype:
    """The dtype of the module's outputs, and so that of torch's weight."""
    return module.tables.config.output_dtype


def bytes_of(module: OneTable) -> tuple[int, int]:
    """Bytes of torch's weight, and of what a torch optimizer keeps of it. Synchronises with a GPU."""
    numbers, followed = module.num_embeddings * dtype_of(module).itemsize, followed_by(module)
    state = 0
    if followed is not None and followed.config is not None and followed.has_state(0):
        state = sum(each.width(module.embedding_dim) for each in followed.config.tensors)
    return numbers * module.embedding_dim, numbers * state


def torch_module(module: OneTable) -> Embedding:
    """An `nn.Embedding` or `nn.EmbeddingBag` with a copy of the rows, the settings and the hooks of a tiered module.
    Raises `StorageFullError` or `DeviceMemoryError` where memory cannot hold the rows."""
    followed = followed_by(module)
    torch_optimizer = None if followed is None else followed.optimizer
    takes_sparse = torch_optimizer is not None and kind_of(type(torch_optimizer)).takes_sparse
    settings: dict[str, Any] = {
        "padding_idx": module.padding_idx,
        "max_norm": module.max_norm,
        "norm_type": module.norm_type,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "sparse": module.sparse or takes_sparse,
        "_weight": module.tables.weight(0, module.tables.config.device, dtype_of(module)),
    }
    made: Embedding
    if isinstance(module, TieredEmbeddingBag):
        settings |= {"mode": module.mode, "include_last_offset": module.include_last_offset}
        made = nn.EmbeddingBag(module.num_embeddings, module.embedding_dim, **settings)
    else:
        made = nn.Embedding(module.num_embeddings, module.embedding_dim, **settings)
    made.weight.requires_grad_(module.trains)
    for parameter in module.engine.table_parameters if module.trains else ():
        for hook in (parameter.hooks or {}).values():
            made.weight.register_hook(hook)
        for post_hook in (parameter.post_hooks or {}).values():
            made.weight.register_post_accumulate_grad_hook(post_hook)
    made.train(module.training)
    for name, own in vars(module).items():
        if name in vars(made) and name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            setattr(made, name, own)  # the very dicts, by which their handles remove them
    return made


def torch_state(module: OneTable, param: nn.Parameter) -> dict[str, Any]:
    """The state that the torch optimizer keeps of a module's table, in torch's form for `param`, which will replace the
    table. Raises `StorageFullError` where memory cannot hold it."""
    followed = followed_by(module)
    assert followed is not None
    assert followed.optimizer is not None
    if not followed.has_state(0):
        return {}
    group = followed.optimizer.param_groups[followed.group]
    # Then torch keeps the step on the device of the param.
    on_device = bool(group.get("capturable")) or bool(group.get("fused"))
    state = followed.torch_state(0)
    for name, value in state.items():
        if name != "step":
            state[name] = value.to(param.device, param.dtype)
        elif on_device and isinstance(value, torch.Tensor):
            state[name] = value.to(param.device)
    return state
