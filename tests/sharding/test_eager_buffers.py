"""Which eager forwards of ranks write into each other's memory, and where: decided by what all ranks know. Memory is
stood in for, and there is one rank's side of it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from tieredemb.kernels.spread import RowSpread
from tieredemb.sharding import eager_buffers
from tieredemb.sharding.bags import Part
from tieredemb.sharding.eager_buffers import LACKING, EagerBuffers
from tieredemb.sharding.header import Bound
from tieredemb.sharding.peer_exchange import words_of_region
from tieredemb.sharding.stats import GRADIENTS, IDS, ROWS
from tieredemb.sharding.symmetric import SymmetricRows

RANKS, RANK, WIDTH, SAMPLES = 3, 1, 4, 7


class Memory:
    """What stands in for that of all ranks; `made`: all of it."""

    made: ClassVar[list] = []
    has_memory = True
    bytes, wait_seconds = 100, 0.5

    def __init__(self, context, share):
        self.share, self.specs, self.did, self.exchanges = share, None, [], []
        self.made.append(self)

    def make(self, specs, of_ids):
        self.specs, self.of_ids = specs, of_ids
        if not self.has_memory:
            return None
        begins = torch.zeros(RANKS, dtype=torch.int64)
        return [
            SymmetricRows(
                torch.zeros(RANKS * spec.each, spec.width),
                RowSpread(begins, spec.each, RANK * spec.each),
                (RANKS - 1) * spec.each,
            )
            for spec in specs
        ]

    def exchange_of_ids(self, spec):
        assert spec == self.of_ids
        self.exchanges.append(SimpleNamespace(spec=spec, wait_stream=lambda: self.did.append("wait_stream of ids")))
        return self.exchanges[-1]

    def wait_stream(self):
        self.did.append("wait_stream")

    def barrier(self):
        self.did.append("barrier")

    def close(self, *, frees):
        self.did.append(("close", frees))


def part_of(space, *, is_table_wise):
    """A part, of whose features the ranks hold one more than the rank before, if they hold them whole."""
    held = [len(space.features) // RANKS + k for k in (-1, 0, 1)]
    owner = np.repeat(np.arange(RANKS), held) if is_table_wise else np.full(len(space.features), -1)
    return Part(space, owner, RANKS, 1, sends_padding=False)


@pytest.fixture
def make_buffers(monkeypatch):
    """Of a width with row-wise parts, and others that are held whole, of so many features each."""
    monkeypatch.setattr(eager_buffers, "SymmetricMemory", Memory)
    monkeypatch.setattr(Memory, "made", [])
    tables = SimpleNamespace(config=SimpleNamespace(output_dtype=torch.bfloat16))
    shard = SimpleNamespace(space=SimpleNamespace(width=WIDTH), engine=SimpleNamespace(tables=tables))
    exchange = SimpleNamespace(has_nccl=True, rank=RANK, size=RANKS, failures=0)

    def make(*are_table_wise, features=(2, 3)):
        spaces = [SimpleNamespace(features=torch.zeros(each)) for each in features]
        of_parts = zip(are_table_wise, spaces, strict=True)
        parts = [(part_of(space, is_table_wise=is_whole), shard) for is_whole, space in of_parts]
        return EagerBuffers(
            SimpleNamespace(
                exchange=exchange, device=torch.device("cuda", 0), parts=parts,
                output_dtype=torch.float32, place_in_output=lambda number: not are_table_wise[number],
            )
        )  # fmt: skip

    return make


@pytest.fixture
def buffers(make_buffers):
    """Of a row-wise part, and one that is held whole."""
    return make_buffers(False, True)


def bounds(ids, rows=None):
    return Bound(ids, rows), Bound(9, None)


def prepared(buffers, its, times=LACKING):
    for _ in range(times):
        buffers.prepare(its, SAMPLES)
    return buffers.of(its, SAMPLES)


def forward(buffers, number, its, *, trains=True):
    """Where it writes its rows, if it does, once all ranks are at the barrier behind them."""
    found = buffers.of(its, SAMPLES)
    if found is not None:
        buffers.rows_exchanged(number, trains=trains)
    return None if found is None else found[0].rows.received.data_ptr()


def test_buffers_are_allocated_for_forwards_that_recur(buffers):
    assert prepared(buffers, bounds(16, 8), LACKING - 1) is None
    assert not Memory.made
    row_wise, table_wise = prepared(buffers, bounds(16, 8), 1)
    ((memory,), in_turn) = Memory.made, buffers._allocated
    assert memory.share == eager_buffers.SHARE
    assert [(spec.call, spec.part, spec.each, spec.dtype, spec.kind) for spec in memory.specs] == [
        (0, 0, 9, torch.bfloat16, ROWS), (0, 1, 7, torch.float32, ROWS),
        (0, 1, 14, torch.float32, GRADIENTS), (0, 0, 18, torch.float32, GRADIENTS),  # as they lie in an output
        (1, 0, 9, torch.bfloat16, ROWS), (1, 1, 7, torch.float32, ROWS),
    ]  # fmt: skip
    assert (row_wise.rows.to.each, row_wise.rows.to.first, len(row_wise.rows.received)) == (8, RANK * 8, RANKS * 8)
    assert (row_wise.grads.to.each, row_wise.grads.to.first, len(row_wise.grads.received)) == (
        16,
        RANK * 16,
        RANKS * 16,
    )
    assert row_wise.rows.received.data_ptr() == in_turn[0][0].rows.received.data_ptr()
    assert table_wise.rows.received.data_ptr() == in_turn[0][1].rows.received.data_ptr()
    assert in_turn[0][1].grads is in_turn[1][1].grads


def test_bags_lie_owner_by_owner_and_their_gradients_rank_by_rank(buffers):
    """Of three features the first rank holds none, and the last two."""
    (_, table_wise) = prepared(buffers, bounds(16, 8))
    ((part, _), memory) = buffers._context.parts[1], table_wise.grads.received
    for samples in (7, 4):
        its = [table_wise.of_bags(part, samples, rank) for rank in range(RANKS)]
        assert [each.rows.to.first for each in its] == [0, 0, samples]
        assert [each.rows.to.each for each in its] == [0, samples, 2 * samples]
        assert [len(each.rows.received) for each in its] == [3 * samples] * RANKS
        assert [len(each.grads.received) for each in its] == [0, 3 * samples, 6 * samples]
        assert [each.rows.sent for each in its] == [0, 2 * samples, 4 * samples]
        assert [each.grads.sent for each in its] == [3 * samples, 2 * samples, samples]
        assert all(each.grads.received.data_ptr() == memory.data_ptr() for each in its[1:])
    assert table_wise.of_bags(part, 8, 0) is None


def test_more_ids_of_tables_held_whole_get_larger_buffers(buffers):
    """Also where as many rows come back: the ids have a buffer."""
    its = bounds(16, 8)
    prepared(buffers, its)
    more = its[0], Bound(11, None)
    assert buffers.of(more, SAMPLES) is None
    assert buffers.exchange_of_ids(more, SAMPLES) is None
    assert prepared(buffers, more) is not None
    assert buffers.exchange_of_ids(more, SAMPLES) is Memory.made[1].exchanges[0]


def test_more_samples_than_fit_get_larger_buffers(buffers):
    """And fewer samples fit meanwhile."""
    its = bounds(16, 8)
    prepared(buffers, its)
    assert buffers.of(its, SAMPLES + 2) is None
    for _ in range(LACKING):
        assert buffers.of(its, SAMPLES) is not None
        buffers.prepare(its, SAMPLES + 2)
    assert buffers.of(its, SAMPLES + 2) is not None
    assert [spec.each for spec in Memory.made[1].specs] == [9, 9, 18, 18, 9, 9]


def test_a_row_may_come_back_for_each_id(buffers):
    (row_wise, _) = prepared(buffers, bounds(16))
    assert (row_wise.rows.to.each, row_wise.grads.to.each) == (16, 16)


def test_smaller_forwards_fit_and_larger_ones_get_buffers_later(buffers):
    prepared(buffers, bounds(16, 8))
    assert buffers.of(bounds(5, 3), SAMPLES)[0].rows.to.each == 3
    assert buffers.of(bounds(18, 9), SAMPLES) is not None
    assert buffers.of(bounds(19, 9), SAMPLES) is None
    assert buffers.of(bounds(16, 10), SAMPLES) is None
    before = len(Memory.made[0].did)
    prepared(buffers, bounds(40, 4))
    first, second = Memory.made
    assert (
        buffers.of(bounds(5, 3), SAMPLES)[0].rows.received.data_ptr()
        == buffers._allocated[0][0].rows.received.data_ptr()
    )  # not in what was given up
    assert [spec.each for spec in second.specs] == [9, 7, 14, 45, 9, 7]  # what fitted still does
    assert first.did[before:] == [
        "wait_stream",
        "wait_stream of ids",
        ("close", True),
    ]  # behind its last use, on whatever stream
    assert buffers.wait_seconds == 1.0


def test_one_that_fits_between_begins_the_count_anew(buffers):
    prepared(buffers, bounds(16, 8))
    for _ in range(3):
        prepared(buffers, bounds(40, 8), LACKING - 1)
        buffers.prepare(bounds(16, 8), SAMPLES)
    assert len(Memory.made) == 1


def test_forwards_alternate_between_the_buffers_for_rows(buffers):
    its = bounds(16, 8)
    prepared(buffers, its)
    found = [forward(buffers, number, its, trains=False) for number in range(4)]
    assert found[0] == found[2] != found[1] == found[3]
    buffers.of(its, SAMPLES)  # of one that has failed before the barrier, on all ranks
    assert forward(buffers, 5, its) == found[0]


def test_one_forward_at_a_time_writes_gradients(buffers):
    its = bounds(16, 8)
    prepared(buffers, its)
    for number in (3, 4):
        forward(buffers, number, its)
    assert [buffers.owns_gradients(number) for number in (3, 4)] == [True, False]
    buffers.reached([3])
    forward(buffers, 5, its)
    assert buffers.owns_gradients(5)


def test_a_forward_without_a_backward_releases_the_buffer_to_a_later_one(buffers):
    its = bounds(16, 8)
    prepared(buffers, its)
    for number in (3, 4):
        forward(buffers, number, its)
    buffers.reached([2, 4])
    assert not buffers.owns_gradients(3)
    forward(buffers, 5, its, trains=False)
    assert not buffers.owns_gradients(5)
    forward(buffers, 6, its)
    buffers.reached([2])  # of an earlier one
    assert buffers.owns_gradients(6)


@pytest.mark.parametrize("is_whole", [False, True])
def test_ids_are_exchanged_there(make_buffers, is_whole):
    """As many as any forward whose rows fit has: of each part a number for each feature, and the ids; and how long the
    bags are of features that a rank pools, of which one has two."""
    buffers = make_buffers(False, is_whole)
    its = Bound(16, 8), Bound(80, 40)
    assert buffers.exchange_of_ids(its, SAMPLES) is None
    prepared(buffers, its)
    words = (2 + 18) + (3 + 90) + is_whole * 2 * SAMPLES
    ((its_memory,), last) = Memory.made, Memory.made[0].exchanges[0].spec
    assert its_memory.of_ids == last
    assert (last.kind, last.each, last.width, last.dtype) == (IDS, words_of_region(words), 1, torch.int64)
    assert buffers.exchange_of_ids(its, SAMPLES).spec == last
    assert buffers.exchange_of_ids((Bound(18, 9), Bound(90, 45)), SAMPLES).spec == last
    assert buffers.exchange_of_ids((Bound(19, 9), Bound(90, 45)), SAMPLES) is None
    prepared(buffers, (Bound(100, 8), Bound(80, 40)))
    assert [len(memory.exchanges) for memory in Memory.made] == [1, 1]
    assert Memory.made[0].did[-3:] == ["wait_stream", "wait_stream of ids", ("close", True)]
    assert buffers.exchange_of_ids(its, SAMPLES) is Memory.made[1].exchanges[0]
    buffers.close(frees=True)
    assert buffers.exchange_of_ids(its, SAMPLES) is None


def test_a_forward_comes_behind_the_last_barrier_and_has_one(buffers):
    """Whatever its stream is."""
    its = bounds(16, 8)
    prepared(buffers, its)
    (memory,) = Memory.made
    assert memory.did == ["wait_stream"]
    buffers.barrier()
    buffers.wait_stream()
    assert memory.did == ["wait_stream", "barrier", "wait_stream"]


def test_a_forward_sends_behind_one_that_has_failed(buffers):
    """What that has written may arrive late: until all ranks have exchanged rows once more."""
    its = bounds(16, 8)
    buffers._context.exchange.failures = 1  # of before
    prepared(buffers, its)
    buffers.rows_sent()
    first = forward(buffers, 3, its)
    buffers.of(its, SAMPLES)
    buffers._context.exchange.failures += 1
    assert [forward(buffers, number, its) for number in (4, 5)] == [None, None]
    assert Memory.made[0].did[-1] == "wait_stream"  # what is sent comes behind what was written
    buffers.rows_sent()
    assert forward(buffers, 6, its) not in (None, first)


def test_none_are_allocated_while_a_backward_has_yet_to_come(buffers):
    prepared(buffers, bounds(16, 8))
    forward(buffers, 3, bounds(16, 8))
    assert prepared(buffers, bounds(40, 8), 2 * LACKING) is None
    buffers.reached([3])
    assert prepared(buffers, bounds(40, 8)) is not None


def test_where_a_rank_lacks_memory_none_tries_again(buffers, monkeypatch):
    monkeypatch.setattr(Memory, "has_memory", False)
    assert prepared(buffers, bounds(16, 8), 5 * LACKING) is None
    assert len(Memory.made) == 1


def test_buffers_that_cannot_grow_stay(buffers, monkeypatch):
    prepared(buffers, bounds(16, 8))
    monkeypatch.setattr(Memory, "has_memory", False)
    assert prepared(buffers, bounds(40, 8), 5 * LACKING) is None
    assert len(Memory.made) == 2
    assert buffers.of(bounds(16, 8), SAMPLES) is not None
    assert not buffers.is_off


def test_closed_buffers_take_no_forward(buffers):
    prepared(buffers, bounds(16, 8))
    views = [weakref.ref(its.rows.received) for its in buffers.of(bounds(16, 8), SAMPLES) if its is not None]
    buffers.close(frees=False)
    gc.collect()
    assert not any(its() is not None for its in views)  # nothing of it is held any more
    assert buffers.of(bounds(16, 8), SAMPLES) is None
    assert Memory.made[0].did[-1] == ("close", False)
    assert prepared(buffers, bounds(16, 8), 2 * LACKING) is None


@pytest.mark.parametrize("keywords", [{"has_nccl": False}, {"device": "cpu"}], ids=str)
def test_ranks_without_nccl_have_none(monkeypatch, keywords):
    monkeypatch.setattr(eager_buffers, "SymmetricMemory", None)
    exchange = SimpleNamespace(has_nccl=keywords.get("has_nccl", True))
    device = torch.device(keywords.get("device", "cuda"))
    buffers = EagerBuffers(SimpleNamespace(exchange=exchange, device=device, parts=[]))
    assert buffers.is_off
    assert prepared(buffers, bounds(16, 8)) is None
    assert buffers.bytes == 0
