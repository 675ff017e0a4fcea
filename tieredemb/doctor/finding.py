"""One fact about the machine, as people and programs read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "missing", "unknown"]
Value = int | float | str | bool | None
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about the machine. `install`: the command (or the advice) that mends a status "missing", else
    "". `values`: the same fact for programs, sizes in bytes."""

    name: str
    status: Status
    detail: str
    install: str = ""
    values: dict[str, Value] = field(default_factory=dict)


Check = Callable[[], list[Finding]]


def ok(name: str, detail: str, **values: Value) -> Finding:
    return Finding(name=name, status="ok", detail=detail, values=values)


def missing(name: str, detail: str, install: str, **values: Value) -> Finding:
    return Finding(name=name, status="missing", detail=detail, install=install, values=values)


def unknown(name: str, error: Exception) -> Finding:
    return Finding(name=name, status="unknown", detail=f"{type(error).__name__}: {error}")
