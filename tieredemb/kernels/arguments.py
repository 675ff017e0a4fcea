"""The arguments of a launch and their packing, derived from the kernel's parameters in the source.

A pointer takes a tensor of its type, or an address: an int, 0 for none. A struct is passed as a value of the type that
`struct_type` makes of its fields. All of this is derived once for each kernel, not in a launch.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from tieredemb.errors import InvalidInputError
from tieredemb.kernels.source import Source, SourceError, Type, read

PACKED = {  # numbers as `struct` packs them
    **{"int": "i", "unsigned int": "I", "long long": "q", "unsigned long long": "Q", "float": "f", "double": "d"}
}
ADDRESS = "q"
DTYPES = {  # of what a pointer points to: torch computes with signed integers, so they stand for unsigned ones too
    **{"unsigned char": torch.uint8, "int": torch.int32, "unsigned int": torch.int32, "int4": torch.int32},
    **{"long long": torch.int64, "unsigned long long": torch.int64, "float": torch.float32, "double": torch.float64},
}
WORD_DTYPES = (torch.int32, torch.float32)  # of a `word_t`
OF_ANY_DTYPE = ("row_t", "out_t", "void")
LOWEST_ADDRESS = 2**32  # kernels reach no lower addresses: a smaller number is not an address, but a misplaced argument


class Argument(NamedTuple):
    """One argument. `declared`: its declaration in the source · `packed`: its format for `struct` · `alignment`: in
    bytes · `dtypes`: of a tensor if it is a pointer, None for any · `points_to`: the alignment behind a pointer, 0 for
    no pointer · `whole`: the type of a struct's values · `numbers`: length of an array in a struct, 0 for none."""

    name: str
    declared: str
    packed: str
    alignment: int
    dtypes: tuple[torch.dtype, ...] | None = ()
    points_to: int = 0
    whole: type[StructValue] | None = None
    numbers: int = 0

    def takes(self, given: Any, device: int) -> bool:
        """Whether `given` may stand there in a launch on `device`."""
        if self.numbers:
            return len(given) == self.numbers and all(isinstance(each, (int, np.integer)) for each in given)
        if self.whole is not None:
            return type(given) is self.whole and all(
                part.takes(field, device) for part, field in zip(self.whole.parts, given.fields, strict=True)
            )
        if isinstance(given, torch.Tensor):
            has_dtype = self.points_to and (self.dtypes is None or given.dtype in self.dtypes)
            return bool(has_dtype and given.get_device() == device and given.is_contiguous())
        if self.points_to:
            is_address = isinstance(given, int) and given >= LOWEST_ADDRESS and given % self.points_to == 0
            return is_address or (isinstance(given, int) and given == 0)
        return isinstance(given, (int, float, np.number) if self.packed in "fd" else (int, np.integer))

    def wanted(self) -> str:
        """What it takes, in words."""
        if self.whole is not None:
            return f"a {self.whole.__name__} of such fields"
        if not self.points_to:
            return "a number" if self.packed in "fd" else "an integer"
        dtypes = "" if self.dtypes is None else " or ".join(str(dtype) for dtype in self.dtypes) + " "
        return f"an address or a contiguous {dtypes}tensor"


class StructValue(bytes):
    """A struct's bytes, as kernels take them, and the `fields` that they were made of: it keeps their tensors."""

    fields: tuple[Any, ...]
    parts: ClassVar[tuple[Argument, ...]]
    packing: ClassVar[struct.Struct]
    names: ClassVar[dict[str, None]]  # of the fields, in their order
    has_arrays: ClassVar[bool]

    def __new__(cls, **fields: Any) -> StructValue:
        if fields.keys() != cls.names.keys():
            raise InvalidInputError(f"a {cls.__name__} has the fields {', '.join(cls.names)}; got {', '.join(fields)}")
        given = tuple([fields[name] for name in cls.names])
        values = values_of(given)
        if cls.has_arrays:
            each = [value if part.numbers else (value,) for part, value in zip(cls.parts, values, strict=True)]
            values = [*itertools.chain.from_iterable(each)]
        made = super().__new__(cls, cls.packing.pack(*values))
        made.fields = given
        return made


