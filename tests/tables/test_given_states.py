"""State dicts that hold what no optimizer has saved: each is loaded, or refused while nothing has changed."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from devices import equal
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, InvalidInputError, TieredEmbError
from tieredemb.step.table_parameter import TableParameter
from tieredemb.tables.fused_optimizer import FusedOptimizer

TABLES = [
    te.TableConfig(name=name, num_embeddings=rows, embedding_dim=width)
    for name, rows, width in (("a", 12, 4), ("b", 6, 3))
]

# what a value in a state dict is replaced by, given a tensor that is or might have been there
JUNK = {
    "nothing": lambda _: None,
    "text": lambda _: "x",
    "list": lambda _: [1, 2],
    "dict": lambda _: {},
    "object": lambda _: object(),
    "class": lambda _: int,
    "complex number": lambda _: 1j,
    "true": lambda _: True,
    "negative": lambda _: -1,
    "fraction": lambda _: 1.5,
    "nan": lambda _: math.nan,
    "infinite": lambda _: math.inf,
    "huge": lambda _: 10**400,
    "beyond int32": lambda _: 2**31,
    "array": lambda _: np.ones(3),
    "number of numpy": lambda _: np.float32(2),
    "meta": lambda value: value.to("meta"),
    "sparse": lambda value: value.float().to_sparse(),
    "complex": lambda value: value.to(torch.complex64),
    "quantized": lambda value: torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8),
    "4 bits": lambda value: torch.empty(value.shape, dtype=torch.uint4),
    "nested": lambda value: torch.nested.nested_tensor([value.float().reshape(-1)] * 2, layout=torch.jagged),
    "negative view": lambda value: torch._neg_view(value.float()),
    "with gradient": lambda value: value.float().clone().requires_grad_(),
    "float64": lambda value: value.double(),
    "bool": lambda value: value.bool(),
    "integers": lambda value: value.int(),
    "flat": lambda value: value.reshape(-1)[:3],
    "empty": lambda value: value.new_empty(0),
    "one dimension more": lambda value: value[..., None],
    "a row less": lambda value: value[:-1] if value.dim() else value,
    "negative step": lambda _: torch.tensor(-1.0),
    "fraction of a step": lambda _: torch.tensor(2.5),
    "step nan": lambda _: torch.tensor(math.nan),
    "huge step": lambda _: torch.tensor(1e30),
    "two steps": lambda _: torch.tensor([1.0, 2.0]),
    "bytes": lambda _: torch.randint(0, 256, (50,), dtype=torch.uint8),
    "other numbers": lambda value: torch.randint(-(2**31), 2**31 - 1, value.shape).to(value.dtype),
}


def fused(config):
    tables = te.TieredEmbeddingBagCollection(TABLES, capacity=3, optimizer=config)
    return tables, tables, tables.fused_optimizer


def followed(kind, **options):
    model = nn.Sequential(te.TieredEmbeddingBagCollection(TABLES, capacity=3, optimizer=kind), nn.Linear(7, 1))
    optimizer = kind(model.parameters(), **options)
    model[0].follow(optimizer)
    return model, model[0], optimizer


KINDS = {
    "Adagrad": lambda: fused(te.Adagrad(lr=0.1)),
    "SGD": lambda: fused(te.SGD(lr=0.1)),
    "Adam": lambda: fused(te.Adam(lr=0.1)),
    "torch SGD momentum": lambda: followed(torch.optim.SGD, lr=0.1, momentum=0.5),
    "torch Adam": lambda: followed(torch.optim.Adam, lr=0.1),
}


def train(model, tables, optimizer, seed):
    ids = torch.randint(6, (8,), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    out = tables(ids, torch.arange(9))
    (out if model is tables else model[1](out)).sum().backward()
    optimizer.step()


def places(value, path=()):
    """The paths of all that a state dict holds, itself but not what torch alone has."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list | tuple) else ():
        yield from places(value[key], (*path, key))


