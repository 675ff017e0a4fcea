"""The CUDA kernels one by one on a GPU, against torch and sorts. Skips without one; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from devices import require_gpu
from training import OPTIMIZERS, name_of

import tieredemb as te
from tieredemb.cache.device.cache import DeviceCache
from tieredemb.cache.device.plan import OverflowRows
from tieredemb.config import LFU, LRU, Uniform
from tieredemb.kernels.compiler import OPTIONS, Kernel, blocks_for, options
from tieredemb.kernels.constants import CHUNK, DROPPED
from tieredemb.kernels.row_format import RowFormat
from tieredemb.kernels.source import read
from tieredemb.kernels.spread import RowSpread
from tieredemb.lookup import homes_sort
from tieredemb.lookup.bags import rows_space
from tieredemb.lookup.device_bags import DeviceKeySpace
from tieredemb.lookup.device_lookup import DeviceLookup
from tieredemb.lookup.optimizer import named_numbers, recipe_file, recipe_flags, state_width
from tieredemb.lookup.rounding import no_draws
from tieredemb.storage.base import RowLayout
from tieredemb.storage.initial import InitialRows, InitialTable
from tieredemb.storage.unified import UnifiedMemory

FLOAT = options(torch.float32, 12)
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def gpu():
    require_gpu()
    torch.manual_seed(0)


def zeros(*shape, dtype=torch.int32):
    return torch.zeros(*shape, dtype=dtype, device=GPU)


def count(n):
    return torch.tensor([n], dtype=torch.int32, device=GPU)


# --- slot map ---------------------------------------------------------------------------------------------------------


class DeviceMap:
    def __init__(self, slots):
        self.n = max(2, 2 * slots)
        self.cells = zeros(self.n, 2, dtype=torch.int64)
        self._find = Kernel("hash/slot_map.cu", "slot_map_find")
        self._insert = Kernel("hash/slot_map.cu", "slot_map_insert")
        self._erase = Kernel("hash/slot_map.cu", "slot_map_erase")
        self._rebuild = Kernel("hash/slot_map.cu", "slot_map_rebuild")
        self.tombstones = zeros(1)

    def find(self, keys):
        slots = zeros(len(keys))
        self._find(blocks_for(len(keys), 256), 256, self.cells, self.n, keys, len(keys), slots)
        return slots

    def insert(self, keys, slots):
        self._insert(blocks_for(len(keys), 256), 256, self.cells, self.n, keys, slots, count(len(keys)))

    def erase(self, keys):
        self._erase(blocks_for(len(keys), 256), 256, self.cells, self.n, keys, count(len(keys)), self.tombstones)

    def rebuild(self, slot_keys):
        self.cells.zero_()
        self._rebuild(blocks_for(len(slot_keys), 256), 256, self.cells, self.n, slot_keys, len(slot_keys))


@pytest.mark.parametrize("slots", [1, 33, 100_000])
def test_slot_map_agrees_with_the_host_over_inserts_erases_and_a_rebuild(slots):
    index = DeviceMap(slots)
    keys = torch.randperm(3 * slots + 7, device=GPU)[:slots].contiguous()
    homes = torch.arange(slots, dtype=torch.int32, device=GPU)
    index.insert(keys, homes)
    everything = torch.arange(-2, 3 * slots + 7, device=GPU)
    expected = torch.full((len(everything),), -1, dtype=torch.int32, device=GPU)
    expected[keys + 2] = homes
    assert torch.equal(index.find(everything), expected)
    gone = keys[: slots // 2].contiguous()
    index.erase(gone)
    expected[gone + 2] = -1
    assert torch.equal(index.find(everything), expected)
    assert index.tombstones.item() == len(gone)
    index.insert(gone, homes[: len(gone)].contiguous())  # into tombstones
    expected[gone + 2] = homes[: len(gone)]
    assert torch.equal(index.find(everything), expected)
    index.rebuild(keys)
    assert torch.equal(index.find(everything), expected)


def test_slot_map_takes_a_duplicate_once():
    index = DeviceMap(1000)
    keys = torch.randint(0, 300, (5000,), device=GPU)
    index.insert(keys, torch.arange(5000, dtype=torch.int32, device=GPU))
    assert (index.cells[:, 0] != 0).sum() == len(torch.unique(keys))
    assert torch.equal(keys[index.find(keys).long()], keys)


# --- victims ----------------------------------------------------------------------------------------------------------


def choose_victims(score, last, needed, *, batch, oldest, unit=1024.0, now=None, in_parts=0):
    slots = len(score)
    selection, victims, counts = zeros(read("cache/policy.cu").layout("Selection").size // 4), zeros(slots), zeros(28)
    counts[0], counts[2] = needed, slots  # missed, used
    clock = torch.tensor([batch, batch, batch if now is None else now, (oldest << 32) | batch], device=GPU)
    select = Kernel("cache/policy.cu", "victims_select", options(), cooperative=True)
    select(16, 1024, selection, counts, clock, score, last, slots, unit, 1, in_parts, victims)
    assert counts[1].item() == needed
    return victims[: selection[0].item()].long()


@pytest.mark.parametrize("kind", ["aged", "counts", "wide", "equal"])
@pytest.mark.parametrize(
    ("slots", "needed"), [(1, 1), (7, 3), (4099, 1000), (300_000, 12_345), (5000, 5000), (5000, 0)]
)
def test_victims_are_the_lowest_unlocked_rows(slots, needed, kind):
    uniform = torch.rand(slots, device=GPU)
    score = {
        "aged": 700 + 200 * uniform,
        "counts": (1 / uniform).clamp(max=1e6) + 1,
        "wide": uniform * 2.0**31,
        "equal": torch.full_like(uniform, 5),
    }[kind].int()
    score[torch.rand(slots, device=GPU) < 0.05] = 0  # no row
    last = torch.randint(1, 300, (slots,), device=GPU, dtype=torch.int32)
    now = 2**32 - 1 if kind == "wide" else 1000
    victims = choose_victims(
        score, last, needed, batch=300, oldest=290, now=now, unit=2.0**31 if kind == "counts" else 1024
    )
    free = (score != 0) & (last < 290)
    rank = torch.where(free, (score.long() << 32) | last.long(), 2**63 - 1)
    expected = torch.sort(rank).values[: min(needed, int(free.sum()))]
    assert len(torch.unique(victims)) == len(victims) == len(expected)
    assert torch.equal(torch.sort(rank[victims]).values, expected)


@pytest.mark.parametrize(
    ("needed", "batch", "first", "size"),
    [
        (100, 300, 0, 2**18),
        (100, 301, 2**18, 2**18),
        (100, 302, 600_001 - 2**18 - 1, 2**18),  # the last part begins where it is a whole one, at a multiple of 4
        (10_000, 301, 600_001 - 320_000 - 1, 320_000),
        (30_000, 301, 0, 600_001),
    ],
)
def test_victims_are_the_lowest_of_a_part(needed, batch, first, size):
    slots = 600_001
    score = (700 + 2e6 * torch.rand(slots, device=GPU)).int()
    last = torch.randint(1, 290, (slots,), device=GPU, dtype=torch.int32)
    victims = choose_victims(score, last, needed, batch=batch, oldest=290, now=2**22, in_parts=1)
    rank = (score.long() << 32) | last.long()
    expected = first + torch.sort(rank[first : first + size]).indices[:needed]
    assert torch.equal(torch.sort(rank[victims]).values, rank[expected])
    assert len(torch.unique(victims)) == needed
    assert (victims.min() >= first) & (victims.max() < first + size)


# --- plan and swap ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LFU(), LFU(half_life_batches=math.inf), LRU(), LFU(remember_evicted=False)])
@pytest.mark.parametrize("slots", [700, 2500, 9000])
def test_plan_and_swap_keep_every_row_exact(slots, policy):
    """Rows are counted up where a ticket says they are: in slots, and away from them."""
    rows, n, width = 9000, 1664, 12
    cold = UnifiedMemory().open(RowLayout(rows=rows, width=width, state_width=1), name="", identity={})
    table = InitialTable(start=0, number=0, init=Uniform(low=0.0, high=0.0), padding_idx=None)
    device = torch.device("cuda", torch.cuda.current_device())
    initial = InitialRows([table], seed=0, state_value=0.0, device=device)
    cache = DeviceCache(cold, slots=slots, policy=policy, initial=initial, device=device)
    expected, lookups = torch.zeros(rows, device=GPU), 0
    for _ in range(40):
        keys = (torch.rand(n, device=GPU) ** 3 * rows).long()
        keys[::97] = -1
        real = keys >= 0
        lookups += int(real.sum())
        homes = torch.where(real, -1, -(2**31)).int()
        ticket = cache.plan(keys, homes)
        homes = ticket.homes.long()
        assert (homes[~real] == -(2**31)).all()
        hot = homes >= 0
        assert torch.equal(cache.hot.key[homes[hot]], keys[hot])
        assert torch.equal(cache.hot.weight[homes[hot]], expected[keys[hot]][:, None].expand(-1, width))
        away = ~hot & real
        if slots > n:
            assert not away.any()
        records = cache.overflow([ticket]).records[-2 - homes[away], 0]
        assert torch.equal(records - 1, keys[away])
        used = torch.unique(homes[hot])
        cache.hot.weight[used] += 1
        cache.hot.state[used] += 1
        cache.hot.dirty[used] = 1
        torch.cuda.synchronize()
        where = torch.unique(keys[away]).cpu().numpy()
        assert np.array_equal(cold.weight[where, 0], expected[torch.from_numpy(where).to(GPU)].cpu().numpy())
        cold.weight[where] += 1
        cold.state[where, 0] = (cold.state[where, 0].view(np.float32) + 1).view(np.uint32)
        expected[torch.unique(keys[real])] += 1
        ticket.release()
    cache.flush()
    assert np.array_equal(cold.weight[:, 0], expected.cpu().numpy())
    assert np.array_equal(cold.state[:, 0].view(np.float32), expected.cpu().numpy())
    assert cache.stats().lookups == lookups
    assert (cache.stats().rows_overflow > 0) == (slots == 700)


# --- lookup and update ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 6, 64, 100, 128, 300])
@pytest.mark.parametrize(("at_once", "most_ids"), [(4, 6), (1, 13)], ids=["short bags", "long bags"])
def test_pooled_lookup_equals_torch(at_once, most_ids, width, dtype):
    """Several bags at a time, or several ids of one."""
    tables, batch, rows = 3, 37, 500
    weight = torch.randn(rows, width, device=GPU).to(dtype)
    sizes = torch.randint(0, most_ids + 1, (tables * batch,), device=GPU)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=GPU), sizes.cumsum(0)])
    homes = torch.randint(0, rows, (int(sizes.sum()),), device=GPU, dtype=torch.int32)
    mode = torch.tensor([0, 1, 2], dtype=torch.int32, device=GPU)
    column = torch.arange(tables, device=GPU) * width
    out = torch.full((batch, tables * width), math.nan, device=GPU, dtype=dtype)
    argmax = torch.zeros(batch, tables * width, dtype=torch.int32, device=GPU)
    lanes = 32
    groups = tables * -(-batch // at_once)
    flags = (*options(dtype, width), "-DHAS_MAX", f"-DBAGS={at_once}")
    Kernel("lookup/embedding_bag.cu", "bags_pool", flags)(
        blocks_for(groups * lanes, 256), 256, weight, 0, 0, homes, offsets, batch, batch, tables * batch, mode, column,
        0, 0, out, tables * width, argmax,
    )  # fmt: skip
    for t, name in enumerate(("sum", "mean", "max")):
        edges = offsets[t * batch : (t + 1) * batch + 1]
        ids = homes[edges[0] : edges[-1]].long()
        expected = torch.nn.functional.embedding_bag(
            ids, weight.float(), edges - edges[0], mode=name, include_last_offset=True
        )
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        got = out[:, t * width : (t + 1) * width].float()
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    winners = argmax[:, 2 * width :].long()
    filled = sizes[2 * batch :] > 0
    picked = weight[homes[winners[filled]].long(), torch.arange(width, device=GPU)]
    assert torch.equal(picked, out[filled, 2 * width :])


@pytest.mark.parametrize("uncached", [False, True])
@pytest.mark.parametrize("each", [0, 1, 5000])
@pytest.mark.parametrize(("width", "dtype"), [(128, torch.float32), (6, torch.float16), (300, torch.bfloat16)])
def test_rows_go_to_each_rank(width, dtype, each, uncached):
    """As they are gathered, each behind the first rows of its memory; nothing else is written."""
    ranks, first, slots = 3, 2, 700
    away = torch.randn(100, width, device=GPU).to(dtype)
    weight = torch.randn(slots, width, device=GPU).to(dtype)
    hot = SimpleNamespace(weight=weight, state=zeros(slots, 0), dirty=zeros(slots))
    overflow = OverflowRows(uncached=False, weight=0, state=0, records=None)
    homes = torch.randint(0, slots, (ranks * each,), device=GPU, dtype=torch.int32)
    if uncached:
        records = zeros(20, 2, dtype=torch.int64)
        records[:, 0] = torch.randint(1, 101, (20,), device=GPU)  # a key + 1
        overflow = OverflowRows(uncached=True, weight=away.data_ptr(), state=0, records=records)
        homes[::4] = -2 - torch.randint(0, 20, homes[::4].shape, device=GPU, dtype=torch.int32)
    homes[::7] = DROPPED
    space = DeviceKeySpace(rows_space(width, "sum"), [-1], GPU)
    lookup = DeviceLookup(space, RowFormat(width=width, dtype=dtype), None)
    memory = [torch.full((first + each + 1, width), math.nan, device=GPU, dtype=dtype) for _ in range(ranks)]
    begins = torch.tensor([its.data_ptr() for its in memory], device=GPU)
    picked = torch.randperm(ranks * each, device=GPU)
    lookup.spread(hot, overflow, homes, picked, RowSpread(begins, each, first))
    rows_of_all = lookup.gather(hot, overflow, homes)[picked]
    assert torch.equal(
        lookup.gather(hot, overflow, homes, picked=picked).view(torch.uint8), rows_of_all.view(torch.uint8)
    )
    expected = rows_of_all.split(each) if each else [weight[:0]] * ranks
    for its, rows in zip(memory, expected, strict=True):
        assert torch.equal(its[first : first + each].view(torch.uint8), rows.view(torch.uint8))
        assert its[:first].isnan().all()
        assert its[first + each :].isnan().all()


def sorted_here(homes, bag):
    n = len(homes)
    notes, room = zeros(homes_sort.note_words(n)), torch.empty(n, 4, dtype=torch.int32, device=GPU)
    found = [torch.full((n,), -7, dtype=torch.int32, device=GPU) for _ in range(3)]
    homes_sort.sort_homes(homes, bag, notes.data_ptr(), room, *found)
    return found


@pytest.mark.parametrize("n", [1, 31, 2047, 2048, 2049, 53_248, 212_993, homes_sort.SHORT, homes_sort.SHORT + 1])
@pytest.mark.parametrize("homes", ["one", "few", "a table", "any"])
def test_homes_are_sorted_as_torch_does(homes, n):
    most = {"one": 1, "few": 3, "a table": 2_000_000, "any": 2**31 - 1}[homes]
    given = torch.randint(0, most, (n,), dtype=torch.int32, device=GPU)
    chance = torch.rand(n, device=GPU)
    given[chance < 0.1] = -2 - torch.randint(0, 50, (n,), dtype=torch.int32, device=GPU)[chance < 0.1]
    given[chance > 0.9] = DROPPED
    given[-1:] = 2**31 - 1
    bag = torch.randint(0, 2**31 - 1, (n,), dtype=torch.int32, device=GPU)
    expected = torch.sort(given, stable=True)
    for _ in range(3):
        ordered, order, bags = sorted_here(given, bag)
        assert torch.equal(ordered, expected.values)
        assert torch.equal(order.long(), expected.indices)
        assert torch.equal(bags, bag[expected.indices])


@pytest.mark.parametrize("width", [1, 12, 64, 128])
@pytest.mark.parametrize("optimizer", [each for each in OPTIMIZERS if not each.is_dense], ids=name_of)
def test_update_equals_the_formula_and_repeats_its_bits(optimizer, width):
    batch, tables, rows = 7000, 2, 700
    words = state_width(optimizer, width)
    n = batch * tables
    bag = torch.arange(n, dtype=torch.int32, device=GPU)
    own = rows // tables  # rows of a table; its first one has some 2,600 occurrences, in 41 chunks
    homes = (torch.rand(n, device=GPU) ** 6 * own).int() + bag // batch * own
    grad = torch.randn(batch, tables * width, device=GPU)
    column = torch.arange(tables, device=GPU) * width
    rate = torch.tensor([0.1, 0.1], device=GPU)
    hyper = named_numbers(type(optimizer), asdict(optimizer))
    numbers = torch.tensor([*optimizer.numbers(hyper).values(), 0.5], device=GPU)
    before = torch.randn(rows, width, device=GPU)
    flags = (*OPTIONS, *RowFormat(width=width, state_width=words).flags, *recipe_flags(optimizer))

    def kernel(name):
        return Kernel(recipe_file(optimizer), name, flags)

    def run():
        weight, state = before.clone(), torch.full((rows, words), 0.25, device=GPU)
        dirty, work = zeros(rows, dtype=torch.uint8), zeros(4)
        ordered = torch.sort(homes, stable=True)
        order = ordered.indices.int()
        bags, items, longs = bag[ordered.indices], zeros(n, 4), zeros(n // CHUNK + 1, 4)
        parts = torch.empty(2 * (n // CHUNK + 1), width, device=GPU)
        kernel("segments_find")(
            blocks_for(n, 256), 256, ordered.values, n, bags, batch, work, items, longs
        )  # fmt: skip
        kernel("segments_update")(
            64, 256, work, items, n, bags, batch, column, grad, 0, 0, tables * width, 0, order, 0, 0, weight, state,
            0, 0, 0, dirty, rate, numbers, 0, parts, 0, 0, no_draws(recipe_file(optimizer)),
        )  # fmt: skip
        kernel("long_segments_update")(
            8, 256, work, longs, parts, weight, state, 0, 0, 0, dirty, rate, numbers, 0, 0, 0,
            no_draws(recipe_file(optimizer)),
        )  # fmt: skip
        return weight, state, dirty

    weight, state, dirty = run()
    for again in (run(), run()):
        assert torch.equal(again[0], weight)
        assert torch.equal(again[1], state)
    per_bag = grad.view(batch, tables, width).permute(1, 0, 2).reshape(n, width).double()
    g = torch.zeros(rows, width, dtype=torch.double, device=GPU).index_add_(0, homes.long(), per_bag) * 0.5
    used = torch.bincount(homes.long(), minlength=rows) > 0
    assert torch.equal(dirty.bool(), used)
    old = torch.full_like(g, 0.25)
    if isinstance(optimizer, te.SGD):
        step = g
    elif isinstance(optimizer, te.Adagrad):
        step = g / ((old + g * g).sqrt() + optimizer.eps)
    elif isinstance(optimizer, te.RowMeanAdagrad):
        mean = g.mean(1, keepdim=True)
        step = (mean / ((old[:, :1] + mean * mean).sqrt() + optimizer.eps)).expand_as(g)
    elif isinstance(optimizer, te.RowWiseAdagrad):
        step = g / ((old[:, :1] + (g * g).mean(1, keepdim=True)).sqrt() + optimizer.eps)
    elif isinstance(optimizer, te.SparseLion):
        beta1, beta2 = optimizer.betas
        c = beta1 * old + (1 - beta1) * g
        step = torch.where(c.abs() > 1e-5, c.sign(), (before.double() - weight.double()) / 0.1)  # what rounding decides
        step = step + optimizer.weight_decay * before.double() * (c.abs() > 1e-5)
        torch.testing.assert_close(state[used], (beta2 * old + (1 - beta2) * g)[used].float(), rtol=1e-4, atol=1e-4)
    else:
        beta1, beta2 = optimizer.betas
        step = (old + (g - old) * (1 - beta1)) / ((old + (g * g - old) * (1 - beta2)).sqrt() + optimizer.eps)
    expected = torch.where(used[:, None], before.double() - 0.1 * step, before.double())
    torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-4)
