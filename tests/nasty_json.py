"""A stored JSON value, wrong in one place at a time: what readers of files have to refuse."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

DEEP = "@nested 10,000 deep@"  # Python writes no such JSON: `text_of` puts it in
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 7, 1.5, float("nan"), float("inf"), 2**31, 2**32, 2**48, 2**61, 2**63 - 1, 2**63,
    2**64, 2**70, 10**4000, "", "x", "../x", "/etc/passwd", "clock", "\ud800", [], [None], [[]], [0], {}, {"": 0}, DEEP,
)  # fmt: skip


def text_of(value: Any) -> str:
    """The spelling that checksums are of."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return text.replace(json.dumps(DEEP), "[" * 10_000 + "]" * 10_000)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all nodes and leaves of `value`."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from paths_of(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of `value` with `new` at `path`."""
    if not path:
        return new
    result = copy.deepcopy(value)
    at = result
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return result


def without(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of `value` that lacks what is at `path`."""
    result = copy.deepcopy(value)
    at = result
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return result


def wrong_values(value: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """(path, what is there, all of it): each node replaced by each of `VALUES`, left out, and given a key more."""
    for path in paths_of(value):
        node: Any = value
        for key in path:
            node = node[key]
        for new in VALUES:
            if text_of(new) != text_of(node):
                yield path, new, changed(value, path, new)
        if path:
            yield path, "left out", without(value, path)
        if isinstance(node, dict):
            yield path, "a key more", changed(value, path, node | {"unknown": 1})
        if isinstance(node, list):
            yield path, "an item more", changed(value, path, [*node, *node[-1:]])
