"""`max_norm` in bags that have padding: torch scales the padding's row, which no bag reads and no gradient reaches."""

from __future__ import annotations

import copy

import pytest
import torch
from devices import assert_close, on_cpu
from torch import nn

import tieredemb as te

ROWS, WIDTH = 12, 4
PADDED = [[1, 2, 1], [1, 1, 1], [3, 4, 5], [1, 6, 7]]  # bags, of which one is padding alone
CLEAN = [[3, 4, 5], [5, 6, 7]]
MODES = ["sum", "mean", "max"]


def long_rows():
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH) % 7 - 2.5


def pair(mode, **keywords):
    options = {"mode": mode, "padding_idx": 1, "max_norm": 1.0}
    ours = te.TieredEmbeddingBag(ROWS, WIDTH, **options, capacity=2, **keywords)
    theirs = on_cpu(nn.EmbeddingBag(ROWS, WIDTH, **options))
    for module in (ours, theirs):
        module.load_state_dict({"weight": long_rows()})
    return ours, theirs


def upstream_of(bags):
    rows = torch.arange(len(bags) * WIDTH, dtype=torch.float32, device="cpu")
    return (rows % 5 - 1.5).reshape(len(bags), WIDTH)


@pytest.mark.parametrize("mode", MODES)
def test_max_norm_scales_the_row_of_padding_that_a_batch_has(device, mode):
    ours, theirs = pair(mode)
    for bags in (CLEAN, PADDED):
        with torch.no_grad():
            assert_close(ours(torch.tensor(bags)), theirs(torch.tensor(bags, device="cpu")))
        assert_close(ours.state_dict()["weight"], theirs.state_dict()["weight"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("optimizer", "torch_optimizer"),
    [
        (te.SGD(lr=0.1), lambda params: torch.optim.SGD(params, lr=0.1)),
        (te.AdamW(lr=0.1, weight_decay=0.1), lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)),
    ],
    ids=["SGD", "AdamW"],
)
def test_the_scaled_row_of_padding_is_trained_as_in_torch(device, mode, optimizer, torch_optimizer):
    ours, theirs = pair(mode, optimizer=optimizer)
    with torch.device("cpu"):
        reference = torch_optimizer(theirs.parameters())
        for bags in (PADDED, CLEAN, CLEAN, PADDED, CLEAN):
            reference.zero_grad()
            theirs(torch.tensor(bags)).backward(upstream_of(bags))
            reference.step()
    for bags in (PADDED, CLEAN, CLEAN, PADDED, CLEAN):
        ours(torch.tensor(bags)).backward(upstream_of(bags).to(device))
    assert_close(ours.state_dict()["weight"], theirs.state_dict()["weight"])


def test_weights_of_padding_whose_row_is_scaled_have_no_gradient(device):
    ours, theirs = pair("sum", optimizer=te.SGD(lr=0.1))
    given = torch.linspace(-1, 2, 12).reshape(4, 3)
    found = [given.clone().to(where).requires_grad_() for where in (device, "cpu")]
    for module, weights in zip((ours, theirs), found, strict=True):
        out = module(torch.tensor(PADDED, device=weights.device), per_sample_weights=weights)
        out.backward(upstream_of(PADDED).to(weights.device))
    assert_close(found[0].grad, found[1].grad)


def test_tables_of_a_collection_scale_their_rows_of_padding(device):
    padding = (None, 0, 2)
    tables = [
        te.TableConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=width, mode=mode, padding_idx=padding[i])
        for i, (mode, width) in enumerate(zip(MODES, (4, 4, 3), strict=True))
    ]
    ours = te.TieredEmbeddingBagCollection(tables, capacity=3, max_norm=0.5)
    bags = [
        on_cpu(nn.EmbeddingBag(ROWS, t.embedding_dim, mode=t.mode, padding_idx=t.padding_idx, max_norm=0.5))
        for t in tables
    ]
    rows = [torch.ones(ROWS, table.embedding_dim) * (i + 1) for i, table in enumerate(tables)]
    ours.load_state_dict(dict(zip(ours.state_dict(), rows, strict=True)))
    ids = torch.tensor([[0, 2, 3], [2, 0, 0]])
    offsets = torch.arange(0, 19, 3)
    with torch.no_grad():
        out = ours(ids.reshape(-1).repeat(3), offsets)
        wanted = []
        for bag, its in zip(bags, rows, strict=True):
            bag.load_state_dict({"weight": its})
            wanted.append(bag(ids.cpu()))
    assert_close(out, torch.cat(wanted, 1))
    for found, bag in zip(ours.state_dict().values(), bags, strict=True):
        assert_close(found, bag.weight)


def test_a_converted_model_scales_the_row_of_padding(device):
    with torch.device("cpu"):
        theirs = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH, mode="mean", padding_idx=1, max_norm=1.0))
        theirs.load_state_dict({"0.weight": long_rows().cpu()})
        ours = copy.deepcopy(theirs)
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (ours, theirs)]
    te.replace_embedding_bags(ours, capacity=3, optimizer=optimizers[0], device=device)
    for bags in (PADDED, CLEAN, CLEAN, PADDED):
        for model, optimizer, where in zip((ours, theirs), optimizers, (device, "cpu"), strict=True):
            with torch.device(where):
                optimizer.zero_grad()
                model(torch.tensor(bags)).backward(upstream_of(bags).to(where))
                optimizer.step()
    assert_close(ours.state_dict()["0.weight"], theirs.state_dict()["0.weight"])
