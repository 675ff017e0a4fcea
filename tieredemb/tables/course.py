"""What updates of tables go by, in few bits: ranks that hold parts of the same tables compare it, as rows that go by
other options, or take other steps, are none of the others' model."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from tieredemb.config import is_number

CODE_BITS = 32
MOST_STEPS = (1 << 31) - 1


def code_of(options: Mapping[str, Any]) -> int:
    """What equal options have in common: of `CODE_BITS` bits, and hardly ever 0."""
    return zlib.crc32(repr(sorted((name, _plain(value)) for name, value in options.items())).encode())


def course_of(steps: int, code: int) -> int:
    """What equal numbers of steps have in common, of which the last went by options of that `code`: of 63 bits, not
    negative."""
    return (steps & MOST_STEPS) << CODE_BITS | code


def _plain(value: Any) -> Any:
    """The value, however it is written."""
    if isinstance(value, (tuple, list)):
        return [*map(_plain, value)]
    return float(value) if is_number(value) else value
