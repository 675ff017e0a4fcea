"""Fingerprints of what updates of tables go by: ranks that hold parts of the same tables compare it, as rows that go by
other options, or take other steps, are none of the others' model. Where fingerprints differ they compare the values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

from tieredemb.config import is_number

OPTION_BITS, CALL_BITS, STEP_BITS = 32, 15, 16
DIGITS, TOLERANCE = 6, 1e-6  # of numbers, as one rank may have from another in float32 what that has in float64


class Fingerprint:
    """Of options: found anew where they have changed."""

    def __init__(self) -> None:
        self._options: dict[str, Any] | None = None
        self._bits = 0

    def of(self, options: Mapping[str, Any]) -> int:
        """The same of options that are equal to `DIGITS` digits. Of `OPTION_BITS` bits, and hardly ever 0."""
        if options != self._options:
            self._bits = zlib.crc32(repr(sorted((name, _plain(value)) for name, value in options.items())).encode())
            # a list, which may change in place, equals no tuple
            self._options = {name: tuple(each) if isinstance(each, list) else each for name, each in options.items()}
        return self._bits


def steps_fingerprint(steps: int, calls: int, options: int) -> int:
    """The fingerprint of `steps` steps, which have applied `calls` calls: 63 bits, not negative. `options`: the
    fingerprint of the last step's options."""
    return ((steps % (1 << STEP_BITS)) << CALL_BITS | calls % (1 << CALL_BITS)) << OPTION_BITS | options


def are_alike(one: object, other: object) -> bool:
    """Whether two values are equal, numbers up to a relative `TOLERANCE`, and pairs of these."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(are_alike, one, other))
    if is_number(one) and is_number(other):
        return math.isclose(float(one), float(other), rel_tol=TOLERANCE)
    return type(one) is type(other) and one == other


def _plain(value: Any) -> Any:
    """The value, however it is written."""
    if isinstance(value, (tuple, list)):
        return [*map(_plain, value)]
    return f"{float(value):.{DIGITS}g}" if is_number(value) else value
