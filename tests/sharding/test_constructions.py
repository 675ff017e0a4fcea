"""Ranks that construct a collection do not wait for one that has ended, has left, or does something else: all raise,
and the others can construct another one."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from sharding.ranks import batch_of, seven, tables_of
from sharding.test_sharded_failures import LONG, raised
from sharding.worlds import World

import tieredemb as te
from tieredemb.sharding import construction
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import RowWise

TABLES = tables_of()
SHORT = timedelta(seconds=1)


def model_of(tables=TABLES, *, timeout=LONG, **keywords):
    return ShardedTieredEmbeddingBagCollection(tables, sharding=RowWise(), capacity=0.5, timeout=timeout, **keywords)


def filled_by(init):
    return [te.TableConfig(name="a", num_embeddings=40, embedding_dim=4, init=init)]


def ends(*args, **keywords):
    os.kill(os.getpid(), signal.SIGKILL)


def connecting(function, rank, size, path):
    """It, which connects the ranks; rank 1 ends once all of them have."""

    def called(*args, **keywords):
        group = function(*args, **keywords)
        (path / f"connected {rank}").touch()
        while rank == 1:
            if all((path / f"connected {other}").exists() for other in range(size)):
                ends()
            time.sleep(0.01)
        return group

    return called


def left_behind(path):
    """What a construction leaves in this process, beside the threads of its process groups: groups, open row files."""
    gc.collect()  # of an error's frames
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return len(dist.distributed_c10d._world.pg_map), [file for file in files if file.startswith(str(path))]


def threads():
    gc.collect()
    return len(os.listdir("/proc/self/task"))


def is_killed(rank, size, when, path):
    """Rank 1 is killed at some moment of a construction: what the others raise, and leave behind."""
    init, dies = torch.nn.init.zeros_, rank == 1

    def constructed(name):
        return model_of(filled_by(lambda rows, _: init(rows)), storage=te.File(str(path / name)))

    constructed("first").close()
    before = threads()
    if when == "before connecting":
        construction.CONNECT = SHORT
    if dies and when == "before":
        ends()
    elif dies and when == "before connecting":
        dist.new_group = ends
    elif when == "once connected":
        dist.new_group = connecting(dist.new_group, rank, size, path)
    elif dies and when == "opening files":
        fcntl.flock = ends
    elif dies and when == "filling rows":
        init = ends
    elif dies and when == "agreeing":
        dist.all_gather_object = ends
    return raised(constructed, "second"), left_behind(path), threads() - before


MOMENTS = {
    "before": "rank 1 ended before constructing the sharded collection",
    "before connecting": "rank 1 ended while the ranks connected to each other for the sharded collection",
    "once connected": "rank 1 ended while checking the arguments of the sharded collection",
    "opening files": "rank 1 ended while building its rows of the sharded collection",
    "filling rows": "rank 1 ended while building its rows of the sharded collection",
    "agreeing": "constructs a sharded collection, and rank 1 did not: it has ended",
}


def others_of(world, function, *args):
    """What ranks other than 1 answer, which does not, and how they end."""
    try:
        for pipe in world.pipes:
            pipe.send((function, args))
        others = [rank for rank in range(world.size) if rank != 1]
        for rank in others:
            assert world.pipes[rank].poll(30), f"rank {rank} does not answer"
        answers = [world.pipes[rank].recv() for rank in others]
        assert [kind for kind, _ in answers] == ["returned"] * len(others), answers
    finally:
        world.close()
    assert [world.processes[rank].exitcode for rank in others] == [0] * len(others)
    return [value for _, value in answers]


@pytest.mark.parametrize(("when", "size"), [*((when, 3) for when in MOMENTS), ("before connecting", 2)])
def test_a_rank_that_is_killed_ends_the_construction_on_all(tmp_path, when, size):
    for (name, text), left, more_threads in others_of(World(size), is_killed, when, tmp_path):
        assert name == "PeerError"
        assert MOMENTS[when] in text
        assert left == (1, [])
        assert more_threads <= 0


def is_killed_beside_a_busy_one(rank, size, path):
    """Rank 1 is killed while rank 2 fills its rows, for as long as rank 0 has not raised."""

    def init(rows, _):
        if rank == 1:
            ends()
        deadline = time.monotonic() + 25
        while rank == 2 and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    found = raised(model_of, filled_by(init))
    if rank == 0:
        path.write_text("raised")
    return found, path.exists()


def test_a_rank_does_not_wait_for_a_busy_one_where_another_was_killed(tmp_path):
    for (name, text), has_raised in others_of(World(3), is_killed_beside_a_busy_one, tmp_path / "rank 0 has raised"):
        assert name == "PeerError"
        assert "rank 1 ended while building its rows" in text
        assert has_raised


def loses_its_store(rank, size):
    """Rank 1 serves the store of a new world by TCP, and is killed before the others construct."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 1 else None
    ports = [served and served.port]
    dist.broadcast_object_list(ports, src=1)
    dist.destroy_process_group()
    store = served or dist.TCPStore("127.0.0.1", ports[0])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == 1:
        ends()
    return raised(model_of)


