"""torch.compile and torch.func: a graph breaks at a tiered table, numbers stay."""

from __future__ import annotations

import copy
import shutil

import forks
import pytest
import torch
from devices import assert_close, equal
from torch import nn

import tieredemb as te
from tieredemb.errors import IdOutOfRangeError, UnsupportedError


def modules():
    tables = [
        te.TableConfig(name=name, num_embeddings=20, embedding_dim=width, mode=mode)
        for name, width, mode in (("a", 4, "sum"), ("b", 5, "mean"))
    ]
    keywords = {"capacity": 2, "optimizer": te.Adagrad(lr=0.1)}
    offsets = torch.arange(0, 9, 2)
    ids = torch.arange(8)
    yield te.TieredEmbeddingBagCollection(tables, **keywords), 9, lambda step: (ids + step, offsets)
    bag = te.TieredEmbeddingBag(20, 4, mode="sum", **keywords)
    yield bag, 4, lambda step: (ids[: 4 + step], offsets[:2], torch.rand(4 + step))
    yield te.TieredEmbedding(20, 4, **keywords), 4, lambda step: (ids + step,)


class Model(nn.Module):
    def __init__(self, table, width):
        super().__init__()
        self.table = table
        self.top = nn.Linear(width, 1)

    def forward(self, *batch):
        return self.top(torch.relu(self.table(*batch) * 2))


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("backward_too", [False, True])
def test_compiled_model_gives_the_bits_of_the_eager_one(device, which, backward_too):
    table, width, batch_of = list(modules())[which]
    torch._dynamo.reset()
    eager = Model(table, width)
    model = copy.deepcopy(eager)

    def step(net, batch):
        out = net(*batch).sum()
        out.backward()
        return out.detach()

    compiled = torch.compile(step if backward_too else model, backend="eager")
    for number in range(4):
        batch = batch_of(number)
        expected = step(eager, batch)
        out = compiled(model, batch) if backward_too else step(compiled, batch)
        assert equal(out, expected)
        with torch.no_grad():
            assert equal(model(*batch), eager(*batch))
    for mine, other in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        assert equal(mine, other)
    torch._dynamo.reset()


def test_compiled_model_refuses_bad_ids_by_name(device):
    torch._dynamo.reset()
    compiled = torch.compile(te.TieredEmbedding(20, 4, check_ids="always"), backend="eager")
    with pytest.raises(IdOutOfRangeError, match="id 20 at position 1"):
        compiled(torch.tensor([3, 20]))


def test_compiled_model_is_not_compiled_again_when_the_number_of_ids_changes(device):
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    model = Model(te.TieredEmbeddingBag(20, 4, mode="sum", capacity=2, optimizer=te.SGD(lr=0.1)), 4)
    fast = torch.compile(model, backend=backend)
    counts = []
    for n in (3, 5, 8, 1, 13):
        fast(torch.arange(n), torch.tensor([0, 1])).sum().backward()
        counts.append(len(compiled))
    assert counts[0] > 0
    assert counts[1:] == counts[:1] * 4
    torch._dynamo.reset()


def test_serving_does_not_import_the_compiler():
    code = (
        "import sys, torch, tieredemb; tieredemb.TieredEmbedding(9, 2)(torch.tensor([1])); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert forks.run(code, base=forks.TORCH).returncode == 0


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_function_transforms_are_refused(device, transform):
    bag = te.TieredEmbeddingBag(20, 4, mode="sum")
    ids = torch.tensor([[1, 2]])
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        transform(lambda weights: bag(ids, None, weights.reshape(1, 2)).sum())(torch.ones(1, 2))


BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["model", "step", "both"])
def test_what_follows_an_optimizer_trains_compiled_as_it_does_eagerly(device, backend, what):
    """Gradients of tables reach them, by hooks too, and a compiled step of the optimizer updates them."""
    torch._dynamo.reset()
    tables = te.TieredEmbeddingBag(20, 4, mode="sum", capacity=2, optimizer=torch.optim.Adam)
    models = [Model(tables, 4)]
    models.append(copy.deepcopy(models[0]))
    rows = []
    for model in models:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model.table.follow(optimizer)
        model.table.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        forward, step = model, optimizer.step
        if model is models[1]:
            forward = torch.compile(model, backend=backend) if what in ("model", "both") else forward
            step = torch.compile(optimizer.step, backend=backend) if what in ("step", "both") else step
        for number in range(4):
            optimizer.zero_grad()
            forward(torch.tensor([[1, 2, number + 5]])).square().sum().backward()
            step()
        rows.append(model.table.state_dict()["weight"])
    assert_close(*rows, rtol=1e-4, atol=1e-5)
