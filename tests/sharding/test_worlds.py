"""Ranks start in a moment, or the tests of ranks would take minutes longer."""

from __future__ import annotations

import sys


def has_found_it_done(rank, size):
    return "sharding.warmed" in sys.modules  # which no rank imports


def test_ranks_are_forks_of_a_process_that_has_imported_all(worlds):
    assert all(worlds(2).run(has_found_it_done))
