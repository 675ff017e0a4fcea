"""The header of a row file: which version wrote it, the meaning of rows, its set of files, whether its last owner
closed it, and the extent of the history of an optimizer's steps."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from typing import Any

from tieredemb.errors import ConfigError, shown
from tieredemb.kernels.row_format import encodings
from tieredemb.storage.base import Metadata, RowLayout
from tieredemb.storage.stored_json import (
    MAX_GIVEN_DEPTH,
    check_depth,
    fields_of,
    integer_of,
    list_of,
    object_of,
    text_of,
)

_IDENTITY = re.compile("[0-9a-f]{32}")
_MOST_BYTES = 2**63 - 1


@dataclass(frozen=True)
class Membership:
    """The place of a row file in its set, all files of one module or conversion.

    `identity`: of the set, 32 hexadecimal digits · `generation`: it grows by one in each session that uses rows of the
    set · `member`: the suffix of the file's name after that of the set · `members`: of all files · `left`: the
    generations of files that were closed before rows of the others were used in this session.
    """

    identity: str
    generation: int
    member: str
    members: tuple[str, ...]
    left: dict[str, int]

    @classmethod
    def from_json(cls, value: Any, name: str) -> Membership:
        """Raises `ValueError` if it is invalid."""
        fields = fields_of(value, name, ("identity", "generation", "member", "members", "left"))
        identity, member = text_of(fields["identity"], f"{name}.identity"), text_of(fields["member"], f"{name}.member")
        if not _IDENTITY.fullmatch(identity):
            raise ValueError(f"{name}.identity is {shown(identity)} and must be 32 hexadecimal digits")
        members = tuple(text_of(each, f"{name}.members") for each in list_of(fields["members"], f"{name}.members"))
        if len(set(members)) < len(members) or member not in members:
            raise ValueError(f"{name}.members must hold different names, {shown(member)} among them")
        left = {
            each: integer_of(generation, f"{name}.left")
            for each, generation in object_of(fields["left"], f"{name}.left").items()
        }
        return cls(identity, integer_of(fields["generation"], f"{name}.generation"), member, members, left)


@dataclass(frozen=True)
class Extent:
    """Bytes of the file behind its rows: where they start, how many, and their checksum."""

    start: int
    size_bytes: int
    crc32: int

    @classmethod
    def from_json(cls, value: Any, name: str) -> Extent:
        """Raises `ValueError` if it is invalid."""
        fields = fields_of(value, name, ("start", "size_bytes", "crc32"))
        return cls(
            integer_of(fields["start"], f"{name}.start"),
            integer_of(fields["size_bytes"], f"{name}.size_bytes", low=1, high=_MOST_BYTES),
            integer_of(fields["crc32"], f"{name}.crc32", high=2**32 - 1),
        )

    @property
    def stop(self) -> int:
        return self.start + self.size_bytes


@dataclass(frozen=True)
class Header:
    """The content of a slot. `layout` and `identity` are fixed at creation.

    `filled`: whether all initial rows of a module are in the file: else it has no data to lose · `size_bytes`: of the
    whole file when this was written · `membership`: None in files of version 1 · `beside`: in those, the checksum of
    the history in a separate file, 0 without one.
    """

    layout: dict[str, Any]
    identity: dict[str, Any]
    metadata: Metadata
    clean: bool
    pid: int
    membership: Membership | None = None
    filled: bool = True
    size_bytes: int = 0
    history: Extent | None = None
    beside: int = 0

    def to_json(self) -> bytes:
        """The text of a slot."""
        fields = asdict(self) | {"metadata": self.metadata.to_json()}
        del fields["beside"]
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def from_json(cls, value: Any, version: int) -> Header:
        """The header that a slot of such a version holds. Raises `ValueError`: nothing in it is used before all of it
        is known to be right."""
        of_sets = ("membership", "filled", "size_bytes", "history") if version > 1 else ()
        fields = fields_of(value, "it", ("layout", "identity", "metadata", "clean", "pid", *of_sets))
        layout_of(fields["layout"], "layout")
        for name in ("clean", "filled"):
            if not isinstance(fields.get(name, True), bool):
                raise ValueError(f"{name} is {shown(fields[name])} and must be true or false")
        metadata, beside = object_of(fields["metadata"], "metadata"), 0
        if version == 1:
            beside = integer_of(metadata.get("history", 0), "metadata.history", high=2**32 - 1)
        history = fields.get("history")
        return cls(
            layout=fields["layout"],
            identity=object_of(fields["identity"], "identity"),
            metadata=Metadata.from_json(metadata, "metadata"),
            clean=fields["clean"],
            pid=integer_of(fields["pid"], "pid"),
            membership=Membership.from_json(fields["membership"], "membership") if of_sets else None,
            filled=fields.get("filled", True),
            size_bytes=integer_of(fields["size_bytes"], "size_bytes", low=1) if of_sets else 0,
            history=None if history is None else Extent.from_json(history, "history"),
            beside=beside,
        )


def plain_metadata(metadata: Metadata) -> Metadata:
    """A copy that JSON can hold: counters may have become numpy integers."""
    return Metadata(int(metadata.batch), [int(step) for step in metadata.steps], metadata.policy)


def layout_fields(layout: RowLayout) -> dict[str, Any]:
    """The layout as it is stored and compared."""
    fields = {"rows": layout.rows, "width": layout.width, "state_width": layout.state_width}
    return fields | {"dtype": layout.encoding.name, "byteorder": sys.byteorder}


def layout_of(value: Any, name: str) -> RowLayout:
    """The layout of such fields. Raises `ValueError` for what are none."""
    sizes = ("rows", "width", "state_width")
    fields = fields_of(value, name, (*sizes, "dtype", "byteorder"))
    known = encodings()
    for key, allowed in (("dtype", list(known)), ("byteorder", ["little", "big"])):
        if text_of(fields[key], f"{name}.{key}") not in allowed:
            raise ValueError(f"{name}.{key} is {shown(fields[key])} and must be one of {', '.join(allowed)}")
    rows, width, state_width = (integer_of(fields[key], f"{name}.{key}") for key in sizes)
    return RowLayout(rows=rows, width=width, state_width=state_width, dtype=known[fields["dtype"]])


def jsonable(value: Any, what: str) -> Any:
    """`value` as JSON returns it (tuples become lists). Raises `ConfigError` for values that JSON cannot hold, or that
    are nested too deeply to be read again."""
    try:
        result = json.loads(json.dumps(value))
        check_depth(result, MAX_GIVEN_DEPTH)
    except RecursionError:
        raise ConfigError(f"{what} is nested more than {MAX_GIVEN_DEPTH} deep; flatten it") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} must hold only what JSON can store: {error}") from error
    return result


def difference(stored: Any, wanted: Any, name: str, *, stored_in: str = "the file") -> str | None:
    """The first field in which two JSON values differ, in words; None when they are equal."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in sorted({*stored, *wanted}):
            if key not in stored:
                return f"this model has {name}.{key}, which {stored_in} lacks"
            if key not in wanted:
                return f"{stored_in} has {name}.{key}, which this model lacks"
            if found := difference(stored[key], wanted[key], f"{name}.{key}", stored_in=stored_in):
                return found
        return None
    if isinstance(stored, list) and isinstance(wanted, list) and len(stored) == len(wanted):
        for i, (one, other) in enumerate(zip(stored, wanted, strict=True)):
            if found := difference(one, other, f"{name}[{i}]", stored_in=stored_in):
                return found
        return None
    if type(stored) is not type(wanted) or stored != wanted:
        return f"{name} is {stored!r} in {stored_in} and {wanted!r} in this model"
    return None
