"""What tests of recorded plans share: batches of one form, and runs with recorded plans and without."""

from __future__ import annotations

import torch
from devices import assert_same_bits

from tieredemb.kernels import recording
from tieredemb.step.recorded_plans import Recorded

ROWS = 300
STEPS = 12


def count_replays(monkeypatch):
    """A list that has an entry for each plan that is replayed from now on."""
    found = []
    replay = Recorded.replay

    def counted(self, *given):
        found.append(self)
        replay(self, *given)

    monkeypatch.setattr(Recorded, "replay", counted)
    return found


def ids_of(step, shape=(8, 5)):
    generator = torch.Generator("cpu").manual_seed(step)
    skewed = torch.rand(shape, generator=generator, device="cpu") ** 4 * ROWS
    return skewed.to(torch.int64).cuda()


def both(monkeypatch, replays, run):
    """Asserts that `run` leaves the same bits with recorded plans and without; returns how many were replayed."""
    recorded = run()
    count = len(replays)
    with monkeypatch.context() as patch:
        patch.setattr(recording, "TIMES", 10**9)
        launched = run()
    assert len(replays) == count
    assert_same_bits(recorded, launched)
    return count
