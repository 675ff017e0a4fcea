"""Counters of a module, on every device: what they count, and that hits are those of the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from devices import given_on_devices
from hypothesis import strategies as st
from oracle import OracleCache

import tieredemb as te
from tieredemb.cache.policy import scoring
from tieredemb.errors import ConfigError

ROWS, WIDTH = 64, 4
ROW_BYTES = 4 * WIDTH + 4  # weights and score; SGD keeps no state
BATCHES = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=30), min_size=1, max_size=15)


def make(capacity, **keywords):
    keywords = {"placement": "cached", "optimizer": te.SGD(lr=0.5)} | keywords
    return te.TieredEmbedding(ROWS, WIDTH, capacity=capacity, **keywords)


def look_up(module, *ids):
    """Reads rows, as for a backward that does not come, so on every device from slots; returns what the counters
    counted."""
    before = module.stats()
    module(torch.tensor(ids, dtype=torch.int64))
    return module.stats() - before


def train(module, *ids):
    before = module.stats()
    module(torch.tensor(ids)).sum().backward()
    return module.stats() - before


@given_on_devices(
    BATCHES, st.integers(1, 20), st.sampled_from([0, 1, 7, 300, math.inf]), st.booleans(), cpu=60, cuda=25
)
def test_hits_are_those_of_the_oracle(device, batches, slots, half_life, remember):
    policy = te.LRU() if half_life == 0 else te.LFU(half_life_batches=half_life, remember_evicted=remember)
    module = make(slots, policy=policy)
    fixed_point = 8 / scoring(policy).unit if half_life in (1, 7, 300) else 0.0  # each use rounds to half a unit
    oracle = OracleCache(slots, half_life, remember=remember or half_life == 0, precision=fixed_point)
    for batch in batches:
        counted = look_up(module, *batch)
        assert (counted.hits, counted.lookups, counted.batches) == (oracle.plan(batch), len(batch), 1)
        if oracle.ambiguous or len(set(batch)) > slots:
            return  # of rows of equal score either may go; of a batch beyond the capacity any row may stay


def test_stats_count_each_kind_of_event(device):
    module = make(2)
    for ids in ((1, 1, 2), (2, 3), (4, 5)):
        train(module, *ids)
    s = module.stats()
    assert (s.batches, s.lookups, s.hits, s.misses, s.unique) == (3, 7, 1, 6, 6)
    assert (s.rows_filled, s.evictions, s.rows_written_back, s.rows_overflow) == (5, 3, 3, 0)
    assert (s.bytes_filled, s.bytes_written_back) == (0, 3 * ROW_BYTES)  # rows start out generated, not read
    assert s.hit_rate == 1 / 7
    counted = look_up(module, 1)
    assert (counted.rows_filled, counted.bytes_filled) == (1, ROW_BYTES)


def test_stats_count_rows_beyond_the_capacity(device):
    module = make(2)
    counted = train(module, 7, 8, 9, 8)
    assert (counted.lookups, counted.hits, counted.unique, counted.rows_overflow) == (4, 0, 3, 1)


def test_clean_rows_give_back_their_score_alone(device):
    module = make(1)
    train(module, 1)
    module.flush()
    look_up(module, 1)
    counted = look_up(module, 2)
    assert (counted.evictions, counted.rows_written_back, counted.bytes_written_back) == (1, 0, 4)


def test_padding_counts_nowhere(device):
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=3, capacity=2, placement="cached")
    counted = look_up(bag, [3, 5, 3])
    assert (counted.lookups, counted.unique, counted.batches) == (1, 1, 1)


def test_every_lookup_of_a_resident_table_hits(device):
    module = make(1.0, placement="resident")
    for ids in ((1, 1, 2), (2, 3), range(ROWS)):
        train(module, *ids)
    s = module.stats()
    assert (s.batches, s.lookups, s.hits, s.evictions, s.rows_overflow) == (3, 5 + ROWS, 5 + ROWS, 0, 0)


def test_resident_tables_must_fit(device):
    with pytest.raises(ConfigError, match=r"'weight' have 64 rows.*capacity of 63 slots"):
        make(63, placement="resident")


@pytest.mark.parametrize("placement", ["cached", "resident"])
def test_counters_go_on_after_a_load(device, tmp_path, placement):
    module = make(capacity=1.0 if placement == "resident" else 5, placement=placement)
    train(module, 1, 2, 3)
    module.save_checkpoint(tmp_path)
    train(module, 4, 5)
    before = module.stats()
    module.load_checkpoint(tmp_path)
    after = module.stats()
    assert (after.batches, after.lookups) == (2, 5)
    assert (after.unique, after.hits, after.rows_filled) == (before.unique, before.hits, before.rows_filled)
    train(module, 1, 2, 3)
    assert (module.stats().batches, module.stats().lookups) == (3, 8)


def test_counters_go_on_after_a_move(gpu):
    module = make(5, device="cpu")
    module(torch.tensor([1, 2, 2], device="cpu")).sum().backward()
    module.cuda()
    train(module, 1, 2, 3)
    assert (module.stats().batches, module.stats().lookups) == (2, 6)
    module.cpu()
    assert (module.stats().batches, module.stats().lookups) == (2, 6)
