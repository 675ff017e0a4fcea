"""What updates of tables go by, in few bits: ranks that hold parts of the same tables compare it, as rows that go by
other options, or take other steps, are none of the others' model. Where bits differ they compare the values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

from tieredemb.config import is_number

CODE_BITS, CALL_BITS, STEP_BITS = 32, 15, 16
DIGITS, TOLERANCE = 6, 1e-6  # of numbers, as one rank may have from another in float32 what that has in float64


class Coded:
    """The code of options, which is found anew where they have changed."""

    def __init__(self) -> None:
        self._options: dict[str, Any] | None = None
        self._code = 0

    def of(self, options: Mapping[str, Any]) -> int:
        """What options have in common that are equal to `DIGITS` digits: of `CODE_BITS` bits, and hardly ever 0."""
        if options != self._options:
            self._code = zlib.crc32(repr(sorted((name, _plain(value)) for name, value in options.items())).encode())
            # a list, which may change in place, equals no tuple
            self._options = {name: tuple(each) if isinstance(each, list) else each for name, each in options.items()}
        return self._code


def steps_code(steps: int, calls: int, code: int) -> int:
    """What is in common of so many steps, that have applied so many calls, and of which the last went by options of
    that `code`: of 63 bits, not negative."""
    return ((steps % (1 << STEP_BITS)) << CALL_BITS | calls % (1 << CALL_BITS)) << CODE_BITS | code


def are_alike(one: object, other: object) -> bool:
    """Whether two values are equal, numbers up to a relative `TOLERANCE`, and pairs of these."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(are_alike, one, other))
    if is_number(one) and is_number(other):
        return math.isclose(float(one), float(other), rel_tol=TOLERANCE)  # type: ignore[arg-type]
    return type(one) is type(other) and one == other


def _plain(value: Any) -> Any:
    """The value, however it is written."""
    if isinstance(value, (tuple, list)):
        return [*map(_plain, value)]
    return f"{float(value):.{DIGITS}g}" if is_number(value) else value
