"""Strict reading of stored JSON: a right checksum proves that it is unchanged, not which program wrote it.

Errors are `ValueError`s that name the place, the value and what is allowed. The reader of a file turns them into errors
of that file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from typing import Any

from tieredemb.errors import shown

MAX_DEPTH = 100  # of arrays and objects in one another: far below where Python's recursion ends
MAX_GIVEN_DEPTH = MAX_DEPTH - 10  # of what a caller gives, which is stored inside of other objects
MAX_INTEGER = 2**63 - 1


def parse(data: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises `ValueError` for any other, for keys that occur twice, and for one that
    is nested too deeply. NaN and the infinities are read: a user's own values may hold them."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    check_depth(value, MAX_DEPTH)
    return value


def check_depth(value: Any, most: int) -> None:
    """Raises `ValueError` if arrays and objects are nested more than `most` deep. It works level by level, as it guards
    against recursion."""
    level = [value]
    for _ in range(most + 1):
        level = [outer for outer in level if isinstance(outer, (dict, list))]
        if not level:
            return
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    raise ValueError(f"it is nested more than {most} deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(key)} occurs twice in an object")
    return fields


def fields_of(value: Any, name: str, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """`value`, which has to be an object of these keys."""
    fields = object_of(value, name)
    if missing := sorted(set(required) - set(fields)):
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    if unknown := sorted(set(fields) - set(required) - set(optional)):
        raise ValueError(f"{name} has {shown(unknown[0])}, which this library does not know")
    return fields


def object_of(value: Any, name: str) -> dict[str, Any]:
    """`value`, which has to be an object, of any keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)} and must be an object")
    return value


def list_of(value: Any, name: str) -> list[Any]:
    """`value`, which has to be an array."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {shown(value)} and must be an array")
    return value


def text_of(value: Any, name: str) -> str:
    """`value`, which has to be a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {shown(value)} and must be a string")
    return value


def integer_of(value: Any, name: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """`value`, which has to be an integer from `low` to `high`; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)} and must be an integer from {low} to {high}")
    return value
