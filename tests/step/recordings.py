"""What tests of recorded plans share: batches of one form, and runs with recorded plans and without."""

from __future__ import annotations

import torch
from devices import assert_same_bits

from tieredemb.kernels import recorder

ROWS = 300
STEPS = 12


def ids_of(step, shape=(8, 5)):
    generator = torch.Generator("cpu").manual_seed(step)
    skewed = torch.rand(shape, generator=generator, device="cpu") ** 4 * ROWS
    return skewed.to(torch.int64).cuda()


def recordings_of(tables, owner):
    """The recordings that `owner` has of tables where these are now: of its plans, or of updates of the tables."""
    recorded = tables.placed.now.recorded.get(owner)
    recorded = getattr(recorded, "_recorder", recorded)
    return [] if recorded is None else [each for kept in recorded._kept.values() for each in kept]


def both(monkeypatch, replays, run):
    """Asserts that `run` leaves the same bits with recorded plans and without; returns how many were replayed."""
    recorded = run()
    count = len(replays)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "TIMES", 10**9)
        launched = run()
    assert len(replays) == count
    assert_same_bits(recorded, launched)
    return count
