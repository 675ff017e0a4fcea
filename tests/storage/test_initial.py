"""Initial rows on the CPU: what is known of them without generating any."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tieredemb.config import Normal
from tieredemb.kernels.cpu import jit
from tieredemb.storage.initial import InitialRows, InitialTable
from tieredemb.storage.initial_cpu import normal_of


@pytest.mark.parametrize("has_last_step", [False, True])
@pytest.mark.parametrize("words", [0, 1, 5])
@pytest.mark.parametrize("value", [0.0, 0.25])
def test_the_state_of_every_row_begins_alike(words, value, has_last_step):
    table = InitialTable(start=0, number=3, init=Normal(), padding_idx=None)
    initial = InitialRows([table], seed=7, state_value=value, device=torch.device("cpu"), has_last_step=has_last_step)
    weight, state = np.empty((2, 4), np.float32), np.full((2, words), 9, np.uint32)
    initial.generate(np.array([0, 41]), np.arange(2), weight, state, words)
    assert initial.state(words).dtype == np.uint32
    assert initial.state(words).tolist() == state[0].tolist() == state[1].tolist()


@jit
def normals(bits, out):
    for i in range(bits.shape[0]):
        out[i] = normal_of(bits[i])


def test_normal_values_are_the_quantiles_of_their_random_bits():
    """All tails of 31 bits that are powers of two and a little more, and many between: a float32's rounding off."""
    special = pytest.importorskip("scipy.special")
    random = np.random.default_rng(0).integers(0, 1 << 31, 200_000, dtype=np.uint32)
    edges = np.concatenate([(np.uint32(1) << np.arange(31, dtype=np.uint32)) + np.uint32(add) for add in range(4)])
    bits = np.concatenate([random, edges, np.array([0, (1 << 31) - 1], np.uint32)])
    found, mirrored = np.empty(len(bits), np.float32), np.empty(len(bits), np.float32)
    normals(bits, found)
    normals(bits | np.uint32(1 << 31), mirrored)
    tail = (bits * np.float32(2.0**-32) + np.float32(2.0**-33)).astype(np.float64)
    np.testing.assert_allclose(found, -special.ndtri(tail), rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(mirrored, -found)
