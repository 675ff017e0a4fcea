"""Converted tables that share a cache: the numbers of tables apart, one age a step, and what is of one and of all."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from devices import assert_same_bits
from failing import FailsBackward
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, IdOutOfRangeError, StorageError, UnsupportedError
from tieredemb.step.forwards import MOST_SELECTIONS, context_of

ROWS = {"a": 40, "b": 25, "c": 9, "d": 60}
WIDTH = 4
KINDS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


def assert_same(ours, theirs):
    """Asserts that tensors, or those of two dicts, have the same bits."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = ours.values(), theirs.values()
    if isinstance(ours, torch.Tensor):
        ours, theirs = [ours], [theirs]
    assert_same_bits(ours, theirs)


class Model(nn.Module):
    """Four tables, one of them no bag, that a batch looks up as it says."""

    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleDict({name: nn.EmbeddingBag(rows, WIDTH, mode="sum") for name, rows in ROWS.items()})
        self.emb["b"] = nn.Embedding(ROWS["b"], WIDTH, padding_idx=3)
        self.top = nn.Linear(WIDTH, 1)

    def one(self, name, ids):
        out = self.emb[name](ids % ROWS[name])
        return out.sum(1) if name == "b" else out

    def forward(self, order, ids):
        return self.top(torch.tanh(sum(self.one(name, ids + at) for at, name in enumerate(order))))


def models(device, **keywords):
    """The same model with a cache for all tables, and with one for each."""
    torch.manual_seed(0)
    plain = Model().to(device)
    found = []
    for chosen in ([list(ROWS)], [[name] for name in ROWS]):
        model = copy.deepcopy(plain)
        optimizer = keywords.pop("make", None)
        trained = optimizer(model.parameters()) if optimizer else keywords.get("optimizer")
        for names in chosen:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                te.replace_embedding_bags(
                    model, **{"capacity": 0.2, **keywords, "optimizer": trained}, include=[f"emb.{n}" for n in names]
                )
        if optimizer:
            keywords["make"] = optimizer
        found.append((model, trained if optimizer else None))
    assert len({id(each.tables.groups[0].cache) for each in found[0][0].emb.values()}) == 1
    assert len({id(each.tables.groups[0].cache) for each in found[1][0].emb.values()}) == len(ROWS)
    return found


def batch_of(step, device):
    """Ids, and which tables are looked up in which order: not all, and some twice."""
    random = np.random.default_rng(step)
    order = "".join(random.choice(list(ROWS), size=random.integers(1, 6)))
    ids = np.minimum((random.pareto(1.0, (6, 3)) * 3).astype(np.int64), 59)
    return order, torch.from_numpy(ids).to(device)


def train(model, optimizer, steps, device):
    outs = []
    for step in steps:
        order, ids = batch_of(step, device)
        out = model(order, ids)
        outs.append(out.detach())
        if optimizer is not None:
            optimizer.zero_grad()
        out.square().mean().backward()
        if optimizer is not None and step % 7 != 3:
            optimizer.step()
    return outs


def weights(model):
    return {name: table.state_dict()["weight"] for name, table in model.emb.items()}


