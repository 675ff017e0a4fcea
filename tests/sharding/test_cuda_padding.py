"""Exchanges of one size on a GPU, by kernels, against the arithmetic of tensors. Skips without a GPU;
TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from devices import equal
from sharding.ranks import SHAPES
from sharding.test_padded_requests import BOUND, RANKS, gradients_of, messages_of, request_of

import tieredemb as te
from tieredemb.sharding.bags import parts_of
from tieredemb.sharding.device_padding import Joiner, Sender, pad_bags
from tieredemb.sharding.header import Bound
from tieredemb.sharding.layout import Layout
from tieredemb.sharding.padding import Padding, firsts_of, plain_ids, read, write_messages

pytestmark = pytest.mark.usefixtures("gpu")


SHARDINGS = ["rows", "tables", "copies", "every other", "one rank"]


@pytest.mark.parametrize("rows", [None, BOUND - 7])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("rank", "shape"), list(product(range(RANKS), SHAPES)))
def test_messages_are_joined_as_by_arithmetic(rank, shape, sharding, rows):
    """What lies behind the ids is in no bag, and has no part in anything."""
    with torch.device("cpu"):
        parts, received = messages_of(rank, sharding, shape, rows)
        known = request_of(parts, received, rank, rows=rows)
    on_gpu = torch.cat(received, 1).cuda().split([values.shape[1] for values in received], 1)
    its = request_of(parts, on_gpu, rank, device="cuda", rows=rows)
    count, length = len(known.batch.ids), len(its.batch.ids)
    assert length == RANKS * BOUND * len(parts)
    assert equal(its.batch.offsets.cpu(), known.batch.offsets)
    assert equal(its.batch.ids[:count].cpu(), known.batch.ids)
    for number in range(len(parts)):
        assert equal(its._entry(number)[:count].cpu(), known._entry(number))
        assert bool((its._entry(number)[count:] == RANKS * BOUND).all())
    mine, stack = its.batch.stack, known.batch.stack
    assert (mine.bags, mine.rows) == (stack.bags, stack.rows)
    assert equal(mine.row[:count].cpu(), stack.row)
    assert bool((mine.row[count:] >= stack.bags).all())  # of no bag
    assert bool((mine.row < stack.rows).all())
    for pooled, other in zip(mine.pooled, stack.pooled, strict=True):
        assert (pooled.rows, pooled.modes) == (other.rows, other.modes)
        assert equal(pooled.edges.cpu(), other.edges)
    assert equal(mine.picked[: len(stack.picked)].cpu(), stack.picked)
    assert bool((mine.picked <= max(0, count - 1)).all())
    weighed, of_device = [], []
    with torch.device("cpu"):
        grads = gradients_of(parts, rank, rows)
        for part, each in zip(parts, grads, strict=True):
            each += [] if part.is_table_wise else [torch.randn(RANKS * BOUND)]
        expected = known.gradient(SimpleNamespace(weigh=weighed.append), grads)
    given = [[values.cuda() for values in each] for each in grads]
    assert equal(its.gradient(SimpleNamespace(weigh=of_device.append), given).cpu(), expected)
    for of_known, each in zip(weighed, of_device, strict=True):
        assert equal(each[:count].cpu(), of_known)


SIZES = [(1, 1, 1), (1, 1, 500), (2, 26, 1000), (3, 2000, 900), (8, 5, 37), (40, 3, 64), (300, 40, 20)]
GIVEN = {  # how many ids of each feature are requested from each rank, and how many fit
    "no requests": ([[0, 0, 0], [0, 0, 0]], 9),
    "nothing fits": ([[0, 0], [0, 0]], 0),
    "one id": ([[0, 0], [0, 1]], 1),
    "full": ([[4, 5], [9, 0]], 9),
    "one has too many": ([[4, 5], [7, 8]], 9),
    "all have too many": ([[1000, 1000], [1000, 1000]], 9),
}


def row_wise(ranks, features):
    """A part of so many tables."""
    tables = [te.TableConfig(name=f"t{t}", num_embeddings=9, embedding_dim=4) for t in range(features)]
    (part,) = parts_of(Layout(tables, ranks), range(features), [4 * t for t in range(features)])
    return part


def joined(values, ranks, features, bound, rows):
    """What is joined of a single message from each rank."""
    joiner = Joiner([row_wise(ranks, features)], ranks, range(features), [], torch.device("cuda"))
    return joiner.join([values], 0, [Bound(bound, rows)])


def drawn(ranks, features, bound):
    """Counts of ids that fit, of some features none."""
    counts = torch.randint(2 * bound // features + 2, (ranks, features)) * (torch.rand(ranks, features) < 0.8)
    ends = torch.cumsum(counts, 1).clamp(max=bound)
    return torch.cat([ends[:, :1], ends.diff(dim=1)], 1)


def cases():
    torch.manual_seed(0)
    for size in SIZES:
        yield pytest.param(drawn(*size), size[-1], id=f"{size}")
    for name, (counts, bound) in GIVEN.items():
        yield pytest.param(torch.tensor(counts), bound, id=name)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(("counts", "bound"), list(cases()))
def test_messages_of_any_size_are_joined(counts, bound, once):
    """Where a row goes back `once`, ids that were requested before are inverted."""
    ranks, features, rows = *counts.shape, max(1, bound // 2) if once else None
    with torch.device("cpu"):
        torch.manual_seed(0)
        ids = torch.randint(1000, (ranks, bound))
        if once:
            ids = torch.where(torch.rand(ranks, bound) < 0.6, ids, ~ids)
        values = torch.cat([counts, ids], 1)
        received = read(values, features, bound, 0, 0)
        starts = torch.cumsum(received.counts, 1) - received.counts + torch.arange(ranks)[:, None] * bound
        spans = zip(starts.T.reshape(-1).tolist(), received.counts.T.reshape(-1).tolist(), strict=True)
        entries = torch.cat([torch.arange(start, start + count) for start, count in spans])
        destination = firsts_of(received.ids, received.counts.sum(1), rows)[entries] if once else entries
        picked = torch.zeros(ranks * (rows if once else bound) + 1, dtype=torch.int64)
        picked.index_copy_(0, destination, torch.arange(len(entries)))
        edges, n = torch.cat([torch.zeros(1, dtype=torch.int64), received.counts.sum(0).cumsum(0)]), len(entries)
    its = joined(values.cuda(), ranks, features, bound, rows)
    assert equal(its.edges.cpu(), edges)
    assert equal(its.joined[:n].cpu(), entries)
    assert equal(its.row[:n].cpu().long(), entries)
    assert bool((its.joined[n:] == ranks * bound).all())
    assert bool((its.row[n:] == ranks * bound - 1).all())
    assert equal(its.ids[:n].cpu(), plain_ids(received.ids)[entries])
    assert equal(its.picked.cpu(), picked[:-1])


def test_whatever_was_received_nothing_lies_beyond_a_block():
    for counts in ([-5, 3], [2**62, 2**62], [-(2**63), 2**63 - 1]):
        values = torch.tensor([[*counts, *range(9)]] * 2).cuda()
        its = joined(values, 2, 2, 9, 4)
        assert bool(((its.joined >= 0) & (its.joined <= 18) & (its.row >= 0) & (its.row < 18)).all())
        assert bool((its.edges.diff() >= 0).all())
        assert int(its.edges[-1]) <= 18


@pytest.mark.parametrize("homes", ["many", "none"])
@pytest.mark.parametrize(("counts", "bound"), list(cases()))
def test_bags_are_padded_as_by_arithmetic(counts, bound, homes):
    (ranks, features), rows = counts.shape, max(1, bound // 2)
    with torch.device("cpu"):
        torch.manual_seed(0)
        counts = torch.cat([counts, (counts * torch.rand(ranks, features)).ceil().long()], 1)
        requested, back = (int(its.sum()) for its in counts.split(features, 1))
        order, ids = torch.randperm(requested), torch.randint(-1000, 1000, (requested + 9,) if requested else (0,))
        its = torch.randint(-2, max(1, back), (requested + 9 if homes == "many" else 0,), dtype=torch.int32)
        of_ids, expected = Padding(counts[:, :features].sum(1), bound), its.clone()
        Padding(counts[:, features:].sum(1), rows).move(expected)
        beside = torch.full((ranks, 2 * features + 3), 77)  # of another part
        beside[:, 1 : 1 + 2 * features] = counts
        known = torch.full((ranks, features + bound + 2), 77)  # messages of other parts lie beside
        write_messages(known[:, 1:-1], counts[:, :features], of_ids.pad(ids))
    on_gpu, its = beside.cuda()[:, 1 : 1 + 2 * features], its.cuda()
    sender, none = Sender(row_wise(ranks, features), torch.device("cuda")), torch.zeros(1, dtype=torch.int64).cuda()
    found = torch.full_like(known, 77, device="cuda")
    padded = pad_bags(
        sender, on_gpu, order.cuda(), ids.cuda(), its, none, found[:, 1:-1], bound=Bound(bound, rows), batch=0,
        samples=0,
    )  # fmt: skip
    assert equal(padded.order.cpu(), of_ids.pad(order))
    assert equal(found.cpu(), known)
    assert equal(its.cpu(), expected)
