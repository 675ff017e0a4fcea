"""A group of one rank on a GPU: eager, ahead and captured, the bits of a collection without a group. And the same where
that rank exchanges all with itself, as several do: by NCCL."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from devices import require_gpu
from sharding.ranks import tables_of
from training import random_batch

import tieredemb as te
from tieredemb.pipeline.autotuner import SharedAutotuner
from tieredemb.sharding import collection
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection

pytestmark = pytest.mark.gpu
TABLES = tables_of(modes=("sum", "mean"), widths=(4, 8))
STEPS = 12


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone, which meets on gloo, and on NCCL beside it."""
    require_gpu()
    dist.init_process_group("cpu:gloo,cuda:nccl", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def batches():
    """ids, offsets and gradient of each step, of one form."""
    drawn = [random_batch(TABLES, 7, step) for step in range(STEPS)]
    longest = max(len(ids) for ids, *_ in drawn)
    same = []
    for ids, offsets, _, upstream in drawn:
        padded = torch.cat([ids, ids.new_zeros(longest - len(ids))])
        offsets = offsets.clone()
        offsets[-1] = longest  # which only lengthens the last bag
        same.append(tuple(part.cuda() for part in (padded, offsets, upstream)))
    return same


def trained(model, way):
    """Weights after training in a `way`."""

    def step(batch):
        ids, offsets, upstream = batch
        out = model(ids, offsets)
        out.backward(upstream.to(out.dtype))

    run = te.graph_step(step) if "graph" in way else step
    for batch in te.prefetch(batches(), model) if "ahead" in way else batches():
        run(batch)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.close()
    return weights


@pytest.mark.parametrize("optimizer", [te.RowWiseAdagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
@pytest.mark.parametrize("way", ["eager", "ahead", "graph", "graph ahead"])
def test_cuda_one_rank_has_the_bits_of_one_process(group, way, optimizer):
    plain = te.TieredEmbeddingBagCollection(TABLES, capacity=0.5, optimizer=optimizer, device="cuda")
    expected = trained(plain, "eager")
    model = ShardedTieredEmbeddingBagCollection(TABLES, capacity=0.5, optimizer=optimizer, device="cuda")
    assert model.cuda() is model  # it is there
    found = trained(model, way)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)


def test_cuda_one_rank_follows_a_torch_optimizer_and_saves(group, tmp_path):
    def make(kind):
        dense = torch.nn.Parameter(torch.zeros(1, device="cuda"))
        optimizer = torch.optim.Adagrad([dense], lr=0.1)
        return kind(TABLES, capacity=0.5, optimizer=optimizer, device="cuda"), optimizer

    found = []
    for kind in (te.TieredEmbeddingBagCollection, ShardedTieredEmbeddingBagCollection):
        model, optimizer = make(kind)
        for ids, offsets, upstream in batches():
            optimizer.zero_grad()
            model(ids, offsets).backward(upstream)
            optimizer.step()
        model.save_checkpoint(tmp_path / kind.__name__)
        found.append(dict(model.state_dict()))
        model.close()
    again = te.TieredEmbeddingBagCollection(TABLES, capacity=0.5, optimizer=torch.optim.Adagrad, device="cuda")
    again.load_checkpoint(tmp_path / ShardedTieredEmbeddingBagCollection.__name__)
    for name, weight in again.state_dict().items():
        assert torch.equal(found[0][name], weight)
        assert torch.equal(found[1][name], weight)
    again.close()


# --- with itself ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu:gloo,cuda:nccl", "nccl"])
def with_itself(request, tmp_path, monkeypatch):
    """A process group of this process alone, whose collections are those of several ranks."""
    require_gpu()
    monkeypatch.setattr(collection, "is_alone", lambda exchange: False)
    torch.cuda.set_device(0)
    dist.init_process_group(request.param, f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    gc.collect()  # collections that were not closed hold backward passes on this thread
    dist.destroy_process_group()


def test_cuda_backward_runs_on_the_thread_that_begins_it_until_the_collection_is_closed(with_itself):
    def threads():
        leaf, found = torch.ones(1, device="cuda", requires_grad=True), set()
        out = leaf * 2
        out.register_hook(lambda _: found.add(threading.get_ident()))
        out.sum().backward()
        return found

    here = {threading.get_ident()}
    assert threads() != here
    model = ShardedTieredEmbeddingBagCollection(TABLES, capacity=0.3, device="cuda")
    assert threads() == here
    model.close()
    assert threads() != here


@pytest.mark.parametrize("optimizer", [te.RowWiseAdagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
@pytest.mark.parametrize("way", ["eager", "ahead"])
def test_cuda_one_rank_exchanges_with_itself_by_nccl(with_itself, way, optimizer):
    keywords = {"capacity": 0.3, "optimizer": optimizer, "device": "cuda", "dtype": torch.bfloat16}
    expected = trained(te.TieredEmbeddingBagCollection(TABLES, rounding="stochastic", **keywords), "eager")
    model = ShardedTieredEmbeddingBagCollection(TABLES, rounding="stochastic", **keywords)
    assert model._ranks._context.exchange.has_nccl
    assert isinstance(te.prefetch([], model).autotuner, SharedAutotuner)  # else each rank would find another one
    found = trained(model, way)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)


def test_cuda_one_rank_with_itself_follows_weighs_saves_and_refuses_captures(with_itself, tmp_path):
    tables = tables_of(widths=(4, 8))
    models, outs = [], []
    for kind in (te.TieredEmbeddingBagCollection, ShardedTieredEmbeddingBagCollection):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cuda"))], lr=0.1, momentum=0.5)
        model = kind(tables, capacity=0.5, optimizer=optimizer, device="cuda")
        for step in range(4):
            ids, offsets, weights, upstream = (part.cuda() for part in random_batch(tables, 9, step))
            weights.requires_grad_()
            optimizer.zero_grad()
            out = model(ids, offsets, weights)
            out.backward(upstream)
            te.clip_grad_norm_(torch.nn.ModuleList([model]), 1.0)
            optimizer.step()
            outs.append((out, weights.grad))
        models.append(model)
    for (out, grad), (its_out, its_grad) in zip(outs[:4], outs[4:], strict=True):
        assert torch.equal(out, its_out)
        assert torch.equal(grad, its_grad)
    plain, sharded = models
    sharded.save_checkpoint(tmp_path / "saved")
    expected = dict(plain.state_dict())
    plain.load_checkpoint(tmp_path / "saved")
    sharded.load_state_dict(plain.state_dict())
    for name, weight in expected.items():
        assert torch.equal(plain.state_dict()[name], weight)
        assert torch.equal(sharded.state_dict()[name], weight)
    plain.close()
    sharded.close()
