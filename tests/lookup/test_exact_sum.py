"""Sums whose bits depend on no order, against Python's exact ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tieredemb.lookup.exact_sum import add_exactly, new_sums, rounded

LEAST = 5e-324
MOST = np.finfo(np.float64).max
EXAMPLES = {
    "nothing": [],
    "zeros": [0.0, 0.0],
    "denormals": [LEAST, LEAST, 3e-310],
    "ordinary": [*np.random.default_rng(0).standard_normal(999).astype(np.float32).astype(np.float64) ** 2],
    "far apart": [1e300, 1e-300, 1.0, LEAST, 3e38**2, 1e-45**2],
    "carries": [float(2**53 - 1)] * 5000,
    "largest": [MOST, 1e291],
}


def sum_of(device, values, parts=1):
    sums = new_sums(1, torch.device(device))
    for part in np.array_split(np.array(values, np.float64), parts):
        mine = new_sums(1, torch.device(device))
        its = torch.from_numpy(part).to(device)
        add_exactly(mine, its, torch.zeros(len(part), dtype=torch.int64))
        sums += mine
    return float(rounded(sums))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_sum_is_the_exact_one_but_for_its_rounding(device, name):
    wanted = math.fsum(EXAMPLES[name])
    assert sum_of(device, EXAMPLES[name]) == pytest.approx(wanted, rel=2**-51, abs=0.0)


def test_the_bits_of_a_sum_depend_on_no_order_and_no_parts(device):
    generator = np.random.default_rng(1)
    values = 10.0 ** generator.uniform(-60, 60, 4000)
    found = {sum_of(device, generator.permutation(values), parts) for parts in (1, 2, 3, 50)}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([1.0, math.inf], math.inf), ([math.inf, math.nan, 1.0], math.nan), ([MOST, MOST], math.inf)],
)
def test_what_is_not_finite_is_not_finite_in_a_sum(device, values, wanted):
    assert sum_of(device, values) == pytest.approx(wanted, nan_ok=True)


def test_each_sum_takes_the_numbers_that_are_its_own(device):
    sums = new_sums(3, torch.device(device))
    values = torch.arange(600, dtype=torch.float64)
    add_exactly(sums, values, torch.arange(600) // 7 % 3)
    wanted = [float(values[(torch.arange(600) // 7 % 3) == j].sum()) for j in range(3)]
    assert rounded(sums).tolist() == wanted
