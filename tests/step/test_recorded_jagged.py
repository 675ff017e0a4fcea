"""Batches of any number of ids: their plans are recorded for about as many, and replayed with the numbers of plans that
are launched each time. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import pytest
import torch
from devices import assert_same_bits
from step.recordings import ROWS, both
from torch import nn
from training import bits

import tieredemb as te
from tieredemb.errors import IdOutOfRangeError, InvalidInputError

pytestmark = pytest.mark.usefixtures("gpu", "recorded")

BATCHES, SAMPLES = 24, 6
CAPACITIES = [1, 40, 1.0]


def bags_of(seed, features=1, *, rows=ROWS, longest=30, last=False):
    """Ids of features, (N,), and offsets; of each sample 0 to `longest` ids. `last`: with the end of the last bag."""
    random = torch.Generator("cpu").manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (features * SAMPLES,), generator=random, device="cpu")
    ids = torch.randint(rows, (int(lengths.sum()),), generator=random, device="cpu")
    edges = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lengths.cumsum(0)])
    return ids.cuda(), (edges if last else edges[:-1]).cuda()


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("given", ["offsets", "last offset", "int32", "padding"])
def test_one_table(monkeypatch, replays, capacity, mode, given):
    def run():
        last = given == "last offset"
        bag = te.TieredEmbeddingBag(
            ROWS, 8, mode=mode, capacity=capacity, optimizer=te.Adagrad(lr=0.1), seed=3, include_last_offset=last,
            padding_idx=3 if given == "padding" else None,
        )  # fmt: skip
        outputs = []
        for step in range(BATCHES):
            ids, offsets = bags_of(step, last=last)
            out = bag(ids.int(), offsets.int()) if given == "int32" else bag(ids, offsets)
            out.square().sum().backward()
            outputs.append(out.detach())
        assert bag.stats().lookups == sum(len(bags_of(step)[0]) for step in range(BATCHES)) or given == "padding"
        return [*outputs, *bits(bag)]

    assert both(monkeypatch, replays, run) >= BATCHES - 6


@pytest.mark.parametrize("optimizer", [te.Adagrad(lr=0.1), te.Adam(lr=0.01), te.RowWiseAdagrad(lr=0.1)])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("capacity", [2, 0.3, 1.0])
def test_a_collection_of_several_widths(monkeypatch, replays, capacity, depth, optimizer):
    tables = [
        te.TableConfig(name=f"t{at}", num_embeddings=rows, embedding_dim=width, mode=mode)
        for at, (rows, width, mode) in enumerate([(ROWS, 8, "sum"), (50, 16, "mean"), (120, 8, "mean"), (9, 4, "sum")])
    ]

    def run():
        model = te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=optimizer, seed=1)
        batches = [bags_of(step, len(tables), rows=9, last=True) for step in range(BATCHES)]
        outputs = []
        for ids, offsets in te.prefetch(batches, model, depth) if depth else batches:
            out = model(ids, offsets)
            out.square().sum().backward()
            outputs.append(out.detach())
        return [*outputs, *bits(model)]

    assert both(monkeypatch, replays, run) > 0


def trained(model, optimizer, batches):
    """The outputs of a step with each batch, and the model's state after them."""
    outputs = []
    for batch in batches:
        out = model(batch)
        optimizer.zero_grad()
        out.square().sum().backward()
        optimizer.step()
        outputs.append(out.detach())
    return [*outputs, *model.state_dict().values()]


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("widths", [(8, 8, 8), (8, 16, 8)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_converted_tables(monkeypatch, replays, widths, kind, prefetch):
    sizes = (ROWS, 50, 120)

    def run():
        torch.manual_seed(0)
        given = zip(sizes, widths, (None, 7, None), strict=True)
        model = Each(nn.EmbeddingBag(rows, width, mode="sum", padding_idx=padding) for rows, width, padding in given)
        optimizer = kind(model.cuda().parameters(), lr=0.1)
        te.replace_embedding_bags(model, capacity=0.3, optimizer=optimizer)
        batches = [[bags_of(3 * step + at, rows=rows) for at, rows in enumerate(sizes)] for step in range(BATCHES)]
        return trained(model, optimizer, te.prefetch(batches, model) if prefetch else batches)

    assert both(monkeypatch, replays, run) > BATCHES // 3


class Each(nn.Module):
    """The bags of each table, side by side."""

    def __init__(self, tables):
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, batch):
        return torch.cat([table(*given) for table, given in zip(self.tables, batch, strict=True)], 1)


@pytest.mark.parametrize("optimizer", [te.SGD(lr=0.1), te.Adam(lr=0.01)])
@pytest.mark.parametrize("kind", ["constant", "with gradient", "frozen rows"])
@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_weights_of_samples(monkeypatch, replays, ahead, tables, kind, optimizer):
    """They come with the forward, which a plan that is made ahead does not know, and one backward reaches several, each
    with room for more ids than it has."""
    configs = [
        te.TableConfig(name=f"t{at}", num_embeddings=rows, embedding_dim=8) for at, rows in enumerate((ROWS, 50, 9))
    ]

    def run():
        model = te.TieredEmbeddingBagCollection(configs[:tables], capacity=40, optimizer=optimizer, seed=1)
        model.requires_grad_(kind != "frozen rows")
        random, found, waiting = torch.Generator("cpu").manual_seed(0), [], []
        batches = [bags_of(step, tables, rows=9, last=True) for step in range(2 * BATCHES)]
        for number, (ids, offsets) in enumerate(te.prefetch(batches, model) if ahead else batches):
            weights = torch.rand(len(ids), generator=random, device="cpu").cuda()
            weights.requires_grad_(kind != "constant")
            waiting.append((weights, model(ids, offsets, weights)))
            found.append(waiting[-1][1].detach().clone())
            if number % 3 == 2:
                sum(out.square().sum() for _, out in waiting).backward()
                found += [weights.grad for weights, _ in waiting if weights.grad is not None]
                waiting = []
        waiting = []
        return [*found, *bits(model)]

    assert both(monkeypatch, replays, run) > 0


@pytest.mark.parametrize("fault", ["id", "offset", "end"])
def test_faults_are_reported_in_terms_of_their_batch(replays, fault):
    bag = te.TieredEmbeddingBag(
        ROWS, 8, mode="sum", capacity=40, optimizer=te.SGD(lr=0.1), include_last_offset=fault == "end"
    )
    for step in range(BATCHES):
        bag(*bags_of(step, last=fault == "end")).sum().backward()
    before, count = bits(bag), len(replays)
    ids, offsets = bags_of(99, last=fault == "end")
    ids, offsets = ids.clone(), offsets.clone()
    if fault == "id":
        ids[-1] = ROWS
        error, message = IdOutOfRangeError, f"id {ROWS} at position {len(ids) - 1}"
    else:
        at = 2 if fault == "offset" else SAMPLES
        offsets[at] = len(ids) + 1
        error, message = InvalidInputError, "offsets"
    bag(ids, offsets).sum().backward()
    assert len(replays) == count + 1
    with pytest.raises(error, match=message):
        bag.flush()
    assert_same_bits(bits(bag), before)


def test_none_one_and_many_ids_in_turn(monkeypatch, replays):
    def run():
        bag = te.TieredEmbeddingBag(10**5, 8, mode="sum", capacity=64, optimizer=te.SGD(lr=0.1), seed=2)
        outputs = []
        for step, longest in enumerate([0, 1, 200, 3, 1] * 8):
            out = bag(*bags_of(step, rows=10**5, longest=longest))
            out.square().sum().backward()
            outputs.append(out.detach())
            if step % 6 == 5:
                with torch.no_grad():
                    outputs.append(bag(*bags_of(1000 + step, rows=10**5)))
        return [*outputs, *bits(bag)]

    assert both(monkeypatch, replays, run) > 0


@pytest.mark.parametrize("prefetch", [False, True])
def test_converted_tables_of_very_different_numbers_of_ids(monkeypatch, replays, prefetch):
    """Each of three pools has other counts each time: their plans are of a few capacities all the same."""
    sizes, widths = (ROWS, 50, 120), (8, 16, 32)

    def run():
        torch.manual_seed(0)
        given = zip(sizes, widths, strict=True)
        model = Each(nn.EmbeddingBag(rows, width, mode="sum") for rows, width in given)
        optimizer = torch.optim.Adagrad(model.cuda().parameters(), lr=0.1)
        te.replace_embedding_bags(model, capacity=0.5, optimizer=optimizer)
        batches = [
            [bags_of(3 * step + at, rows=rows, longest=400) for at, rows in enumerate(sizes)]
            for step in range(3 * BATCHES)
        ]
        return trained(model, optimizer, te.prefetch(batches, model) if prefetch else batches)

    # while a loop tries the other way, its plans are of other forms
    assert both(monkeypatch, replays, run) > (BATCHES // 2 if prefetch else BATCHES)


def single_ids_of(step, length=None):
    """Ids of any number, (N,), or of bags of one `length`, (B, length)."""
    random = torch.Generator("cpu").manual_seed(step)
    count = int(torch.randint(1, 60, (), generator=random, device="cpu"))
    shape = (count,) if length is None else (count, length)
    skewed = torch.rand(shape, generator=random, device="cpu") ** 3 * ROWS
    return skewed.long().cuda()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("optimizer", [te.Adagrad(lr=0.1), te.Adam(lr=0.01, weight_decay=0.1)])
def test_rows_of_any_number_of_ids(monkeypatch, replays, capacity, optimizer, depth):
    """Each id is a sample of its own, for which a plan has room too."""

    def run():
        model = te.TieredEmbedding(ROWS, 8, capacity=capacity, optimizer=optimizer, seed=3, padding_idx=5)
        outputs = []
        batches = [single_ids_of(step) for step in range(BATCHES)]
        for number, ids in enumerate(te.prefetch(batches, model, depth) if depth else batches):
            out = model(ids)
            if number % 4 == 3:  # and two forwards of one backward, of other numbers of samples
                out = torch.cat([out, model(single_ids_of(100 + number))])
            out.mul_(1.5)  # it is nobody's view
            out.square().sum().backward()
            with torch.no_grad():
                outputs += [out.detach().clone(), model(single_ids_of(200 + number))]
        return [*outputs, *bits(model)]

    # where some batches find slots for all ids, and none would for all that there is room for, these have no room
    assert both(monkeypatch, replays, run) > (0 if capacity == 40 else BATCHES // 2)


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_any_number_of_bags_of_one_length(monkeypatch, replays, mode, weighted):
    def run():
        bag = te.TieredEmbeddingBag(ROWS, 8, mode=mode, capacity=40, optimizer=te.Adagrad(lr=0.1), seed=3)
        found = []
        for step in range(2 * BATCHES):
            total, kept = 0, []
            for part in range(1 + step % 2):
                ids = single_ids_of(2 * step + part, 1 + step % 3)
                weights = torch.rand(ids.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
                given = {"per_sample_weights": weights.requires_grad_()} if weighted else {}
                out = bag(ids, **given)
                kept.append(weights)
                found.append(out.detach().clone())
                total = total + out.square().sum()
            total.backward()
            found += [weights.grad for weights in kept if weighted]
        return [*found, *bits(bag)]

    assert both(monkeypatch, replays, run) > BATCHES // 2


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.SparseAdam])
def test_converted_sequences(monkeypatch, replays, kind):
    """Tables that are looked up by sequences as long as a batch's longest, clipped, and updated together."""

    def run():
        torch.manual_seed(0)
        tables = [nn.Embedding(rows, 8, sparse=kind is torch.optim.SparseAdam) for rows in (ROWS, 50)]
        model = Sequences(tables).cuda()
        optimizer = kind(model.parameters(), lr=0.1)
        te.replace_embedding_bags(model, capacity=0.3, optimizer=optimizer)
        outputs = []
        for step in range(BATCHES):
            optimizer.zero_grad()
            out = model(single_ids_of(step, 1 + step % 5), single_ids_of(50 + step) % 50)
            out.square().sum().backward()
            if kind is not torch.optim.SparseAdam:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            outputs.append(out.detach().clone())
        return [*outputs, *model.state_dict().values()]

    assert both(monkeypatch, replays, run) > 0


class Sequences(nn.Module):
    """The mean of each of two sequences, side by side."""

    def __init__(self, tables):
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, *ids):
        return torch.cat([table(its).reshape(-1, 8).mean(0) for table, its in zip(self.tables, ids, strict=True)])


@pytest.mark.parametrize("length", [None, 3])
def test_faults_beyond_room_are_those_of_the_batch(replays, length):
    model = te.TieredEmbedding(ROWS, 8, capacity=290, optimizer=te.SGD(lr=0.1))
    for step in range(BATCHES):
        model(single_ids_of(step, length)).sum().backward()
    before, count = bits(model), len(replays)
    ids = single_ids_of(7, length)
    ids.view(-1)[-1] = ROWS
    model(ids).sum().backward()
    assert len(replays) == count + 1
    with pytest.raises(IdOutOfRangeError, match=f"id {ROWS} at position {ids.numel() - 1}"):
        model.flush()
    assert_same_bits(bits(model), before)
