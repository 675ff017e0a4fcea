"""Trains a library's model as it is and converted, side by side.

Torch itself is the measure: the unconverted model is trained again with its first weights moved by 1e-7 of themselves,
which is about their rounding. What the losses of its steps and its predictions then differ by is what rounding alone
makes of this model, its optimizer and these batches, so the converted model may not differ by much more.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import tieredemb as te

CAPACITY = 0.1  # of the rows: less than a batch uses of the small tables, so that rows leave and come back
MOVED = 1e-7  # of a weight: float32 rounds by up to 6e-8
SEEDS = range(5)  # of moved weights
FACTOR = 4  # every step rounds anew, in an order of its own, while moved weights are moved once
ULPS = 4  # of float32, of a loss or prediction: where moved weights happen to give the same bits


def require(package: str) -> None:
    """Imports a library, or skips the calling module where it is not there."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here; run: make test-clients", allow_module_level=True)
    with mock.patch("threading.Thread.start"):  # in which deepctr-torch asks PyPI for a newer version of itself
        importlib.import_module(package)


@dataclass(frozen=True)
class Trained:
    """A model after an epoch. `losses`: float64 (steps,) · `predictions`: float64 (samples, …)."""

    model: nn.Module
    losses: np.ndarray
    predictions: np.ndarray


# told whether to convert, and what to do to the weights before anything else
Train = Callable[[bool, Callable[[nn.Module], None]], Trained]


def assert_trains_alike(train: Train) -> tuple[nn.Module, nn.Module]:
    """Compares the losses of all steps and the predictions after them. Returns the model that is not converted, and
    the one that is."""
    plain = train(False, lambda model: None)
    moved = [train(False, lambda model, seed=seed: move(model, seed)) for seed in SEEDS]
    ours = train(True, lambda model: None)
    assert len(plain.losses) == len(ours.losses) > 10
    assert plain.losses[-1] != plain.losses[0]
    # up to a step, not at it: two losses may cross
    bound = np.maximum.accumulate(np.max([np.abs(each.losses - plain.losses) for each in moved], axis=0))
    assert_within(ours.losses, plain.losses, bound)
    bound = np.max([np.abs(each.predictions - plain.predictions) for each in moved])
    assert_within(ours.predictions, plain.predictions, bound)
    assert sum(table.stats().rows_written_back for table in tables_of(ours.model)), "no row had to leave"
    return plain.model, ours.model


def assert_within(ours: np.ndarray, plain: np.ndarray, bound: np.ndarray | float) -> None:
    allowed = FACTOR * bound + ULPS * np.spacing(np.abs(plain).astype(np.float32))
    share = np.abs(ours - plain) / allowed
    assert np.max(share) <= 1, f"{np.max(share):.3g} of what is allowed, first at {np.flatnonzero(share > 1)[0]}"


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + MOVED * torch.randn(param.shape, generator=generator))


def convert(model: nn.Module, optimizer: torch.optim.Optimizer, *, told: Sequence[str] = ()) -> None:
    """In one line, that warns of what is `told` and of nothing else. Nothing is left of the embeddings."""
    weights = [weakref.ref(module.weight) for module in embeddings_of(model)]
    names = list(model.state_dict())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        te.replace_embedding_bags(model, capacity=CAPACITY, optimizer=optimizer)
    texts = [str(each.message) for each in said]
    assert len(texts) == len(told), texts
    assert all(each in text for each, text in zip(told, texts, strict=True)), texts
    assert len(tables_of(model)) == len(weights) > 0
    assert not embeddings_of(model)
    assert all(weight() is None for weight in weights), "an old weight is held"
    assert list(model.state_dict()) == names


def embeddings_of(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    return [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]


def tables_of(model: nn.Module) -> list[te.TieredEmbedding | te.TieredEmbeddingBag]:
    return [module for module in model.modules() if isinstance(module, (te.TieredEmbedding, te.TieredEmbeddingBag))]


def assert_state_dict_moves(
    plain: nn.Module, ours: nn.Module, predict: Callable[[nn.Module], np.ndarray], train: Callable[[nn.Module], object]
) -> None:
    """A deep copy of the converted model's state dict brings its predictions back after more training, bit for bit,
    and the library's own model predicts the same with it."""
    before, kept = predict(ours), copy.deepcopy(ours.state_dict())
    train(ours)
    assert not np.array_equal(predict(ours), before)
    ours.load_state_dict(kept)
    assert np.array_equal(predict(ours), before)
    plain.load_state_dict(kept)
    assert np.array_equal(predict(plain), before)


class Recorder:
    """A loss function that keeps what it returned. `losses`: floats, one a call."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function, self.losses = function, []

    def __call__(self, *args: object, **keywords: object) -> torch.Tensor:
        loss = self.function(*args, **keywords)
        self.losses.append(loss.item())
        return loss


def skewed(rng: np.random.Generator, rows: int, shape: int | tuple[int, ...]) -> np.ndarray:
    """Ids of a table as users make them: few often, most seldom. int64."""
    return np.minimum(rng.pareto(1.0, shape) * rows / 20, rows - 1).astype(np.int64)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts have the same names and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
