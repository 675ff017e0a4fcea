"""A rank that is killed ends the others' wait at once, and all start again from the last checkpoint, with the same
bits."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from sharding.ranks import batch_of, step_of, tables_of
from sharding.test_sharded_failures import raised
from sharding.worlds import World

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import RowWise

TABLES = tables_of()
STEPS = 8


def samples(rank):
    return 6


def trains(rank, size, where, killed_at, when):
    """Saves after each step, and continues from the last one that was saved. One rank is killed in one of them."""
    model = ShardedTieredEmbeddingBagCollection(
        TABLES, sharding=RowWise(), capacity=0.5, optimizer=te.Adam(lr=0.05), device="cpu", average=False
    )
    first = model.load_checkpoint(where)["step"] + 1 if os.path.exists(where) else 0
    for step in range(first, STEPS):
        dies = rank == 1 and step == killed_at
        if dies and when == "save":
            from tieredemb.storage.checkpoint import directory

            directory.write_spaces = lambda *args, **keywords: os.kill(os.getpid(), signal.SIGKILL)
        if dies and when == "backward":
            out = model(*batch_of(TABLES, step, rank, samples=samples)[:2])
            os.kill(os.getpid(), signal.SIGKILL)
            del out
        started = time.monotonic()
        error = raised(step_of, model, batch_of(TABLES, step, rank, samples=samples), weighted=False)
        error = error or raised(model.save_checkpoint, where, extra={"step": step})
        if error is not None:
            return error, time.monotonic() - started
    weights = dict(model.state_dict())
    model.close()
    return first, weights


@pytest.mark.parametrize("when", ["backward", "save"])
def test_a_killed_rank_is_noticed_and_training_resumes(worlds, tmp_path, when):
    broken = World(2)
    try:
        _, expected = worlds(2).run(trains, tmp_path / "whole", None, when)[0]
        for pipe in broken.pipes:
            pipe.send((trains, (tmp_path / "saved", 3, when)))
        assert broken.pipes[0].poll(60)
        kind, (error, seconds) = broken.pipes[0].recv()
        assert kind == "returned"
        assert error[0] == "PeerError"
        assert "start all of them again from the last checkpoint" in error[1]
        assert seconds < 20
        first, weights = worlds(2).run(trains, tmp_path / "saved", None, when)[0]  # processes that know of nothing
        assert first == 3
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight)
    finally:
        broken.close()