@pytest.mark.parametrize("capacity", [1, 0.3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_tables_have_the_bits_of_tables_apart(device, kind, capacity):
    decay = {"weight_decay": 0.01} if kind is torch.optim.AdamW else {}
    (one, first), (other, second) = models(
        device, make=lambda params: kind(params, lr=0.05, **decay), capacity=capacity
    )
    assert_same(train(one, first, range(30), device), train(other, second, range(30), device))
    assert_same(weights(one), weights(other))
    assert_same(states(first), states(second))


def states(optimizer):
    return {
        (number, name): value
        for number, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize(
    "optimizer", [te.SGD(lr=0.1), te.SparseAdam(lr=0.1), te.Adam(lr=0.1), te.RowWiseAdagrad(lr=0.1)], ids=str
)
def test_fused_updates_have_the_bits_of_tables_apart(device, optimizer):
    (one, _), (other, _) = models(device, optimizer=optimizer, capacity=0.1)
    assert_same(train(one, None, range(20), device), train(other, None, range(20), device))
    assert_same(weights(one), weights(other))
    steps = [table.fused_optimizer.state_dict()["state"][0]["step"] for table in one.emb.values()]
    assert len({float(step) for step in steps}) > 1  # each its own


@pytest.mark.parametrize("depth", [1, 3])
def test_fetching_ahead_has_the_bits_of_tables_apart(device, depth):
    (one, first), (other, second) = models(device, make=lambda params: torch.optim.Adam(params, lr=0.05))
    batches = [batch_of(step, device)[1] for step in range(12)]
    order = "adb"

    def ids_of(ids):
        return {f"emb.{name}": (ids + at) % ROWS[name] for at, name in enumerate(order)}

    def run(model, optimizer, loader):
        for ids in loader:
            optimizer.zero_grad()
            model(order, ids).square().mean().backward()
            optimizer.step()

    # what is looked up is computed, so that plans are dropped: they change no number all the same
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(one, first, te.prefetch(batches, one, depth, ids_of=ids_of))
    run(other, second, batches)
    assert_same(weights(one), weights(other))


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("capacity", [2, 0.2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_captured_steps_have_the_bits_of_tables_apart(device, kind, capacity, fetched):
    """Three tables, one of which is looked up twice."""
    capturable = {"capturable": True} if kind is torch.optim.Adam and device == "cuda" else {}
    torch.manual_seed(0)
    plain = Rows(3, 40).to(device)
    plain.top = nn.Linear(WIDTH, 1).to(device)
    found = []
    for chosen in (["emb.*"], ["emb.0", "emb.1", "emb.2"]):
        model = copy.deepcopy(plain)
        optimizer = kind(model.parameters(), lr=0.05, **capturable)
        for names in chosen:
            te.replace_embedding_bags(model, capacity=capacity, optimizer=optimizer, include=names)
        found.append((model, optimizer))
    random = np.random.default_rng(0)
    batches = [torch.from_numpy(random.integers(0, 40, (4, 6, 2))).to(device).unbind() for _ in range(14)]

    def stepping(model, optimizer):
        def step(batch):
            optimizer.zero_grad()
            rows = model(batch[:3]) + model.emb[0](batch[3])
            loss = model.top(torch.tanh(rows)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    (one, first), (other, second) = found
    train, expected = te.graph_step(stepping(one, first)), stepping(other, second)
    losses = [train(batch).clone() for batch in (te.prefetch(batches, one) if fetched else batches)]
    assert_same(losses, [expected(batch) for batch in batches])
    assert_same(rows_of(one), rows_of(other))
    if not fetched:  # else the first plans were given up for those of the captured step, and count, too
        assert pool_of(one).stats().batches == len(batches)


def rows_of(model):
    return [table.state_dict()["weight"] for table in model.emb]


# --- time -------------------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Tables that are looked up as they are given."""

    def __init__(self, count, rows, width=WIDTH):
        super().__init__()
        self.emb = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(count)])

    def forward(self, ids):
        return sum(table(part) for table, part in zip(self.emb, ids, strict=True))


def pool_of(model):
    return model.emb[0].tables.whole


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_a_step_ages_scores_once(device, trains, fetched):
    """The batches that the cache counts are steps, and it hits as that of a collection does."""
    count, rows, steps, ids = 6, 300, 60, 16
    model = Rows(count, rows).to(device)
    te.replace_embedding_bags(model, capacity=0.1, optimizer=te.SGD(lr=0.1), policy=te.LFU(half_life_batches=5))
    tables = [te.TableConfig(name=str(i), num_embeddings=rows, embedding_dim=WIDTH) for i in range(count)]
    collection = te.TieredEmbeddingBagCollection(
        tables, capacity=0.1, optimizer=te.SGD(lr=0.1), policy=te.LFU(half_life_batches=5), device=device
    )
    random = np.random.default_rng(0)
    batches = [
        torch.from_numpy(np.minimum(random.pareto(0.7, (count, ids, 1)) * 5, rows - 1).astype(np.int64)).to(device)
        for _ in range(steps)
    ]
    batches = [list(batch) for batch in batches]
    loader = te.prefetch(batches, model, ids_of=lambda b: {f"emb.{i}": part for i, part in enumerate(b)})
    for batch in loader if fetched else batches:
        with torch.set_grad_enabled(trains):
            out = model(batch)
            flat = torch.cat(batch).flatten()
            both = collection(flat, torch.arange(len(flat) + 1, device=device))
            if trains:
                out.sum().backward()
                both.sum().backward()
    counted, expected = pool_of(model).stats(), collection.stats()
    assert (counted.batches, counted.lookups) == (expected.batches, expected.lookups) == (steps, steps * count * ids)
    assert counted.unique == expected.unique
    # victims of a table are chosen before the next one asks; and a CPU's lookup that trains nothing brings rows in now
    # and then alone, where one that was fetched ahead always does
    assert abs(counted.hit_rate - expected.hit_rate) < (0.03 if fetched and not trains else 0.02)


def test_victims_are_looked_for_in_parts_of_a_large_cache(device):
    """Which costs next to no hits: a part holds many times what is needed, and the next plan has another one."""
    count, rows, slots, ids = (4, 12_000, 20_000, 600) if device == "cpu" else (4, 150_000, 300_000, 8_000)
    model = Rows(count, rows).to(device)
    te.replace_embedding_bags(model, capacity=slots, optimizer=te.SGD(lr=0.1))
    tables = [te.TableConfig(name=str(i), num_embeddings=rows, embedding_dim=WIDTH) for i in range(count)]
    collection = te.TieredEmbeddingBagCollection(tables, capacity=slots, optimizer=te.SGD(lr=0.1), device=device)
    random, offsets = np.random.default_rng(0), torch.arange(count * ids + 1, device=device)
    for _ in range(150):
        drawn = np.minimum(random.pareto(0.6, (count, ids, 1)) * 20, rows - 1).astype(np.int64)
        drawn[:, ::2] = random.integers(0, rows, (count, ids // 2, 1))
        batch = torch.from_numpy(drawn * 7919 % rows).to(device)
        model(list(batch))  # for a backward that does not come
        collection(batch.flatten(), offsets)
    counted, expected = pool_of(model).stats(), collection.stats()
    assert expected.evictions > 10_000
    assert abs(counted.hit_rate - expected.hit_rate) < 0.005


def test_small_parts_change_no_number(device, monkeypatch):
    monkeypatch.setattr("tieredemb.cache.policy_cpu.LEAST_PART", 2)
    monkeypatch.setattr("tieredemb.cache.policy_cpu.PART_SHARE", 1)
    (one, first), (other, second) = models(device, make=lambda params: torch.optim.Adagrad(params), capacity=0.2)
    assert_same(train(one, first, range(20), device), train(other, second, range(20), device))
    assert_same(weights(one), weights(other))


def test_a_table_that_is_looked_up_twice_ages_once(device):
    model = Rows(2, 20).to(device)
    te.replace_embedding_bags(model, capacity=5, optimizer=te.SGD(lr=0.1))
    ids = torch.tensor([[1, 2]], device=device)
    for _ in range(4):
        (model.emb[0](ids) + model.emb[1](ids) + model.emb[0](ids + 1)).sum().backward()
    assert pool_of(model).stats().batches == 4
    model.emb[0](ids)  # whose backward never comes
    assert pool_of(model).stats().batches == 5
    model.emb[0](ids)
    assert pool_of(model).stats().batches == 6
    with torch.no_grad():
        for _ in range(3):
            model([ids, ids])
    assert pool_of(model).stats().batches == 9


class Changing(Rows):
    """One that changes rows between two lookups."""

    change = None

    def forward(self, ids):
        first = self.emb[0](ids[0])
        if self.change is not None:
            self.change(self.emb[1])
        return first, self.emb[1](ids[1])


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.load_state_dict({"weight": torch.full((20, WIDTH), 7.0)}),
        lambda table: table.weight.data.fill_(7.0),
        lambda table: table.weight.data.__setitem__(slice(1, 3), 7.0),
    ],
    ids=["load_state_dict", "in place", "rows"],
)
def test_rows_that_change_within_a_step_are_those_of_the_next_lookup(device, change, trains):
    """Also where the lookups were planned and computed as one."""
    model = Changing(2, 20).to(device).train(trains)
    te.replace_embedding_bags(model, capacity=5, optimizer=te.SGD(lr=0.1))
    ids = [torch.tensor([[1, 2]], device=device)] * 2
    with torch.set_grad_enabled(trains):
        for _ in range(4):
            outputs = model(ids)
            if trains:
                sum(outputs).sum().backward()
        model.change = change
        _, second = model(ids)
    assert second.tolist() == [[14.0] * WIDTH]


@pytest.mark.parametrize("steps", [0, 4], ids=["each by itself", "planned as one"])
def test_a_step_is_over_with_a_backward_that_fails_behind_the_tables(device, steps):
    model = Rows(2, 20).to(device)
    te.replace_embedding_bags(model, capacity=5, optimizer=te.SGD(lr=0.1))
    ids = torch.tensor([[1, 2]], device=device)
    for _ in range(steps):
        model([ids, ids]).sum().backward()
    fails = FailsBackward.apply(torch.zeros(1, device=device, requires_grad=True))  # the newest goes backward first
    kept = model([ids, ids]).sum() + fails.sum()
    with pytest.raises(RuntimeError, match="planted"):
        kept.backward()
    model([ids, ids]).sum().backward()
    assert pool_of(model).stats().batches == steps + 2


def test_counters_are_of_each_table(device):
    model = Rows(3, 50).to(device)
    te.replace_embedding_bags(model, capacity=12, optimizer=te.SGD(lr=0.1))
    for step in range(10):
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 50, (2, 4, 2))).to(device)
        (model.emb[0](ids[0]) + model.emb[2](ids[1]) + model.emb[0](ids[1])).sum().backward()
    each, together = [table.stats() for table in model.emb], pool_of(model).stats()
    assert [stats.lookups for stats in each] == [160, 0, 80]
    assert [stats.batches for stats in each] == [10, 0, 10]
    for name in ("lookups", "hits", "unique", "rows_filled", "evictions", "rows_written_back"):
        assert sum(getattr(stats, name) for stats in each) == getattr(together, name), name
    assert together.evictions > 0


# --- of one and of all ------------------------------------------------------------------------------------------------


def trained_model(device, make=te.SGD, **keywords):
    (model, _), _ = models(device, optimizer=make(lr=0.1), **keywords)
    train(model, None, range(8), device)
    return model


def test_one_of_several_does_not_move_alone(device):
    model = trained_model(device)
    with pytest.raises(UnsupportedError, match=r"shares its cache with 'emb\.b', 'emb\.c', 'emb\.d'"):
        model.emb["a"].to("meta")
    with pytest.raises(UnsupportedError, match="shares its cache"):
        nn.ModuleList([model.emb["a"], model.emb["b"]]).to("meta")
    before = weights(model)
    model.to(device)
    model.emb["a"].to(device)
    assert_same(weights(model), before)


def test_all_move_together(gpu):
    model, other = trained_model("cpu"), trained_model("cpu")
    counted = model.emb["a"].stats()
    for there in ("cuda", "cpu", "cuda"):
        model.to(there)
        assert {str(table.tables.config.device.type) for table in model.emb.values()} == {torch.device(there).type}
    assert model.emb["a"].stats().lookups == counted.lookups
    assert_same(weights(model), weights(other))
    train(model, None, range(8, 12), "cuda")
    assert model.emb["a"].stats().lookups > counted.lookups


@pytest.mark.parametrize("make", [te.SGD, te.Adam])
def test_a_copy_of_one_has_its_rows_alone(device, make):
    model = trained_model(device, make)
    alone, before = copy.deepcopy(model.emb["a"]), weights(model)
    assert_same(alone.state_dict()["weight"], before["a"])
    assert alone.tables.whole is not pool_of_dict(model)
    written = np.flatnonzero(alone.tables.groups[0].cache.cold.state[:, -1])
    assert len(written) > 0
    assert written.max() < ROWS["a"]  # its keys come first
    ids = batch_of(3, device)[1] % ROWS["a"]
    for table in (alone, model.emb["a"]):
        table(ids).sum().backward()
    assert_same(alone.state_dict()["weight"], model.emb["a"].state_dict()["weight"])
    assert_same(weights(model)["b"], before["b"])


def pool_of_dict(model):
    return model.emb["a"].tables.whole


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("make", [te.SparseAdam, te.Adam])
def test_a_copy_of_the_model_shares_a_cache_of_its_own(device, make, way):
    model = trained_model(device, make)
    if way == "deepcopy":
        copied = copy.deepcopy(model)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        data = io.BytesIO()
        torch.save(model, data)
        data.seek(0)
        copied = torch.load(data, weights_only=False)
    pools = {id(table.tables.whole) for table in copied.emb.values()}
    assert len(pools) == 1
    assert pools != {id(pool_of_dict(model))}
    assert_same(weights(copied), weights(model))
    outs = [train(each, None, range(8, 16), device) for each in (model, copied)]
    assert_same(*outs)
    assert_same(weights(copied), weights(model))


def test_a_frozen_table_stays_while_others_train(device):
    model = trained_model(device)
    model.emb["b"].requires_grad_(False)
    before = weights(model)
    train(model, None, range(8, 14), device)
    after = weights(model)
    assert_same(after["b"], before["b"])
    assert not torch.equal(after["a"], before["a"])


def test_state_dicts_are_of_each_table(device):
    model, other = trained_model(device), trained_model(device)
    train(other, None, range(8, 14), device)
    before = weights(other)
    other.emb["c"].load_state_dict(model.emb["c"].state_dict())
    after = weights(other)
    assert_same(after["c"], weights(model)["c"])
    assert_same({name: after[name] for name in "abd"}, {name: before[name] for name in "abd"})
    other.load_state_dict(model.state_dict())
    assert_same(weights(other), weights(model))


@pytest.mark.parametrize("make", [te.SGD, te.Adam])
def test_a_checkpoint_is_of_all(device, tmp_path, make):
    model, other = trained_model(device, make), trained_model(device, make, capacity=1.0)
    model.emb["b"].save_checkpoint(tmp_path, extra={"epoch": 2})
    train(other, None, range(30, 34), device)
    assert other.emb["d"].load_checkpoint(tmp_path) == {"epoch": 2}
    assert_same(weights(other), weights(model))
    outs = [train(each, None, range(8, 16), device) for each in (model, other)]
    assert_same(*outs)


def test_a_file_is_of_all_and_opens_again(device, tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = Model().to(device)
        storage = te.File(str(tmp_path / "rows"), keep=True)
        te.replace_embedding_bags(model, capacity=0.2, optimizer=te.Adam(lr=0.1), storage=storage)
        return model

    model = make(0)
    train(model, None, range(6), device)
    expected = weights(model)
    assert [each.name for each in tmp_path.iterdir()] == ["rows"]
    model.emb["c"].close()
    with pytest.raises(StorageError, match="was closed"):
        model.emb["a"](torch.tensor([[1]], device=device))
    again = make(1)
    found = weights(again)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    again.emb["a"].close()


def test_tables_laid_out_later_follow_an_optimizer(device):
    torch.manual_seed(0)
    model = Model().to(device).eval()
    te.replace_embedding_bags(model, capacity=0.3)
    other = Model().to(device)
    other.load_state_dict(model.state_dict())
    optimizer, reference = (torch.optim.Adam(each.top.parameters(), lr=0.05) for each in (model, other))
    for name in "ab":
        model.emb[name].follow(optimizer)
        reference.add_param_group({"params": [other.emb[name].weight]})
    for name in "cd":
        for each in (model, other):
            each.emb[name].requires_grad_(False)
    train(model, optimizer, range(10), device)
    train(other, reference, range(10), device)
    for name, value in weights(model).items():
        torch.testing.assert_close(value.cpu(), other.emb[name].weight.detach().cpu(), rtol=1e-4, atol=1e-5)


# --- one among several ------------------------------------------------------------------------------------------------


def served(device):
    torch.manual_seed(0)
    model = Model().to(device).eval()
    return te.replace_embedding_bags(model, capacity=0.3)


@pytest.mark.parametrize("kinds", [(torch.optim.Adagrad, torch.optim.SGD), (torch.optim.SGD, torch.optim.Adagrad)])
def test_tables_that_share_rows_follow_no_optimizer_of_others(device, kinds):
    model = served(device)
    first, second = (kind(model.top.parameters(), lr=0.1) for kind in kinds)
    model.emb["a"].follow(first)
    before = weights(model)
    with pytest.raises(ConfigError, match="by a call of its own"):
        model.emb["b"].follow(second)
    assert_same(weights(model), before)
    assert model.emb["b"].engine.optimizer is None or not model.emb["b"].is_trainable
    model.emb["d"].follow(first)
    for name in "bc":
        model.emb[name].requires_grad_(False)
    train(model, first, range(4), device)


def test_tables_of_a_class_follow_an_optimizer_with_other_options(device):
    """Which lays the rows of all out anew once, also where the first one has taken a step when the next one follows."""
    torch.manual_seed(0)
    model = Model().to(device)
    te.replace_embedding_bags(model, capacity=0.3, optimizer=torch.optim.SGD)
    other = Model().to(device)
    other.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(each.top.parameters(), lr=0.05, momentum=0.9) for each in (model, other)]
    for name in "abcd":
        model.emb[name].follow(optimizers[0])
        optimizers[1].add_param_group({"params": [other.emb[name].weight]})
        assert model.emb[name].tables.config.optimizer.momentum == 0.9
        if name == "a":
            for each, optimizer in ((model, optimizers[0]), (other, optimizers[1])):
                optimizer.zero_grad()
                each("a", batch_of(0, device)[1]).square().mean().backward()
                optimizer.step()
    for each, optimizer in ((model, optimizers[0]), (other, optimizers[1])):
        train(each, optimizer, range(1, 8), device)
    for name, value in weights(model).items():
        torch.testing.assert_close(value.cpu(), other.emb[name].weight.detach().cpu(), rtol=1e-4, atol=1e-5)


def test_what_was_planned_ahead_in_any_of_them_is_given_up(device, tmp_path):
    model = trained_model(device)
    model.emb["a"].save_checkpoint(tmp_path)
    before = weights(model)
    batches = [batch_of(step, device)[1] % 9 for step in range(6)]
    loop = iter(te.prefetch(batches, model, 2, ids_of=lambda ids: {"emb.a": ids, "emb.b": ids}))
    next(loop)
    copied = copy.deepcopy(model)
    assert_same(weights(copied), before)
    next(loop)
    model.emb["b"].load_checkpoint(tmp_path)
    assert_same(weights(model), before)
    loop.close()


def test_a_gradient_that_waits_is_told_of_whichever_table_it_is(device, tmp_path):
    (model, optimizer), _ = models(device, make=lambda params: torch.optim.SGD(params, lr=0.1))
    model.emb["a"].save_checkpoint(tmp_path)
    model("a", batch_of(0, device)[1]).sum().backward()
    with pytest.raises(StorageError, match=r"while gradients wait for the optimizer's step\(\)"):
        model.emb["b"].load_checkpoint(tmp_path)
    optimizer.zero_grad()
    model.emb["b"].load_checkpoint(tmp_path)


def test_a_checkpoint_has_the_options_of_each_table(device, tmp_path):
    model, other = trained_model(device), trained_model(device)
    for name, lr in (("a", 0.01), ("b", 0.02)):
        model.emb[name].fused_optimizer.param_groups[0]["lr"] = lr
    model.emb["a"].save_checkpoint(tmp_path)
    other.emb["c"].load_checkpoint(tmp_path)
    rates = {name: table.fused_optimizer.param_groups[0]["lr"] for name, table in other.emb.items()}
    assert rates == {"a": 0.01, "b": 0.02, "c": 0.1, "d": 0.1}
    model.emb["a"].fused_optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ConfigError, match="lr"):
        model.emb["b"].save_checkpoint(tmp_path)


def test_what_a_gpu_finds_late_is_told_by_any_of_them(gpu):
    model = trained_model("cuda")
    model.emb["a"](torch.tensor([[ROWS["a"]]], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(IdOutOfRangeError, match=r"table 'emb\.a'"):
        model.emb["b"].flush()
    model.emb["a"](torch.tensor([[ROWS["a"]]], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(IdOutOfRangeError, match=r"table 'emb\.a'"):
        model.cpu()


def test_tables_that_are_looked_up_as_one_go_with_their_model():
    model = Rows(3, 20)
    te.replace_embedding_bags(model, capacity=0.5, optimizer=te.SGD(lr=0.1))
    pool, options = pool_of(model), model.emb[0].options
    context = context_of([(pool, (0, 2))], options)
    assert context_of([(pool, (0, 2))], options) is context
    assert [table.name for table in context.tables.config.tables] == ["emb.0", "emb.2"]
    assert context.tables.groups[0].cache is pool.groups[0].cache
    cache = weakref.ref(pool.groups[0].cache)
    gc.collect()
    gc.disable()
    try:
        del model, pool, context
        assert cache() is None
    finally:
        gc.enable()


def test_only_so_many_choices_of_tables_are_looked_up_as_one():
    model = Rows(8, 20)
    te.replace_embedding_bags(model, capacity=0.5, optimizer=te.SGD(lr=0.1))
    chosen = [tuple(t for t in range(8) if which >> t & 1) for which in range(3, 60)]
    made = [context_of([(pool_of(model), numbers)], model.emb[0].options) for numbers in chosen]
    assert [each is not None for each in made] == [True] * MOST_SELECTIONS + [False] * (len(made) - MOST_SELECTIONS)


@pytest.mark.parametrize("capacity", [0.2, 1.0])
def test_rows_that_a_flush_writes_count_for_their_table(device, capacity):
    model = Rows(3, 20).to(device)
    te.replace_embedding_bags(model, capacity=capacity, optimizer=te.SGD(lr=0.1))
    pool_of(model).flush()
    before = [table.stats() for table in model.emb]
    for at, table in enumerate(model.emb):
        table(torch.arange(3 * at).reshape(-1, 1)).sum().backward()
    pool_of(model).flush()
    written = [table.stats() - each for table, each in zip(model.emb, before, strict=True)]
    assert [each.rows_written_back for each in written] == [0, 3, 6]
    assert sum(each.bytes_written_back for each in written) == pool_of(model).stats().bytes_written_back - sum(
        each.bytes_written_back for each in before
    )


def test_many_sets_of_tables_keep_few_numbers(gpu):
    model = Rows(8, 20).to("cuda")
    te.replace_embedding_bags(model, capacity=0.5, optimizer=te.SGD(lr=0.1))
    ids = torch.tensor([[1, 2]], device="cuda")
    for chosen in range(1, 256):
        sum(table(ids) for t, table in enumerate(model.emb) if chosen >> t & 1).sum().backward()
    assert len(pool_of(model).groups[0]._numbers._last) <= 64
