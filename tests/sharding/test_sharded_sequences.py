"""Random sequences of what programs of ranks do: the bits of one process that does the same."""

from __future__ import annotations

import pytest
from sharding import sequences


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [2, 3])
def test_whatever_ranks_do_has_the_bits_of_one_process(worlds, size, seed):
    sequences.check(worlds(size), seed)