def changed(value, path, new):
    """A copy of a state dict with `new` in one place."""
    if not path:
        return new
    parts = dict(value) if isinstance(value, dict) else list(value)
    parts[path[0]] = changed(value[path[0]], path[1:], new)
    return parts if isinstance(value, dict | list) else tuple(parts)


def at(value, path):
    for key in path:
        value = value[key]
    return value


def is_of_tables(path, optimizer):
    """Whether a place in a state dict is none of a dense layer's state, which torch alone looks at."""
    if path[0] != "state" or len(path) == 1 or isinstance(optimizer, FusedOptimizer):
        return True
    return isinstance(optimizer.param_groups[0]["params"][path[1]], TableParameter)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_with_one_odd_value_loads_or_changes_nothing(kind):
    chance = random.Random(kind)
    torch.manual_seed(0)
    model, tables, optimizer = KINDS[kind]()
    for seed in range(5):
        train(model, tables, optimizer, seed)
    weights, good = copy.deepcopy(tables.state_dict()), copy.deepcopy(optimizer.state_dict())
    known = [path for path in places(good) if is_of_tables(path, optimizer)]
    for name, odd in JUNK.items():
        path = chance.choice(known)
        old = at(good, path)
        bad = changed(good, path, odd(old if isinstance(old, torch.Tensor) else torch.ones(12, 4)))
        # torch refuses some options of its own params by errors of its own
        own = Exception if path[0] == "param_groups" and not isinstance(optimizer, FusedOptimizer) else TieredEmbError
        try:
            optimizer.load_state_dict(bad)
        except own:
            assert same(tables.state_dict(), weights), (name, path)
            assert same(optimizer.state_dict(), good), (name, path)
        else:
            tables.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(good))
    train(model, tables, optimizer, 9)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("meta", "meta device, which has no content; load the file with map_location='cpu'"),
        ("sparse", "layout torch.sparse_coo; pass to_dense"),
        ("complex", "torch.complex64; pass its real part"),
        ("quantized", "quantized tensor of torch.qint8; pass dequantize"),
        ("text", "got 'x'"),
        ("flat", "must have shape"),
    ],
)
def test_state_that_cannot_be_read_is_refused_with_what_to_pass(odd, message):
    bag = te.TieredEmbeddingBag(12, 4, capacity=3, optimizer=te.Adagrad(lr=0.1))
    state = bag.fused_optimizer.state_dict()
    state["state"][0]["sum"] = JUNK[odd](state["state"][0]["sum"])
    with pytest.raises(InvalidInputError, match=message):
        bag.fused_optimizer.load_state_dict(state)


@pytest.mark.parametrize("odd", ["with gradient", "float64", "integers", "negative view"])
def test_state_that_torch_reads_as_numbers_is_loaded(odd):
    bag = te.TieredEmbeddingBag(12, 4, capacity=3, optimizer=te.Adagrad(lr=0.1))
    state, given = bag.fused_optimizer.state_dict(), JUNK[odd](torch.arange(48.0).reshape(12, 4))
    state["state"][0]["sum"] = given
    bag.fused_optimizer.load_state_dict(state)
    assert equal(bag.fused_optimizer.state_dict()["state"][0]["sum"], given.detach().float())


@pytest.mark.parametrize("step", [-1, 1.5, math.nan, math.inf, 2**60, True, "3", torch.ones(2), torch.tensor(True)])
def test_steps_that_are_none_are_refused(step):
    bag = te.TieredEmbeddingBag(12, 4, capacity=3, optimizer=te.Adam(lr=0.1))
    state = bag.fused_optimizer.state_dict()
    state["state"][0]["step"] = step
    with pytest.raises(InvalidInputError, match="'step' of table 'weight' must be a whole number of steps"):
        bag.fused_optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "value"), [("lr", None), ("lr", "x"), ("lr", -1.0), ("eps", math.nan), ("weight_decay", 0.5)]
)
def test_options_that_no_update_takes_are_refused_with_the_state(name, value):
    bag = te.TieredEmbeddingBag(12, 4, capacity=3, optimizer=te.Adagrad(lr=0.1))
    state = bag.fused_optimizer.state_dict()
    state["state"][0]["sum"] += 1
    state["param_groups"][0][name] = value
    with pytest.raises(ConfigError, match=name):
        bag.fused_optimizer.load_state_dict(state)
    assert not bag.fused_optimizer.state_dict()["state"][0]["sum"].any()


