"""Exchanges of one size on a GPU, by kernels, against the arithmetic of tensors. Skips without a GPU;
TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from devices import equal
from sharding.ranks import SHAPES
from sharding.test_padded_requests import BOUND, RANKS, asked_of, taken

from tieredemb.sharding.device_padding import join_messages, pad_bags
from tieredemb.sharding.padding import Padding, each_asked, firsts_of, message, read

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize("rows", [None, BOUND - 7])
@pytest.mark.parametrize(("rank", "shape"), product(range(RANKS), SHAPES))
def test_messages_are_joined_as_by_arithmetic(rank, shape, rows):
    with torch.device("cpu"):
        parts, kinds, came = asked_of(rank, "rows", shape, rows)
        request = taken(parts, kinds, came, rank, knows_ends=False, by_entry=True, rows=rows)
    features, stack = len(parts[0].space.features), request.batch.stack
    its = join_messages(came[0].cuda(), ranks=RANKS, features=features, bound=BOUND, rows=rows)
    assert equal(its.edges.cpu(), request.batch.offsets)
    assert equal(its.ids.cpu(), request.batch.ids)
    assert equal(its.row.cpu(), stack.row)
    assert equal(its.picked.cpu(), stack.picked)
    assert equal(its.joined.cpu(), request._joined)
    assert equal(its.entry.cpu(), request._entry[0])


SIZES = [(1, 1, 1), (1, 1, 500), (2, 26, 1000), (3, 2000, 900), (8, 5, 37), (40, 3, 64), (300, 40, 20)]


def counted(ranks, features, bound, *, overfull=False):
    """How many ids of each feature each rank is asked for, at most `bound` in all or more, and how many rows."""
    counts = torch.randint(2 * bound // features + 2, (ranks, features)) * (torch.rand(ranks, features) < 0.8)
    if not overfull:
        counts = torch.cumsum(counts, 1).clamp(max=bound)
        counts = torch.cat([counts[:, :1], counts.diff(dim=1)], 1)
    return torch.cat([counts, (counts * torch.rand(ranks, features)).ceil().long()], 1)


@pytest.mark.parametrize("overfull", [False, True])
@pytest.mark.parametrize(("ranks", "features", "bound"), SIZES)
def test_messages_of_any_size_are_joined(ranks, features, bound, overfull):
    torch.manual_seed(0)
    counts, rows = counted(ranks, features, bound, overfull=overfull)[:, :features], max(1, bound // 2)
    ids = torch.randint(1000, (ranks, bound))
    values = torch.cat([counts, torch.where(torch.rand(ranks, bound) < 0.6, ids, ~ids)], 1).view(-1)
    its = join_messages(values.cuda(), ranks=ranks, features=features, bound=bound, rows=rows)
    came = read(values, features, bound, 0, [0] * ranks)
    starts = torch.cumsum(came.counts, 1) - came.counts + torch.arange(ranks)[:, None] * bound
    spans = zip(starts.T.reshape(-1).tolist(), came.counts.T.reshape(-1).tolist(), strict=True)
    entries = torch.cat([torch.arange(start, start + count) for start, count in spans])
    goes = firsts_of(came.ids, came.counts.sum(1), rows)[entries]
    picked = torch.zeros(ranks * rows + 1, dtype=torch.int64).index_copy_(0, goes, torch.arange(len(entries)))
    n = len(entries)
    assert equal(its.edges.cpu(), torch.cat([torch.zeros(1, dtype=torch.int64), came.counts.sum(0).cumsum(0)]))
    assert equal(its.entry[:n].cpu(), entries)
    assert equal(its.joined[:n].cpu(), entries)
    assert equal(its.row[:n].cpu().long(), entries)
    assert bool((its.entry[n:] == ranks * bound).all())
    assert bool((its.joined[n:] < ranks * bound).all())
    assert bool((its.row[n:] == ranks * bound - 1).all())
    assert equal(its.ids[:n].cpu(), each_asked(came.ids)[entries])
    assert equal(its.picked.cpu(), picked[:-1])


@pytest.mark.parametrize("overfull", [False, True])
@pytest.mark.parametrize(("ranks", "features", "bound"), [*SIZES, (2, 3, 0)])
def test_bags_are_padded_as_by_arithmetic(ranks, features, bound, overfull):
    torch.manual_seed(0)
    counts, rows = counted(ranks, features, bound, overfull=overfull), max(1, bound // 2)
    asked, back = (int(its.sum()) for its in counts.split(features, 1))
    order, ids = torch.randperm(asked), torch.randint(-1000, 1000, (asked + 9,) if asked else (0,))
    homes = torch.randint(-2, max(1, back), (asked + 9,), dtype=torch.int32)
    of_ids, expected = Padding(counts[:, :features].sum(1), bound), homes.clone()
    Padding(counts[:, features:].sum(1), rows).move(expected)
    stored = torch.zeros((ranks, 2 * features + 3), dtype=torch.int64, device="cuda")
    stored[:, 1 : 1 + 2 * features] = counts.cuda()  # beside those of another part
    on_gpu = homes.cuda()
    padded = pad_bags(
        stored[:, 1 : 1 + 2 * features], features, order.cuda(), ids.cuda(), on_gpu, bound=bound, rows=rows
    )
    assert equal(padded.order.cpu(), of_ids.pad(order))
    assert equal(padded.values.cpu(), message(counts[:, :features], of_ids.pad(ids)).values)
    assert equal(on_gpu.cpu(), expected)
