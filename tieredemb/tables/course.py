"""What updates of tables go by, in few bits: ranks that hold parts of the same tables compare it, as rows that go by
other options, or take other steps, are none of the others' model."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from tieredemb.config import is_number

CODE_BITS = 32
MOST_STEPS = (1 << 31) - 1
DIGITS = 7  # machines may round what a scheduler computes in other ways


class Coded:
    """The code of options, which is found anew where they have changed."""

    def __init__(self) -> None:
        self._options: dict[str, Any] | None = None
        self._code = 0

    def of(self, options: Mapping[str, Any]) -> int:
        """What options have in common that are equal up to `DIGITS` digits: of `CODE_BITS` bits, and hardly ever 0."""
        if options != self._options:
            self._code = zlib.crc32(repr(sorted((name, _plain(value)) for name, value in options.items())).encode())
            # a list, which may change in place, equals no tuple
            self._options = {
                name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
            }
        return self._code


def steps_code(steps: int, code: int) -> int:
    """What numbers of steps have in common that are equal, and of which the last went by options of equal `code`: of 63
    bits, not negative."""
    return (steps & MOST_STEPS) << CODE_BITS | code


def _plain(value: Any) -> Any:
    """The value, however it is written."""
    if isinstance(value, (tuple, list)):
        return [*map(_plain, value)]
    return f"{float(value):.{DIGITS}g}" if is_number(value) else value
