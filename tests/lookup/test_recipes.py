"""Recipes: an optimizer is its config and two row updates, and nothing else knows its name."""

from __future__ import annotations

import ast
import importlib
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import training
from devices import assert_same_bits, equal

import tieredemb as te
from tieredemb.config import OptimizerConfig
from tieredemb.kernels.source import PACKAGE
from tieredemb.kernels.source import text as source
from tieredemb.lookup.optimizer import (
    MOST_NUMBERS,
    device_numbers,
    hyperparameters,
    named_numbers,
    recipe_file,
    recipe_flags,
)

OPTIMIZERS = {type(optimizer): optimizer for optimizer in training.OPTIMIZERS}
TOOLS = {  # by it gradients are summed where nothing is trained
    "SGD": {"lookup/device_lookup.py", "lookup/gradient_rows.py", "lookup/gradient_rows_cpu.py", "ops_cpu.py"}
}


def test_every_optimizer_is_exported_and_tested():
    kinds = {name: kind for name, kind in OptimizerConfig.known().items() if kind.__module__.startswith("tieredemb.")}
    assert {kind.__module__.rpartition(".")[2] for kind in kinds.values()} == {
        path.stem for path in (PACKAGE / "lookup" / "optimizers").glob("*.cu")
    }
    for name, kind in kinds.items():
        assert name in te.__all__
        assert getattr(te, name) is kind
        assert kind in OPTIMIZERS


def names_in(path: Path) -> set[str]:
    """What the code of a file calls by name; texts and comments do not count."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.name for alias in node.names}
        found |= {getattr(node, "id", ""), getattr(node, "attr", "")}
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_an_optimizer_is_known_to_four_files(kind):
    path = Path(*kind.__module__.split(".")[1:])
    own = {f"{path}.py", f"{path}_cpu.py", f"{path}.cu"}
    for file in own:
        assert (PACKAGE / file).is_file()
    knowing = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if kind.__name__ in names_in(file)}
    assert knowing <= own | {"__init__.py", "tables/torch_kinds.py"} | TOOLS.get(kind.__name__, set())
    shared = [file for file in PACKAGE.rglob("*.cu*") if file.parent.name != "optimizers"]
    assert not [file for file in shared if kind.__name__ in file.read_text()]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_recipe_has_a_row_update_in_either_language(kind):
    twin = importlib.import_module(f"{kind.__module__}_cpu")
    assert callable(twin.row_update)
    kernels = ("dense_update", "rows_catch_up") if OPTIMIZERS[kind].is_dense else ("segments_update",)
    assert all(callable(getattr(twin, name)) for name in kernels)
    text = (PACKAGE / recipe_file(OPTIMIZERS[kind])).read_text()
    assert "struct Recipe : ElementWise {" in text
    assert "segments_update" not in text  # the kernels are not its own
    assert "segments_update(" in source(recipe_file(OPTIMIZERS[kind]))


@pytest.mark.parametrize("optimizer", training.OPTIMIZERS, ids=training.NAMES)
def test_a_gpu_is_told_the_numbers_in_the_order_of_the_structs(optimizer):
    group = asdict(optimizer)
    flags = dict(flag.removeprefix("-D").split("=") for flag in recipe_flags(optimizer) if "=" in flag)
    hyper, numbers = flags["HYPER"].split(","), flags["NUMBERS"].split(",")
    assert numbers[-1] == "scale"
    told = device_numbers(optimizer, group)
    assert len(told) == MOST_NUMBERS
    named = named_numbers(type(optimizer), group)
    assert dict(zip(hyper, told, strict=False)) == named
    derived = dict(zip(optimizer.numbers(named), told[len(hyper) :], strict=False))
    changing = optimizer.step_numbers(named, 1.0) if optimizer.is_dense else {}
    assert [*derived, *changing] == numbers[:-1]
    assert {name: derived[name] for name in optimizer.numbers(named)} == optimizer.numbers(named)
    host = hyperparameters(optimizer, group, np.array([1, 1]), 1.0)
    assert host.numbers == (*optimizer.numbers(named).values(), *changing.values())
    assert host.rate.dtype == np.float32


def test_pairs_of_a_param_group_are_named_one_by_one():
    assert named_numbers(te.SparseAdam, {"eps": 3, "betas": [0.5, 0.25], "lr": torch.tensor(2.0), "initial_lr": 9}) == {
        "lr": 2.0,
        "beta1": 0.5,
        "beta2": 0.25,
        "eps": 3.0,
    }


@pytest.mark.parametrize("given", [te.SGD, torch.optim.Rprop([torch.zeros(1)], lr=0.1), "sgd", 0.1])
def test_what_is_no_optimizer_is_refused_with_those_that_there_are(given):
    with pytest.raises(
        te.TieredEmbError,
        match="Adagrad, Adam, AdamW, Adamax, NAdam, RMSprop, RowMeanAdagrad, RowWiseAdagrad, SGD, SparseAdam",
    ):
        te.TieredEmbeddingBag(10, 4, optimizer=given, device="cpu")


# --- Lion -------------------------------------------------------------------------------------------------------------


def lion(**changed):
    given = {"lr": 0.5, "betas": (0.5, 0.75)} | changed
    return te.TieredEmbeddingBag(8, 3, mode="sum", capacity=2, optimizer=te.SparseLion(**given))


def step(bag, ids, gradient):
    bag(torch.tensor([ids])).backward(torch.tensor([gradient]))


def test_lion_moves_by_the_sign_of_the_interpolated_momentum(device):
    """Numbers that floats hold: g = 4, −8, 0 leaves momenta 1, −2, 0; then g = −1 meets c = 0, −1.5, −0.5."""
    bag = lion(weight_decay=0.25)
    bag.load_state_dict({"weight": torch.full((8, 3), 16.0)})
    step(bag, [5], [4.0, -8.0, 0.0])
    momentum = bag.fused_optimizer.state_dict()["state"][0]["exp_avg"]
    assert momentum[5].tolist() == [1.0, -2.0, 0.0]
    assert bag.state_dict()["weight"][5].tolist() == [16 - 0.5 * (s + 4.0) for s in (1, -1, 0)]
    first = bag.state_dict()["weight"][5]
    step(bag, [5], [-1.0, -1.0, -1.0])
    expected = first - 0.5 * (first.new_tensor([0.0, -1.0, -1.0]) + 0.25 * first)
    assert_same_bits([bag.state_dict()["weight"][5]], [expected])
    assert bag.fused_optimizer.state_dict()["state"][0]["exp_avg"][5].tolist() == [0.5, -1.75, -0.25]


def test_lion_leaves_rows_outside_the_batch_and_their_momenta(device):
    bag = lion(weight_decay=0.5)
    before = bag.state_dict()["weight"]
    step(bag, [1, 2], [1.0, 2.0, 3.0])
    momenta = bag.fused_optimizer.state_dict()["state"][0]["exp_avg"]
    step(bag, [3, 4], [1.0, 2.0, 3.0])
    after = bag.state_dict()["weight"]
    assert equal(after[[0, 5, 6, 7]], before[[0, 5, 6, 7]])
    assert not (after[1:5] == before[1:5]).any()
    assert equal(bag.fused_optimizer.state_dict()["state"][0]["exp_avg"][[1, 2]], momenta[[1, 2]])


def test_lion_shows_a_gradient_that_is_no_number(device):
    """The sign of a NaN is none: a row that stood still from then on would be found by nobody."""
    bag = lion()
    step(bag, [1], [math.nan, 1.0, 1.0])
    assert bag.state_dict()["weight"][1].isnan().tolist() == [True, False, False]
