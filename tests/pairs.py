"""Tests over pairs of values instead of all combinations: most faults need two of them to meet, and a grid of three
arguments and more repeats each such pair many times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest


def parametrize_pairs(**arguments: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """As a `pytest.mark.parametrize` for each argument, but of the combinations only so many that each value of an
    argument meets each value of every other one. The values of an argument may have names."""
    named = [_named(values) for values in arguments.values()]
    chosen = [[each[i] for each, i in zip(named, case, strict=True)] for case in pairwise([len(v) for v in named])]
    cases = [pytest.param(*(value for _, value in case), id="-".join(name for name, _ in case)) for case in chosen]
    return pytest.mark.parametrize(list(arguments), cases)


def pairwise(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Combinations of numbers below `counts` in which all pairs occur: each next one brings the most new pairs."""
    left = list(itertools.product(*map(range, counts)))
    bits: dict[tuple[int, ...], int] = {}  # of a pair: sets as numbers are compared fast
    masks = [sum(1 << bits.setdefault(pair, len(bits)) for pair in _pairs(case)) for case in left]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(left)), key=lambda number: (missing & masks[number]).bit_count())
        missing &= ~masks[best]
        chosen.append(left[best])
    return sorted(chosen)


def _pairs(case: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return ((*first, *second) for first, second in itertools.combinations(enumerate(case), 2))


def _named(values: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        return list(values.items())
    return [(str(getattr(value, "__name__", value)), value) for value in values]
