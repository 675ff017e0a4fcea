"""Ranks start in a moment, or the tests of ranks would take minutes longer; and what one test does to them is no
other's concern."""

from __future__ import annotations

import os
import signal
import sys

import pytest


def has_found_it_done(rank, size):
    return "sharding.warmed" in sys.modules  # which no rank imports


def test_ranks_are_forks_of_a_process_that_has_imported_all(worlds):
    assert all(worlds(2).run(has_found_it_done))


def is_killed(rank, size, who):
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


@pytest.mark.parametrize("who", [0, 1])
def test_a_world_that_has_lost_a_rank_is_started_anew(worlds, who):
    with pytest.raises(AssertionError, match=f"rank {who} of 2 has ended"):
        worlds(2).run(is_killed, who)
    assert worlds(2).run(is_killed, None) == [0, 1]
