"""Tests over pairs of values instead of all combinations: most faults need two of them to meet, and a grid of three
arguments and more repeats each such pair many times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def parametrize_pairs(**arguments: Sequence[Any]) -> pytest.MarkDecorator:
    """As a `pytest.mark.parametrize` for each argument, but of the combinations only so many that each value of an
    argument meets each value of every other one."""
    values = list(arguments.values())
    chosen = [[each[i] for each, i in zip(values, case, strict=True)] for case in pairwise([len(v) for v in values])]
    cases = [pytest.param(*case, id="-".join(map(_name, case))) for case in chosen]
    return pytest.mark.parametrize(list(arguments), cases)


def _name(value: object) -> str:
    return str(getattr(value, "__name__", value))


def pairwise(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Combinations of numbers below `counts` in which all pairs occur: each next one brings the most new pairs."""
    left = list(itertools.product(*map(range, counts)))
    missing = set().union(*map(_pairs, left))
    chosen = []
    while missing:
        best = max(left, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        chosen.append(best)
    return sorted(chosen)


def _pairs(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    numbered = enumerate(case)
    return {(*first, *second) for first, second in itertools.combinations(numbered, 2)}
