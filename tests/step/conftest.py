"""What tests of recorded plans share."""

from __future__ import annotations

import pytest


@pytest.fixture
def recorded(monkeypatch):
    """Plans are recorded, whatever the environment of the whole run says."""
    monkeypatch.setenv("TIEREDEMB_RECORD", "1")


@pytest.fixture
def replays(monkeypatch):
    """A list that has an entry for each plan that is replayed from now on."""
    from tieredemb.step.recorded_plans import RecordedPlan

    found, replay = [], RecordedPlan.replay

    def counted(self, *given):
        found.append(self)
        replay(self, *given)

    monkeypatch.setattr(RecordedPlan, "replay", counted)
    return found