def test_a_killed_rank_that_serves_the_store_ends_the_construction():
    for name, text in others_of(World(3), loses_its_store):
        assert name == "PeerError"
        assert text.startswith("rank 1 ended before constructing the sharded collection")


def looks_up(rank, model):
    ids, offsets, *_ = batch_of(TABLES, 0, rank, samples=seven)
    with torch.no_grad():
        model(ids, offsets)


def constructs(rank):
    """All construct a collection, which works."""
    model = model_of()
    looks_up(rank, model)
    model.close()


def is_elsewhere(rank, size):
    """Rank 1 does something else, and begins when the others have waited; then all construct another one."""
    if rank == 1:
        time.sleep(2 * SHORT.total_seconds())
    found = raised(model_of, timeout=LONG if rank == 1 else SHORT)
    constructs(rank)
    return found


def test_a_rank_that_does_not_construct_is_named_after_the_timeout(worlds):
    found = worlds(3).run(is_elsewhere)
    missing = "rank 1 did not begin to construct the sharded collection within 1 s (timeout=)"
    for name, text in found:
        assert name == "PeerError"
        assert missing in text
    assert found[1][1].startswith(("rank 0 stopped constructing", "rank 2 stopped constructing"))


def is_interrupted(rank, size, path):
    """Ctrl-C on rank 1 while it fills its rows; then all construct another one, of the same files."""
    is_interrupted, (before, _) = rank == 1, left_behind(path)  # earlier tests have made groups, too

    def init(rows, _):
        if is_interrupted:
            raise KeyboardInterrupt
        rows.zero_()

    storage = te.HostMemory() if rank == 1 else te.File(str(path))
    try:
        found = raised(model_of, filled_by(init), storage=storage)
    except KeyboardInterrupt:
        found = "KeyboardInterrupt", ""
    (groups, files), is_interrupted = left_behind(path), False
    model_of(filled_by(init), storage=storage).close()
    return found, groups - before, files


def test_a_rank_that_is_interrupted_ends_the_construction_on_all(worlds, tmp_path):
    found = worlds(3).run(is_interrupted, tmp_path / "rows")
    assert [left for _, *left in found] == [[0, []]] * 3
    assert found[1][0][0] == "KeyboardInterrupt"
    for rank in (0, 2):
        name, text = found[rank][0]
        assert name == "PeerError"
        assert text.startswith("rank 1 stopped constructing the sharded collection: KeyboardInterrupt")


def holds_a_file(rank, size, path):
    """The file of rank 1 is held by another collection of it."""
    name = "rows-of-rank-1" if rank == 1 else "rows"
    first = model_of(storage=te.File(str(path / name)))
    found = raised(model_of, storage=te.File(str(path / ("rows-of-rank-1" if rank == 1 else "others"))))
    first.close()
    return found


def test_a_file_that_one_rank_cannot_open_ends_the_construction_on_all(worlds, tmp_path):
    for name, text in worlds(3).run(holds_a_file, tmp_path):
        assert name == "StorageLockedError"
        assert text.startswith("rank 1: ")


def mistakes_timeout(rank, size, timeout):
    return raised(model_of, timeout=timeout if rank == 1 else LONG)


@pytest.mark.parametrize("timeout", [12, timedelta(0)], ids=str)
def test_a_timeout_that_is_none_on_one_rank_is_refused_on_all(worlds, timeout):
    for name, text in worlds(3).run(mistakes_timeout, timeout):
        assert name == "ConfigError"
        assert text.startswith("rank 1: timeout must be a datetime.timedelta of more than 0 s")


def makes_a_group_alone(rank, size):
    """Rank 0 has made a group of itself that the others have yet to make."""
    if rank == 0:
        dist.new_group([0])
    found = raised(model_of)
    if rank != 0:
        dist.new_group([0])
    constructs(rank)
    return found


def test_ranks_in_different_numbers_of_groups_are_refused(worlds):
    for name, text in worlds(2).run(makes_a_group_alone):
        assert name == "ConfigError"
        assert "different numbers of process groups" in text


def is_late(rank, size, shares):
    """Rank 1 is late by more than ranks may take to connect: headers wait for it, of one host and of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(construction, "CONNECT", SHORT)
        patch.setenv("TIEREDEMB_PEER_MEMORY", str(int(shares)))
        model = model_of()
        if rank == 1:
            time.sleep(1.5 * SHORT.total_seconds())
        found = raised(looks_up, rank, model)
        model.close()
    return found


@pytest.mark.parametrize("shares", [True, False])
def test_ranks_wait_for_each_other_for_longer_than_to_connect(worlds, shares):
    assert worlds(3).run(is_late, shares) == [None] * 3
