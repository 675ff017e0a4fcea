"""What users do with a sharded collection beside training it: dense layers, scalers, schedulers; what is refused."""

from __future__ import annotations

import contextlib
import gc
import io

import pytest
import torch
import torch.distributed as dist
from devices import equal
from sharding.ranks import SHARDINGS, batch_of, joined, step_of, tables_of, uneven
from sharding.test_sharded_failures import raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import Layout, Replicated, RowWise, TableWise

TABLES = tables_of(widths=(4, 8))
WIDTH = sum(table.embedding_dim for table in TABLES)


def model_of(**keywords):
    keywords = {"sharding": RowWise(), "optimizer": te.Adagrad(lr=0.1), "capacity": 0.5} | keywords
    return ShardedTieredEmbeddingBagCollection(TABLES, **keywords)


def run_with_scaler(rank, size, bad):
    """Steps of which one has an infinite gradient, on one rank alone."""
    model, found = model_of(sharding=SHARDINGS["all kinds"], average=False), []
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0, growth_interval=1000)
    model.fused_optimizer.attach_grad_scaler(scaler)
    for step in range(4):
        ids, offsets, _, upstream = batch_of(TABLES, step, rank, samples=uneven)
        if (step, rank) == bad:
            upstream[0, 0] = torch.inf
        scale = float(scaler.scale(torch.ones(())))
        model(ids, offsets).backward(upstream * scale)
        found.append((bool(model.fused_optimizer.found_inf), scale))
        scaler.step(model.fused_optimizer)
        scaler.update()
    weights = dict(model.state_dict())
    model.close()
    return found, weights


@pytest.mark.parametrize("who", [0, 2])
def test_an_infinite_gradient_of_one_rank_keeps_all_from_the_step(worlds, who):
    model = te.TieredEmbeddingBagCollection(TABLES, optimizer=te.Adagrad(lr=0.1), capacity=1.0)
    for step in (0, 2, 3):
        batches = [batch_of(TABLES, step, rank, samples=uneven) for rank in range(3)]
        step_of(model, joined(TABLES, batches), weighted=False)
    expected = model.state_dict()
    answers = worlds(3).run(run_with_scaler, (1, who))
    for found, _ in answers:
        assert found == [(False, 8.0), (True, 8.0), (False, 4.0), (False, 4.0)]
    for name, weight in answers[0][1].items():
        assert equal(weight, expected[name])


class Ranked(nn.Module):
    def __init__(self, tables):
        super().__init__()
        torch.manual_seed(0)
        self.tables = tables
        self.dense = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids, offsets):
        return self.dense(self.tables(ids, offsets))


def trains_with_dense_layers(rank, size, prefetched):
    """In DistributedDataParallel, with a scheduler; the mean of a loss on each rank."""
    tables = model_of()
    model = nn.parallel.DistributedDataParallel(Ranked(tables))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(tables.fused_optimizer, 2, 0.5)
    batches = [batch_of(TABLES, step, rank, samples=lambda rank: 8) for step in range(5)]
    for ids, offsets, *_ in te.prefetch(batches, model) if prefetched else batches:
        optimizer.zero_grad()
        model(ids, offsets).mean().backward()
        optimizer.step()
        tables.fused_optimizer.step()  # does nothing, but a scheduler wants to see it
        schedule.step()
    found = dict(tables.state_dict()), [each.detach().clone() for each in model.module.dense.parameters()]
    tables.close()
    return found


