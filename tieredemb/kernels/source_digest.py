"""A digest of a kernel's sources: its file, and all files of the package that it imports, directly or not.

A kernel's machine code contains device functions and constants of any of them. The digest is of the content, as an edit
may keep size and time. Python itself checks only those, and after such an edit runs older code (`__pycache__`), which
then counts too. A first step reads 38 files, in 6 milliseconds.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tieredemb.kernels import IMPORTED

CLOCK = 0.05  # seconds that a file's time of change may be behind the clock: the kernel's ticks
MARGIN = 0.5  # seconds: Python takes less from reading a file to writing its compiled code
_IMPORT = re.compile(
    rb"^(?P<indent>[ \t]*)(?:from[ \t]+(?P<source>[\w.]+)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#]+)"
    rb"|import[ \t]+(?P<modules>[^\n#]+))",
    re.MULTILINE,
)
_COMMENT = re.compile(rb"#[^\n]*")


class NoDigestError(Exception):
    """The source files of a kernel cannot be determined. The message says why."""


@dataclass(frozen=True)
class _File:
    """A module's file. `source`: its digest · `compiled`: of code that Python may run in its place · `imports`: what it
    imports, and whether that is always run with the module."""

    path: str
    source: str
    compiled: str
    imports: dict[str, bool]


@functools.cache
def source_digest(module: str, further: tuple[str, ...] = ()) -> str:
    """Digest of a module's file and all that it imports, and of `further` modules that its kernels use. Raises
    `NoDigestError`."""
    for name in further:
        importlib.import_module(name)  # by which its file is known
    start = (module, *further)
    reached, run = _reached(start, only_run=False), _reached(start, only_run=True)
    text = [f"{name} {_read(name).source} {_read(name).compiled if name in run else ''}" for name in sorted(reached)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _reached(start: Iterable[str], *, only_run: bool) -> set[str]:
    reached, todo = set(start), list(start)
    while todo:
        new = {name for name, has_run in _read(todo.pop()).imports.items() if has_run or not only_run} - reached
        reached |= new
        todo += new
    return reached


@functools.cache
def _read(module: str) -> _File:
    path, top = _path_of(module), module.partition(".")[0]
    if path is None or not path.endswith(".py"):
        raise NoDigestError(f"the source of {module} is not there")
    try:
        with open(path, "rb") as file:
            source, info = file.read(), os.fstat(file.fileno())
    except OSError as error:
        raise NoDigestError(f"the source of {module} cannot be read ({error.strerror})") from error
    if info.st_ctime > IMPORTED - CLOCK:
        raise NoDigestError(f"files of {top} were changed after this process imported tieredemb; start a new process")
    compiled = _compiled_before(path, info)
    imports: dict[str, bool] = {}
    for name, has_run in _imports_of(source):
        if name.partition(".")[0] in ("tieredemb", top) and (found := _module_of(name)):
            imports[found] = imports.get(found, False) or has_run
    imports.pop(module, None)
    return _File(path, hashlib.sha256(source).hexdigest(), hashlib.sha256(compiled).hexdigest(), imports)


def _compiled_before(path: str, info: os.stat_result) -> bytes:
    """What Python takes for a file's compiled form though it may be of an earlier content: it bears the file's time and
    size, but is not younger than the file's last change. Nothing where there is none."""
    try:
        with open(importlib.util.cache_from_source(path), "rb") as file:
            header, compiled, written = file.read(16), file.read(), os.fstat(file.fileno()).st_ctime
    except (OSError, NotImplementedError):
        return b""
    flags, *known = struct.unpack("<3I", header[4:].ljust(12, b"\0"))
    is_by_time = flags == 0  # otherwise by a hash of the source, which may go unchecked: importlib's documentation
    is_taken = known == [int(info.st_mtime) & 0xFFFFFFFF, info.st_size & 0xFFFFFFFF]
    return b"" if is_by_time and (not is_taken or written > info.st_ctime + MARGIN) else compiled


def _imports_of(source: bytes) -> Iterator[tuple[str, bool]]:
    """Dotted names that a file imports, and whether the import stands outside of functions and conditions. `from a
    import b` yields `a.b`."""
    for found in _IMPORT.finditer(source):
        has_run = not found["indent"]
        names = _COMMENT.sub(b"", found["names"] or found["modules"]).decode().strip("()\n ").split(",")
        prefix = f"{found['source'].decode()}." if found["source"] else ""
        yield from ((prefix + words[0], has_run) for name in names if (words := name.split()))


def _module_of(name: str) -> str | None:
    """The module that an imported name is, or is of."""
    while name and _path_of(name) is None:
        name = name.rpartition(".")[0]
    return name or None


@functools.cache
def _path_of(module: str) -> str | None:
    """The file of a module, whether it was imported or not, or None."""
    top, *parts = module.split(".")
    base: str | None = getattr(sys.modules.get(top), "__file__", None)
    if base is None:
        return None
    if not parts:
        return os.path.abspath(base)
    stem = os.path.join(os.path.dirname(os.path.abspath(base)), *parts)
    return next((path for path in (f"{stem}.py", os.path.join(stem, "__init__.py")) if os.path.isfile(path)), None)