class Signature:
    """The parameters of a kernel. `packing`: of all arguments in a row · `starts`: where each begins there."""

    def __init__(self, kernel: str, arguments: Sequence[Argument]) -> None:
        self.kernel = kernel
        self.arguments = tuple(arguments)
        self.packing, self.starts = _packing(arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    def check(self, given: Sequence[Any], device: int) -> None:
        """Raises `InvalidInputError` for the first argument that does not fit."""
        for position, (one, argument) in enumerate(zip(given, self.arguments, strict=True)):
            if not argument.takes(one, device):
                got = f"a {one.dtype} tensor" if isinstance(one, torch.Tensor) else f"{type(one).__name__} {one!r}"
                raise InvalidInputError(
                    f"argument {position} of {self.kernel} ({argument.declared}) must be {argument.wanted()} on "
                    f"cuda:{device}, got {got}"
                )


def values_of(arguments: Iterable[Any]) -> list[Any]:
    """What is packed of each: of a tensor its address."""
    return [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]


@functools.cache
def signature(file: str, kernel: str) -> Signature:
    """What a kernel of a `.cu` file takes."""
    source = read(file)
    return Signature(
        kernel, [_argument(source, each.name, each.type, each.place) for each in source.parameters(kernel)]
    )


@functools.cache
def struct_type(file: str, name: str) -> type[StructValue]:
    """The type of the values of a struct that kernels of a `.cu` file take whole: called with its fields by name."""
    source = read(file)
    layout = source.layout(name)
    parts = tuple(_array(_argument(source, field.name, field.type, file), field.counts) for field in layout.fields)
    packing, starts = _packing(parts, layout.size)
    if starts != [field.offset for field in layout.fields]:
        raise SourceError(f"{file}: {name} cannot be given whole: it has arrays of arrays, or bytes between its fields")
    names = dict.fromkeys(part.name for part in parts)
    has_arrays = any(part.numbers for part in parts)
    return type(name, (StructValue,), {"parts": parts, "packing": packing, "names": names, "has_arrays": has_arrays})


def _array(argument: Argument, counts: tuple[int, ...]) -> Argument:
    """An argument, or an array of such numbers."""
    if len(counts) != 1 or argument.packed not in ("i", "q"):
        return argument
    return argument._replace(packed=f"{counts[0]}{argument.packed}", numbers=counts[0])


def _argument(source: Source, name: str, type: Type, place: str) -> Argument:
    resolved = source.resolve(type, place)
    size, alignment = source.size(type, place)
    declared = f"{type.name} {'*' * type.pointer}{name}"
    if type.pointer:
        pointed = source.pointed(type)
        dtypes = _dtypes(source, pointed.name, source.resolve(Type(pointed.name, True), place))
        points_to = 1 if dtypes is None else source.size(pointed, place)[1]
        return Argument(name, declared, ADDRESS, alignment, dtypes, points_to)
    if resolved in source.structs:
        return Argument(name, declared, f"{size}s", alignment, whole=struct_type(source.file, resolved))
    if resolved not in PACKED:
        raise SourceError(f"{place}: a {type.name} cannot be given to a kernel")
    return Argument(name, declared, PACKED[resolved], alignment)


def _dtypes(source: Source, name: str, resolved: str) -> tuple[torch.dtype, ...] | None:
    """Of the tensors that a pointer may be given; of a struct's by its first field."""
    if name in OF_ANY_DTYPE:
        return None
    if name == "word_t":
        return WORD_DTYPES
    if resolved in source.structs:
        first = next(source.leaves(resolved))
        resolved = "long long" if first.type.pointer else source.resolve(first.type, name)
    return (DTYPES[resolved],)


def _packing(arguments: Sequence[Argument], size: int = 0) -> tuple[struct.Struct, list[int]]:
    """How arguments are packed one behind the other, each where C aligns it, and where each starts; filled up to
    `size` bytes."""
    format, starts, end = "@", [], 0
    for argument in arguments:
        starts.append(-(-end // argument.alignment) * argument.alignment)
        format += f"{starts[-1] - end}x{argument.packed}"
        end = starts[-1] + struct.calcsize(argument.packed)
    return struct.Struct(format + f"{max(0, size - end)}x"), starts
