"""Which eager forwards of ranks write into each other's memory, and where: decided by what all ranks know. Memory is
stood in for, and there is one rank's side of it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tieredemb.kernels.spread import RowSpread
from tieredemb.sharding import eager_rooms
from tieredemb.sharding.eager_rooms import AGAIN, EagerRooms
from tieredemb.sharding.header import Bound
from tieredemb.sharding.symmetric import SymmetricRows

RANKS, RANK, WIDTH = 3, 1, 4


class Memory:
    """What stands in for that of all ranks; `made`: all of it."""

    made: ClassVar[list] = []
    has_room = True
    bytes, wait_seconds = 100, 0.5

    def __init__(self, context, share):
        self.share, self.rooms, self.did = share, None, []
        self.made.append(self)

    def make(self, rooms):
        self.rooms = rooms
        if not self.has_room:
            return None
        begins = torch.zeros(RANKS, dtype=torch.int64)
        return [
            SymmetricRows(torch.zeros(RANKS * room.each, room.width), RowSpread(begins, room.each, RANK * room.each))
            for room in rooms
        ]

    def follow(self):
        self.did.append("follow")

    def barrier(self):
        self.did.append("barrier")

    def close(self, *, frees):
        self.did.append(("close", frees))


@pytest.fixture
def rooms(monkeypatch):
    """Of a width with a part that is dealt out, and one that is held whole."""
    monkeypatch.setattr(eager_rooms, "SymmetricMemory", Memory)
    monkeypatch.setattr(Memory, "made", [])
    tables = SimpleNamespace(config=SimpleNamespace(output_dtype=torch.bfloat16))
    parts = [SimpleNamespace(is_whole=its, space=SimpleNamespace(width=WIDTH)) for its in (False, True)]
    shard = SimpleNamespace(parts=parts, engine=SimpleNamespace(tables=tables))
    exchange = SimpleNamespace(has_nccl=True, rank=RANK, size=RANKS)
    return EagerRooms(SimpleNamespace(exchange=exchange, device=torch.device("cuda", 0), shards=[shard]))


def bounds(ids, rows=None):
    return Bound(ids, rows), Bound(9, None)


def prepared(rooms, its, times=AGAIN):
    for _ in range(times):
        rooms.prepare(its)
    return rooms.of(its)


def forward(rooms, number, its, *, trains=True):
    """Where it writes its rows, if it does, once all have come to the barrier behind them."""
    found = rooms.of(its)
    if found is not None:
        rooms.rows_came(number, trains=trains)
    return None if found is None else found[0].rows.came.data_ptr()


def test_room_is_made_for_forwards_that_come_again(rooms):
    assert prepared(rooms, bounds(16, 8), AGAIN - 1) is None
    assert not Memory.made
    dealt, whole = prepared(rooms, bounds(16, 8), 1)
    assert whole is None
    ((memory,), in_turn) = Memory.made, rooms._made
    assert memory.share == eager_rooms.SHARE
    assert [(room.call, room.part, room.each, room.dtype, room.is_of_gradients) for room in memory.rooms] == [
        (0, 0, 9, torch.bfloat16, False), (1, 0, 9, torch.bfloat16, False), (0, 0, 18, torch.float32, True),
    ]  # fmt: skip
    assert (dealt.rows.to.each, dealt.rows.to.first, len(dealt.rows.came)) == (8, RANK * 8, RANKS * 8)
    assert (dealt.grads.to.each, dealt.grads.to.first, len(dealt.grads.came)) == (16, RANK * 16, RANKS * 16)
    assert dealt.rows.came.data_ptr() == in_turn[0].came.data_ptr()


def test_a_row_may_come_back_for_each_id(rooms):
    (dealt, _) = prepared(rooms, bounds(16))
    assert (dealt.rows.to.each, dealt.grads.to.each) == (16, 16)


def test_smaller_forwards_have_room_and_larger_ones_find_it_later(rooms):
    prepared(rooms, bounds(16, 8))
    assert rooms.of(bounds(5, 3))[0].rows.to.each == 3
    assert rooms.of(bounds(18, 9)) is not None
    assert rooms.of(bounds(19, 9)) is None
    assert rooms.of(bounds(16, 10)) is None
    prepared(rooms, bounds(40, 4))
    first, second = Memory.made
    assert rooms.of(bounds(5, 3))[0].rows.came.data_ptr() == rooms._made[0].came.data_ptr()  # not in what was given up
    assert [room.each for room in second.rooms] == [9, 9, 45]  # what there was room for still has some
    assert first.did[-1] == ("close", True)
    assert rooms.wait_seconds == 1.0


def test_one_that_fits_between_begins_the_count_anew(rooms):
    prepared(rooms, bounds(16, 8))
    for _ in range(3):
        prepared(rooms, bounds(40, 8), AGAIN - 1)
        rooms.prepare(bounds(16, 8))
    assert len(Memory.made) == 1


def test_forwards_take_rooms_for_rows_in_turn(rooms):
    its = bounds(16, 8)
    prepared(rooms, its)
    found = [forward(rooms, number, its, trains=False) for number in range(4)]
    assert found[0] == found[2] != found[1] == found[3]
    rooms.of(its)  # of one that has failed before the barrier, on all ranks
    assert forward(rooms, 5, its) == found[0]


def test_one_forward_at_a_time_writes_gradients(rooms):
    its = bounds(16, 8)
    prepared(rooms, its)
    for number in (3, 4):
        forward(rooms, number, its)
    assert [rooms.has_gradients(number) for number in (3, 4)] == [True, False]
    rooms.reached([3])
    forward(rooms, 5, its)
    assert rooms.has_gradients(5)


def test_a_forward_without_a_backward_gives_the_room_up_to_a_later_one(rooms):
    its = bounds(16, 8)
    prepared(rooms, its)
    for number in (3, 4):
        forward(rooms, number, its)
    rooms.reached([2, 4])
    assert not rooms.has_gradients(3)
    forward(rooms, 5, its, trains=False)
    assert not rooms.has_gradients(5)
    forward(rooms, 6, its)
    rooms.reached([2])  # of an earlier one
    assert rooms.has_gradients(6)


def test_a_forward_comes_behind_the_last_barrier_and_has_one(rooms):
    """Whatever its stream is."""
    its = bounds(16, 8)
    prepared(rooms, its)
    (memory,) = Memory.made
    assert memory.did == ["follow"]
    rooms.barrier()
    rooms.follow()
    assert memory.did == ["follow", "barrier", "follow"]


def test_what_tables_that_are_held_whole_exchange_takes_no_room(rooms):
    prepared(rooms, bounds(16, 8))
    assert rooms.of((Bound(16, 8), Bound(10**6, None))) is not None


def test_no_room_is_made_while_a_backward_has_yet_to_come(rooms):
    prepared(rooms, bounds(16, 8))
    forward(rooms, 3, bounds(16, 8))
    assert prepared(rooms, bounds(40, 8), 2 * AGAIN) is None
    rooms.reached([3])
    assert prepared(rooms, bounds(40, 8)) is not None


def test_where_a_rank_has_no_room_nobody_asks_again(rooms, monkeypatch):
    monkeypatch.setattr(Memory, "has_room", False)
    assert prepared(rooms, bounds(16, 8), 5 * AGAIN) is None
    assert len(Memory.made) == 1


def test_rooms_that_cannot_grow_stay(rooms, monkeypatch):
    prepared(rooms, bounds(16, 8))
    monkeypatch.setattr(Memory, "has_room", False)
    assert prepared(rooms, bounds(40, 8), 5 * AGAIN) is None
    assert len(Memory.made) == 2
    assert rooms.of(bounds(16, 8)) is not None
    assert not rooms.is_off


def test_closed_rooms_take_no_forward(rooms):
    prepared(rooms, bounds(16, 8))
    views = [weakref.ref(its.rows.came) for its in rooms.of(bounds(16, 8)) if its is not None]
    rooms.close(frees=False)
    gc.collect()
    assert not any(its() is not None for its in views)  # nothing of it is held any more
    assert rooms.of(bounds(16, 8)) is None
    assert Memory.made[0].did[-1] == ("close", False)
    assert prepared(rooms, bounds(16, 8), 2 * AGAIN) is None


@pytest.mark.parametrize("keywords", [{"has_nccl": False}, {"device": "cpu"}], ids=str)
def test_ranks_without_nccl_have_none(monkeypatch, keywords):
    monkeypatch.setattr(eager_rooms, "SymmetricMemory", None)
    exchange = SimpleNamespace(has_nccl=keywords.get("has_nccl", True))
    device = torch.device(keywords.get("device", "cuda"))
    rooms = EagerRooms(SimpleNamespace(exchange=exchange, device=device, shards=[]))
    assert rooms.is_off
    assert prepared(rooms, bounds(16, 8)) is None
    assert rooms.bytes == 0
