"""Regularisers of known libraries that find the weights of embeddings, and so would not find their tables.

There is one function for each library, which uses the library's names and imports nothing. It is given the model and
the old weights by name. It removes old weights from lists where that changes no result, and returns warnings.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import nn

Weights = Mapping[str, weakref.ref[torch.Tensor]]


def deepctr(model: nn.Module, old: Weights) -> list[str]:
    """DeepCTR-Torch's `BaseModel.regularization_weight`: lists of weights, or of names and weights, each with factors
    l1 and l2 of terms of the loss. Where both are 0 the old weights leave their list."""
    remarks = []
    for module in model.modules():
        terms = getattr(module, "regularization_weight", None)
        if not isinstance(terms, list):
            continue
        for term in terms:
            if not (isinstance(term, tuple) and len(term) == 3 and isinstance(term[0], list)):
                continue
            weights, l1, l2 = term
            gone = {id(ref()) for ref in old.values()} - {id(None)}
            kept = [each for each in weights if id(each[-1] if isinstance(each, tuple) else each) not in gone]
            if len(kept) == len(weights):
                continue
            weights[:] = kept
            if l1 or l2:
                remarks.append(
                    f"regularization_weight of the {type(module).__name__} had {_terms(l1, l2)} of weights that are "
                    f"tables now, and no longer has: {_instead(l1, l2, 'l2_reg_embedding=0 and l2_reg_linear=0')}"
                )
    return remarks


def torch_rechub(model: nn.Module, old: Weights) -> list[str]:
    """torch-rechub's `RegularizationLoss`, which looks for `nn.Embedding` modules in the model at each step."""
    if not old:
        return []
    for loss in gc.get_objects():
        if type(loss).__name__ == "RegularizationLoss" and isinstance(loss, nn.Module):
            l1, l2 = getattr(loss, "embedding_l1", 0), getattr(loss, "embedding_l2", 0)
            if (l1 or l2) and not _of_another(loss, model):
                return [
                    f"a RegularizationLoss has {_terms(l1, l2)} of embeddings, and finds no tables: "
                    f"{_instead(l1, l2, 'embedding_l2=0')}"
                ]
    return []


def _of_another(loss: nn.Module, model: nn.Module) -> bool:
    """Whether the object that holds a loss has other models and not this one, as an earlier trainer has."""
    held = [
        holder if isinstance(holder, dict) else getattr(holder, "__dict__", {}) for holder in gc.get_referrers(loss)
    ]
    beside = [
        each
        for attributes in held
        if any(value is loss for value in attributes.values())
        for each in attributes.values()
        if isinstance(each, nn.Module) and next(each.parameters(), None) is not None
    ]
    ours = set(model.modules())
    return bool(beside) and all(ours.isdisjoint(each.modules()) for each in beside)


def _terms(l1: float, l2: float) -> str:
    return " and ".join(f"l{power}={factor:g}" for power, factor in ((1, l1), (2, l2)) if factor)


def _instead(l1: float, l2: float, switched_off: str) -> str:
    lost = "an l1 term has no counterpart. " if l1 else ""
    return (
        f"{lost}For an l2 term build the model with {switched_off} and add {2 * l2:g} to the weight_decay of the "
        f"tables' param group, which is 2 * l2: the same gradient, unless the optimizer decouples it as AdamW does"
    )


KNOWN: list[Callable[[nn.Module, Weights], list[str]]] = [deepctr, torch_rechub]
