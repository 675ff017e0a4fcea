"""Clipping of gradients by their global norm, tables included."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tieredemb.config import check_flag, is_number, plain
from tieredemb.errors import ConfigError, InputTypeError, InvalidInputError, shown
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.step.table_gradient import TableGradient
from tieredemb.step.table_parameter import TableParameter


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, for models with tables that follow a torch optimizer, and any `norm_type`.

    `parameters`: a model, or parameters, among them those of tables. Returns the norm of all gradients, float32
    (), tables' included: what torch returns for the model with whole tables. torch's own does the same with its usual
    `norm_type` of 2. Does not synchronise, unless `error_if_nonfinite`.

    Raises `ConfigError` for tables that are updated in backward, whose gradients are gone, and `InvalidInputError` for
    a `norm_type` of 0 or less, and what is no number or no parameter.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=torch.optim.SGD)
    >>> optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    >>> bag.follow(optimizer)
    >>> bag(torch.tensor([[1, 2]])).sum().backward()
    >>> tieredemb.clip_grad_norm_(bag, 1.0, norm_type=1)
    tensor(8.)
    """
    norm_type = _number("norm_type", norm_type)
    if not norm_type > 0:
        raise InvalidInputError(f"norm_type must be a number above 0, or math.inf, got {norm_type}")
    max_norm = _number("max_norm", max_norm)
    check_flag("error_if_nonfinite", error_if_nonfinite)
    if foreach is not None:
        check_flag("foreach", foreach)
    if isinstance(parameters, nn.Module):
        _check_clippable(parameters)
        parameters = _parameters_of(parameters)
    params = _given(parameters)
    with torch.no_grad():
        grads = [each.grad for each in params if each.grad is not None]
        dense = [each for each in grads if not isinstance(each, TableGradient)]
        norms = [torch.nn.utils.get_total_norm(dense, norm_type, False, foreach)] if dense else []
        norms += [each.known.norm(norm_type) for each in grads if isinstance(each, TableGradient)]
        total = torch.tensor(0.0)
        if norms:
            first = norms[0].device
            each = torch.stack([norm.to(first) for norm in norms])
            total = torch.linalg.vector_norm(each.sort().values, norm_type)  # sharded tables are in another order
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is not finite, so they cannot be clipped; pass "
                f"error_if_nonfinite=False to multiply them by what comes of it all the same"
            )
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
    return total


def _number(name: str, value: object) -> float:
    """A norm as torch takes it: a number, a tensor of one, or a number in words, as "inf"."""
    try:
        number = float(value) if isinstance(value, str) else plain(value)
        if isinstance(number, torch.Tensor) and number.dtype != torch.bool:
            number = float(number)
        if is_number(number):
            return float(number)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        pass
    raise InvalidInputError(f"{name} must be a number, or math.inf, got {shown(value)}")


def _given(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    params = list(parameters) if isinstance(parameters, Iterable) and not isinstance(parameters, type) else [None]
    tensors = [each for each in params if isinstance(each, torch.Tensor)]
    if len(tensors) < len(params):
        odd = next(each for each in params if not isinstance(each, torch.Tensor))
        given = parameters if odd is None else odd
        raise InputTypeError(f"parameters must be a model, or an iterable of its parameters, got {shown(given)}")
    return tensors


def _of_tables(module: LookupModule) -> list[TableParameter]:
    return [each for engine in module.engines for each in engine.table_parameters]


def _parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """The parameters, with those of sharded tables, which `parameters()` does not return."""
    tables = [each for module in model.modules() if isinstance(module, LookupModule) for each in _of_tables(module)]
    return list({id(each): each for each in (*model.parameters(), *tables)}.values())


def _check_clippable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, LookupModule) and module.is_trainable and not _of_tables(module):
            raise ConfigError(
                f"the tables of {name or 'the model'} are updated in backward, and their gradients are gone when it "
                f"returns; build the module with a torch optimizer, or clip the other parameters alone"
            )