def test_rows_at_a_step_that_the_history_lacks_are_refused():
    model, tables, optimizer = KINDS["Adam"]()
    for seed in range(5):
        train(model, tables, optimizer, seed)
    state = optimizer.state_dict()
    lagging = state["state"][0]["lagging"]
    assert len(lagging["rows"])
    lagging["state"][:, -1] = -7
    with pytest.raises(InvalidInputError, match="rows at steps 4294967289"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("odd", ["meta", "sparse", "complex", "quantized", "4 bits", "nested", "text", "flat", "array"])
def test_weights_that_cannot_be_read_change_no_table(odd):
    tables = te.TieredEmbeddingBagCollection(TABLES, capacity=3)
    before = copy.deepcopy(tables.state_dict())
    rows = torch.ones(6, 3)
    with pytest.raises(RuntimeError, match=r"tables\.b\.weight"):
        tables.load_state_dict({"tables.a.weight": torch.ones(12, 4), "tables.b.weight": JUNK[odd](rows)})
    assert same(tables.state_dict(), before)


def test_weights_of_another_module_are_loaded_as_they_are():
    one, other = (te.TieredEmbedding(12, 4, capacity=3, optimizer=te.SGD(lr=0.1), seed=seed) for seed in (0, 1))
    one.load_state_dict({"weight": other.weight})
    assert equal(one.state_dict()["weight"], other.state_dict()["weight"])


@pytest.mark.parametrize("odd", ["meta", "sparse", "complex", "text"])
def test_state_that_a_followed_optimizer_cannot_give_leaves_it_unfollowed(odd):
    whole = nn.EmbeddingBag(12, 4)
    optimizer = torch.optim.Adam(whole.parameters())
    whole(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    kept = optimizer.state[whole.weight]
    kept["exp_avg"] = JUNK[odd](kept["exp_avg"])
    bag = te.TieredEmbeddingBag(12, 4, capacity=3)
    with pytest.raises(InvalidInputError, match="exp_avg"):
        bag.follow(optimizer, instead_of=[whole.weight])
    assert optimizer.param_groups[0]["params"][0] is whole.weight
    bag.follow(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


class Unreadable(torch.Tensor):
    """As tensors of libraries are that lie elsewhere: it has a shape, and no numbers that could be copied."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            raise TypeError("it lies elsewhere")
        return super().__torch_function__(func, types, args, kwargs)


def test_a_tensor_that_cannot_be_copied_is_refused_before_anything_changes():
    model, tables, optimizer = KINDS["Adam"]()
    train(model, tables, optimizer, 0)
    before, good = copy.deepcopy(tables.state_dict()), copy.deepcopy(optimizer.state_dict())
    odd = torch.ones(12, 4).as_subclass(Unreadable)
    with pytest.raises(InvalidInputError, match=r"exp_avg.*cannot be read \(it lies elsewhere\)"):
        optimizer.load_state_dict(changed(good, ("state", 0, "exp_avg"), odd))
    assert same(optimizer.state_dict(), good)
    assert same(tables.state_dict(), before)


def test_an_option_without_a_name_is_refused():
    _, _, optimizer = KINDS["Adam"]()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][3] = 1
    with pytest.raises(InvalidInputError, match="must have names, got 3"):
        optimizer.load_state_dict(state)
