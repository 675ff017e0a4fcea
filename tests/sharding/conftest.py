"""Worlds of 1 to 4 ranks, each started when a test first asks for it, and kept."""

from __future__ import annotations

import pytest
from sharding.worlds import World


@pytest.fixture(scope="session")
def worlds():
    started = {}

    def world(size):
        if size not in started:
            started[size] = World(size)
        return started[size]

    yield world
    for each in started.values():
        each.close()