@pytest.mark.parametrize("prefetched", [False, True])
def test_tables_train_beside_dense_layers_at_one_rate(worlds, prefetched):
    """Of two ranks gradients are halved, which is exact; DDP's sum of the dense ones may round otherwise."""
    alone = Ranked(te.TieredEmbeddingBagCollection(TABLES, optimizer=te.Adagrad(lr=0.1), capacity=1.0))
    optimizer = torch.optim.SGD(alone.dense.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(alone.tables.fused_optimizer, 2, 0.5)
    for step in range(5):
        ids, offsets, _, _ = joined(TABLES, [batch_of(TABLES, step, rank, samples=lambda rank: 8) for rank in range(2)])
        optimizer.zero_grad()
        alone(ids, offsets).mean().backward()
        optimizer.step()
        alone.tables.fused_optimizer.step()
        schedule.step()
    (weights, dense), (_, others) = worlds(2).run(trains_with_dense_layers, prefetched)
    for mine, theirs, single in zip(dense, others, alone.dense.parameters(), strict=True):
        assert equal(mine, theirs)
        torch.testing.assert_close(mine, single.detach(), rtol=1e-5, atol=1e-6)
    for name, weight in alone.tables.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def accumulates(rank, size):
    model = model_of(average=False)
    with model.accumulate():
        for step in range(3):
            step_of(model, batch_of(TABLES, step, rank, samples=uneven), weighted=False)
    outs = [model(*batch_of(TABLES, step, rank, samples=uneven)[:2]) for step in (3, 4)]
    grads = [batch_of(TABLES, step, rank, samples=uneven)[3] for step in (3, 4)]
    torch.autograd.backward(outs, grads)
    model.requires_grad_(False)
    frozen = model(*batch_of(TABLES, 5, rank, samples=uneven)[:2]).requires_grad
    model.eval()
    with torch.no_grad():
        served = model(*batch_of(TABLES, 6, rank, samples=uneven)[:2])
    weights = dict(model.state_dict())
    model.close()
    return weights, frozen, served


def test_several_forwards_are_one_step(worlds):
    model = te.TieredEmbeddingBagCollection(TABLES, optimizer=te.Adagrad(lr=0.1), capacity=1.0)

    def batch(step):
        return joined(TABLES, [batch_of(TABLES, step, rank, samples=uneven) for rank in range(3)])

    with model.accumulate():
        for step in range(3):
            step_of(model, batch(step), weighted=False)
    given = [batch(step) for step in (3, 4)]
    torch.autograd.backward([model(ids, offsets) for ids, offsets, *_ in given], [each[3] for each in given])
    with torch.no_grad():
        served = model(*batch(6)[:2])
    answers = worlds(3).run(accumulates)
    for name, weight in model.state_dict().items():
        assert equal(answers[0][0][name], weight)
    for (_, frozen, its), rows in zip(answers, served.split([5, 0, 9]), strict=True):
        assert not frozen
        assert equal(its, rows)


def filled(rows, generator):
    nn.init.normal_(rows, generator=generator)


FILLED = [
    te.TableConfig(name="a", num_embeddings=70_001, embedding_dim=2, init=filled, padding_idx=65_536),
    te.TableConfig(name="b", num_embeddings=5, embedding_dim=2, init=filled, feature_names=("x", "y")),
]


def fills(rank, size, sharding):
    model = ShardedTieredEmbeddingBagCollection(FILLED, sharding=sharding, capacity=0.5)
    weights = dict(model.state_dict())
    model.close()
    return weights


@pytest.mark.parametrize("sharding", [RowWise(), TableWise(), Replicated()])
def test_initial_rows_are_those_of_the_whole_table(worlds, sharding):
    expected = te.TieredEmbeddingBagCollection(FILLED, capacity=0.5).state_dict()
    found = worlds(3).run(fills, sharding)[0]
    for name, weight in expected.items():
        assert equal(found[name], weight)


def trains_in_halves(rank, size, is_mesh):
    """Two models, each on two ranks of four."""
    if is_mesh:
        group = init_device_mesh("cpu", (2, 2)).get_group(1)
    else:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = halves[rank // 2]
    model = model_of(group=group, average=False)
    for step in range(3):
        step_of(model, batch_of(TABLES, step, rank, samples=uneven), weighted=False)
    weights = dict(model.state_dict())
    model.close()
    return weights


@pytest.mark.parametrize("is_mesh", [True, False])
def test_a_group_of_some_ranks(worlds, is_mesh):
    answers = worlds(4).run(trains_in_halves, is_mesh)
    for half in range(2):
        model = te.TieredEmbeddingBagCollection(TABLES, optimizer=te.Adagrad(lr=0.1), capacity=1.0)
        for step in range(3):
            batches = [batch_of(TABLES, step, rank, samples=uneven) for rank in (2 * half, 2 * half + 1)]
            step_of(model, joined(TABLES, batches), weighted=False)
        for name, weight in model.state_dict().items():
            assert equal(answers[2 * half][name], weight)


def trains_apart(rank, size):
    """A model of its own on each rank of a larger world."""
    groups = [dist.new_group([each]) for each in range(size)]
    model = model_of(group=groups[rank])
    for step in range(3):
        step_of(model, batch_of(TABLES, step, rank, samples=uneven), weighted=False)
    weights = dict(model.state_dict())
    model.close()
    return weights


def test_a_group_of_one_rank_in_a_larger_world(worlds):
    for rank, found in enumerate(worlds(2).run(trains_apart)):
        model = te.TieredEmbeddingBagCollection(TABLES, optimizer=te.Adagrad(lr=0.1), capacity=1.0)
        for step in range(3):
            step_of(model, batch_of(TABLES, step, rank, samples=uneven), weighted=False)
        for name, weight in model.state_dict().items():
            assert equal(found[name], weight)


def refuses(rank, size):
    found = {
        "no table": raised(model_of, sharding={"nobody": RowWise()}),
        "no sharding": raised(model_of, sharding={"t0": "rows"}),
        "no such rank": raised(model_of, sharding=TableWise(rank=9)),
        "device": raised(model_of, device="meta"),
    }
    half = dist.new_group([0])
    found["group"] = raised(model_of, group=half) if rank == 1 else None
    return found


def test_what_is_refused(worlds):
    texts = {
        "no table": ("ConfigError", "sharding names 'nobody', of which there is no table"),
        "no sharding": ("ConfigError", "must be RowWise(), TableWise(…) or Replicated(), got 'rows'"),
        "no such rank": ("ConfigError", "rank 9, of 2 ranks"),
        "device": ("UnsupportedError", "meta"),
        "group": ("ConfigError", "rank 1 is none of the group's"),
    }
    for found in worlds(2).run(refuses):
        for name, told_of in found.items():
            if told_of is not None:
                kind, text = texts[name]
                assert told_of[0] == kind, name
                assert text in told_of[1], name


def makes_groups_apart(rank, size):
    gc.collect()  # of collections that others have left, with groups that would be counted
    pair = dist.new_group([0, 1])
    dist.new_group([0])
    return raised(model_of, group=pair)


def test_groups_that_torch_would_mix_up_are_refused(worlds):
    for rank, (kind, text) in enumerate(worlds(3).run(makes_groups_apart)):
        assert kind == "ConfigError"
        assert ("rank 2 is none of the group's" if rank == 2 else "different numbers of process groups") in text


def test_without_a_process_group_it_says_what_to_do():
    kind, text = raised(model_of)
    assert kind == "ConfigError"
    assert "torch.distributed is not initialized" in text


def test_rows_are_divided_evenly_and_tables_by_their_lookups():
    tables = [
        te.TableConfig(name=f"t{t}", num_embeddings=n, embedding_dim=64, feature_names=features)
        for t, (n, features) in enumerate([(100_000, ()), (7, ("a", "b", "c")), (9, ()), (11, ()), (1_000_000, ())])
    ]
    whole = {name: te.TableWise() for name in ("t1", "t2", "t3")}
    layout = Layout(tables, 2, whole)
    assert layout.owner.tolist() == [-1, 0, 1, 1, -1]
    for t, table in enumerate(tables):
        ids = torch.arange(min(1000, table.num_embeddings)).numpy()
        owners = layout.owners(ids * 0 + t, ids)
        for rank in range(2):
            part, mine = layout.part(t, rank), ids[owners == rank]
            local = layout.local(mine * 0 + t, mine)
            assert (part.first + part.step * local == mine).all()
            assert (local < max(1, part.own_rows)).all()
    assert sum(layout.part(4, rank).own_rows for rank in range(2)) == 1_000_000


def describes(rank, size):
    model, printed = model_of(capacity=0.5), io.StringIO()
    with contextlib.redirect_stdout(printed):
        te.describe(model)
    told_of = model.describe()
    model.close()
    return told_of, [" ".join(line.split()) for line in printed.getvalue().splitlines()]


def describes_what_nobody_has_chosen(rank, size):
    tables = [te.TableConfig(name=name, num_embeddings=rows, embedding_dim=4) for name, rows in (("a", 1), ("b", 90))]
    of_each, of_some = (
        te.ShardedTieredEmbeddingBagCollection(tables, sharding=given, capacity=0.5, optimizer=te.Adagrad(lr=0.1))
        for given in (None, {"a": te.Replicated(), "b": te.RowWise()})
    )
    told_of = of_each.describe(), of_some.describe()
    rows = [[part.own_rows for part in map(of_each.layout.part, (0, 1), (rank, rank))] for rank in range(size)]
    ids = torch.tensor([0, 0, 0, 89, rank, 5])
    for _ in range(3):
        of_each(ids, torch.arange(7)).sum().backward()
    weights = {name: weight.clone() for name, weight in of_each.state_dict().items()}
    for each in (of_each, of_some):
        each.close()
    return told_of, rows, weights


def test_small_tables_are_row_wise_unless_one_says_otherwise(worlds):
    (by_default, by_name), rows, weights = worlds(3).run(describes_what_nobody_has_chosen)[0]
    why = "row-wise over 3 ranks, the default: it sends least where bags have one id"
    assert by_default == [f"a: 1 × 4, {why}", f"b: 90 × 4, {why}"]
    assert by_name == ["a: 1 × 4, replicated on 3 ranks", "b: 90 × 4, row-wise over 3 ranks"]
    assert rows == [[1, 30], [0, 30], [0, 30]]  # a rank may have no row of a table
    assert weights["tables.a.weight"].shape == (1, 4)


@pytest.mark.parametrize("size", [1, 2])
def test_a_collection_says_who_holds_what(worlds, size):
    where = "whole on rank 0" if size == 1 else "row-wise over 2 ranks"
    for told_of, printed in worlds(size).run(describes):
        sizes = [(1, 4), (3, 8), (17, 4), (40, 8)]
        assert told_of == [f"t{t}: {rows} × {width}, {where}" for t, (rows, width) in enumerate(sizes)]
        assert "4 tables, 61 rows, 416 numbers (1.6 KiB), beside the 0 that parameters() counts" in printed
        (line,) = [line for line in printed if line.startswith("t2 ")]
        assert line.startswith("t2 17 4 272 B ")
        assert line.endswith(" CPU over host Adagrad, in backward")
