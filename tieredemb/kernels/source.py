"""Reads our own CUDA sources: the parameters of kernels, and the layouts of structs.

They are written only in the source; the host reads them here. Only the syntax of our files is understood: all else is a
`SourceError` with file and line, never a guess. No flag is known here, so what is under a condition (a row's type, all
that depends on a width), or has fields that a flag names or a base has, has a name and no size.
`tests/kernels/test_source.py` compares the results with the compiler.

Numbers that both sides use go the other way: `constants.cuh` is made from `constants.py`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from tieredemb.errors import TieredEmbError
from tieredemb.kernels import constants

PACKAGE = Path(__file__).resolve().parents[1]
POINTER_BYTES = 8
CONSTANTS = "constants.cuh"  # a generated header

TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<directive>\#(?:\\\n|[^\n])*)
      | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
      | (?P<name>[A-Za-z_]\w*)
      | (?P<number>(?:0[xX][0-9A-Fa-f]+(?:[pP][+-]?\d+)?|\.?\d[\d.]*(?:[eE][+-]?\d+)?)[A-Za-z]*)
      | (?P<mark><<|>>|.)""",
    re.VERBOSE | re.DOTALL,
)
BRACE = re.compile(r"""[{}]|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""", re.DOTALL)
INCLUDE = re.compile(r'^#include "([^"]*)"[^\n]*\n', re.MULTILINE)
DIRECTIVE = re.compile(r"#\s*(\w+)\s*([^\s(]*)(\(?)\s*(.*?)\s*(?://.*)?", re.DOTALL)
INTEGER = re.compile(r"(0[xX][0-9A-Fa-f]+|0|[1-9]\d*)[uUlL]*")
OPERATORS = ("+", "-", "*", "<<", ">>", "(", ")")  # of sizes; they bind in Python as in C

SIZES = {  # built-in types; all are aligned to their size
    **{"bool": 1, "char": 1, "unsigned char": 1, "short": 2, "unsigned short": 2, "int": 4, "unsigned int": 4},
    **{"float": 4, "double": 8, "long long": 8, "unsigned long long": 8, "int4": 16, "uint4": 16},
}
WORDS_OF_TYPES = {word for name in SIZES for word in name.split()}
QUALIFIERS = ("const", "volatile", "__grid_constant__")
FUNCTION = ("__device__", "__host__", "template")  # what ours begin with


class SourceError(TieredEmbError, ValueError):
    """A CUDA source of ours is not understood, or lacks a requested name."""


class Token(NamedTuple):
    kind: str
    text: str
    place: str  # file:line


class Type(NamedTuple):
    """A type by its name; of a pointer, the name of the type that it points to."""

    name: str
    pointer: bool


class Parameter(NamedTuple):
    """What a kernel takes."""

    name: str
    type: Type
    place: str


class Field(NamedTuple):
    """A struct's field, `offset` bytes from its start. `counts`: of an array, its dimensions."""

    name: str
    type: Type
    counts: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The offsets of a struct's fields, in bytes."""

    name: str
    fields: tuple[Field, ...]
    size: int
    alignment: int

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise SourceError(f"struct {self.name} has no field {name}; it has {[field.name for field in self.fields]}")


class _Struct(NamedTuple):
    alignment: list[Token]
    fields: list[tuple[Token, Type, list[list[Token]]]]  # name, type and dimensions


class _Kernel(NamedTuple):
    bounds: list[list[Token]]
    parameters: list[Parameter]


# --- text -------------------------------------------------------------------------------------------------------------


@functools.cache
def headers() -> dict[str, str]:
    """The paths of our headers inside the package, by the names that they are included by."""
    paths = {path.name: path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.cuh"))}
    return paths | {CONSTANTS: CONSTANTS}


def header(name: str, place: str) -> str:
    """The path of the header that is included as `name` at `place`."""
    if name not in headers():
        raise SourceError(f"{place}: there is no header {name!r}; there are {', '.join(headers())}")
    return headers()[name]


@functools.cache
def constants_header() -> str:
    """The numbers of `constants.py`, as C knows them: an int where it can be one, or a double."""
    lines = []
    for name, value in vars(constants).items():
        if name.isupper() and isinstance(value, int):
            type = "int" if value < 2**31 else "unsigned int"
            text = f"{value + 1} - 1" if value < 0 else f"{value}{'u' * (value >= 2**31)}"  # C has no literal of −2³¹
            lines.append(f"[[maybe_unused]] constexpr {type} {name} = {text};\n")
        elif name.isupper() and isinstance(value, float):
            lines.append(f"[[maybe_unused]] constexpr double {name} = {value!r};\n")
    return "".join(lines)


def _own_text(file: str) -> str:
    return constants_header() if file == CONSTANTS else (PACKAGE / file).read_text()


def text(file: str) -> str:
    """Text of a `.cu` file, given its path inside the package, with its headers put in, each once: CuPy's cache of
    compiled code looks at the text alone, and would not notice a changed include."""
    seen: set[str] = set()

    def put_in(match: re.Match[str]) -> str:
        path = header(match[1], file)
        if path in seen:
            return ""
        seen.add(path)
        return INCLUDE.sub(put_in, _own_text(path).replace("#pragma once", ""))

    return INCLUDE.sub(put_in, _own_text(file))


@functools.cache
def _tokens(file: str) -> list[Token]:
    """What stands in a file. Of the bodies of functions, which are nearly all of it, the braces are left."""
    text, found, line, at = _own_text(file), [], 1, 0
    first, depth = "", 0  # word of a declaration, and the braces around
    while match := TOKEN.match(text, at):
        kind, part, at = str(match.lastgroup), match[0], match.end()
        if kind != "space":
            found.append(Token(kind, part, f"{file}:{line}"))
        line += part.count("\n")
        if kind in ("space", "directive"):
            continue
        first = first or part
        depth += (part == "{") - (part == "}")
        if part == "{" and first != "struct":
            end = _body_end(text, at, found[-1].place)
            line += text.count("\n", at, end)
            at, depth = end, depth - 1
            found.append(Token(kind, "}", f"{file}:{line}"))
        if depth == 0 and part in (";", "{", "}"):
            first = ""
    return found


def _body_end(text: str, at: int, place: str) -> int:
    """Where the braces that were opened before `at` are closed again."""
    depth = 1
    for match in BRACE.finditer(text, at):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.end()
    raise SourceError(f"{place}: the file ends in the middle of a declaration")


# --- what a file declares ---------------------------------------------------------------------------------------------


@functools.cache
def read(file: str) -> Source:
    """A `.cu` file, given its path inside the package, read once."""
    return Source(file)


class Source:
    """The declarations of a `.cu` file and its headers. Types and sizes are evaluated when they are requested."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._types: dict[str, str] = {}
        self._values: dict[str, list[Token]] = {}  # of constants and macros
        self._structs: dict[str, _Struct] = {}
        self._kernels: dict[str, _Kernel] = {}
        self._conditional: set[str] = set()  # names under a condition
        self._flagged: dict[str, Type] = {}  # of structs whose fields a flag names: the fields' type
        self._layouts: dict[str, Layout] = {}
        self._included = {file}
        _Reader(self, file).read()

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(self._kernels)

    @property
    def structs(self) -> tuple[str, ...]:
        return tuple(self._structs)

    def parameters(self, kernel: str) -> tuple[Parameter, ...]:
        """What a kernel takes, in order."""
        found = tuple(self._kernel(kernel).parameters)
        for each in found:
            self.resolve(each.type, each.place)
        return found

    def bounds(self, kernel: str) -> tuple[int, ...]:
        """A kernel's `__launch_bounds__`: threads of a block, and blocks of a multiprocessor; nothing without them."""
        return tuple(self._value(tokens, kernel) for tokens in self._kernel(kernel).bounds)

    def layout(self, struct: str) -> Layout:
        """The layout of a struct."""
        if struct not in self._layouts:
            if struct not in self._structs:
                raise SourceError(f"{self.file}: there is no struct {struct}; there are {', '.join(self._structs)}")
            self._refuse_conditional(struct, self.file)
            self._layouts[struct] = self._lay_out(struct, self._structs[struct])
        return self._layouts[struct]

    def leaves(self, struct: str) -> Iterator[Field]:
        """The fields of a struct, with nested structs expanded; all offsets from its start."""
        for field in self.layout(struct).fields:
            if field.type.pointer or field.counts or field.type.name not in self._structs:
                yield field
            else:
                for leaf in self.leaves(field.type.name):
                    yield leaf._replace(offset=field.offset + leaf.offset)

    def size(self, type: Type, place: str) -> tuple[int, int]:
        """Size and alignment of a type, in bytes."""
        if type.pointer:
            return POINTER_BYTES, POINTER_BYTES
        self._refuse_conditional(type.name, place)
        name = self.resolve(type, place)
        if name not in self._structs:
            return SIZES[name], SIZES[name]
        return self.layout(name).size, self.layout(name).alignment

    def resolve(self, type: Type, place: str) -> str:
        """The name of the type behind a typedef's. Refuses one that is declared nowhere."""
        name = type.name
        while name in self._types:
            name = self._types[name]
        if name not in SIZES and name not in self._structs and not (type.pointer and name == "void"):
            raise SourceError(f"{place}: type {name!r} is declared nowhere")
        return name

    def pointed(self, type: Type) -> Type:
        """What a pointer points to: of a struct whose fields, all of one type, a flag names, a field."""
        return self._flagged.get(self.resolve(type, self.file), Type(type.name, False))

    def _kernel(self, name: str) -> _Kernel:
        if name not in self._kernels:
            raise SourceError(f"{self.file}: there is no kernel {name}; there are {', '.join(self._kernels)}")
        self._refuse_conditional(name, self.file)
        return self._kernels[name]

    def _refuse_conditional(self, name: str, place: str) -> None:
        if name in self._conditional:
            raise SourceError(f"{place}: {name} stands under a condition; what it is depends on flags, unknown here")

    def _lay_out(self, name: str, struct: _Struct) -> Layout:
        fields: list[Field] = []
        end, alignment = 0, self._value(struct.alignment, name) if struct.alignment else 1
        for token, type, dimensions in struct.fields:
            each, own_alignment = self.size(type, token.place)
            counts = tuple(self._value(dimension, token.place) for dimension in dimensions)
            start = -(-end // own_alignment) * own_alignment
            fields.append(Field(token.text, type, counts, start, each * math.prod(counts)))
            end, alignment = start + fields[-1].size, max(alignment, own_alignment)
        size = -(-max(end, 1) // alignment) * alignment  # an empty one has a byte
        return Layout(name, tuple(fields), size, alignment)

    def _value(self, tokens: list[Token], place: str) -> int:
        """The value of an expression of integers and names."""
        parts = []
        for token in tokens:
            integer = INTEGER.fullmatch(token.text)
            if integer:
                parts.append(integer[1])
            elif token.text in OPERATORS:
                parts.append(token.text)
            elif token.text in self._values:
                self._refuse_conditional(token.text, token.place)
                parts.append(f"({self._value(self._values[token.text], token.place)})")
            else:
                _refuse(token, "in a size")
        try:
            return int(eval("".join(parts), {"__builtins__": {}}))
        except SyntaxError:
            raise SourceError(f"{place}: {' '.join(parts)!r} is no size") from None


class _Reader:
    """Reads the declarations of one file into a `Source`. Bodies of functions are passed over."""

    def __init__(self, source: Source, file: str) -> None:
        self._source = source
        self._tokens = _tokens(file)
        self._at = 0
        self._conditions = 0  # that the next token stands under

    def read(self) -> None:
        while self._at < len(self._tokens):
            self._declaration()

    # --- tokens -----------------------------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _take(self) -> Token:
        if self._at == len(self._tokens):
            raise SourceError(f"{self._tokens[-1].place}: the file ends in the middle of a declaration")
        self._at += 1
        return self._tokens[self._at - 1]

    def _takes(self, *texts: str) -> bool:
        """Takes the next tokens if they are these."""
        found = [token.text for token in self._tokens[self._at : self._at + len(texts)]] == [*texts]
        self._at += len(texts) * found
        return found

    def _expect(self, text: str) -> None:
        token = self._take()
        if token.text != text:
            _refuse(token, f"where {text!r} should stand")

    def _name(self) -> Token:
        token = self._take()
        if token.kind != "name":
            _refuse(token, "where a name should stand")
        return token

    def _declared(self) -> str:
        """Takes a name that is declared here, once or under conditions."""
        token, source = self._name(), self._source
        known = any(token.text in names for names in (source._types, source._structs, source._values, source._kernels))
        if known and not (self._conditions and token.text in source._conditional):
            _refuse(token, "where it is declared again")
        if self._conditions:
            source._conditional.add(token.text)
        return token.text

    def _upto(self, *ends: str) -> list[Token]:
        """Takes the tokens before the first of `ends` outside of brackets."""
        found: list[Token] = []
        depth = 0
        while depth or self._peek() not in ends:
            token = self._take()
            depth += (token.text in ("(", "[", "{")) - (token.text in (")", "]", "}"))
            found.append(token)
        return found

    def _between(self, opening: str, closing: str) -> list[Token]:
        self._expect(opening)
        found = self._upto(closing)
        self._expect(closing)
        return found

    # --- declarations -----------------------------------------------------------------------------------------------

    def _declaration(self) -> None:
        token = self._tokens[self._at]
        if token.kind == "directive":
            self._directive(self._take())
        elif self._takes("[", "[", "maybe_unused", "]", "]"):
            pass  # the declaration follows
        elif self._takes("typedef"):
            type = self._type()
            self._source._types[self._declared()] = type.name
            self._expect(";")
        elif self._takes("constexpr"):
            self._constants()
        elif self._takes("struct"):
            self._struct()
        elif self._takes("static_assert"):
            self._between("(", ")")
            self._expect(";")
        elif self._takes("extern", '"C"', "__global__", "void"):
            self._kernel()
        elif token.text in FUNCTION:
            self._function()
        else:
            _refuse(token, "where a declaration should begin")

    def _directive(self, token: Token) -> None:
        match = DIRECTIVE.fullmatch(token.text.replace("\\\n", " "))
        kind, name, bracket, rest = match.groups() if match else ("", "", "", "")
        source = self._source
        if kind == "include" and not self._conditions:
            path = header(name.strip('"'), token.place)
            if path not in source._included:
                source._included.add(path)
                _Reader(source, path).read()
        elif kind in ("if", "ifdef", "ifndef"):
            self._conditions += 1
        elif kind == "endif":
            self._conditions -= 1
        elif kind == "define":
            parts = [Token(str(part.lastgroup), part[0], token.place) for part in TOKEN.finditer(bracket + rest)]
            source._values[name] = [part for part in parts if part.kind != "space"]
            source._conditional |= {name} if self._conditions else set()
        elif kind not in ("elif", "else") and (kind, name) != ("pragma", "once"):
            _refuse(token, "as a directive")

    def _function(self) -> None:
        self._upto("{", ";")
        if self._peek() == "{":
            self._between("{", "}")
            self._takes(";")  # of a template's struct
        else:
            self._expect(";")

    def _type(self) -> Type:
        while self._peek() in QUALIFIERS:
            self._take()
        words = [self._name().text]
        while self._takes(":", ":"):  # of a type inside of another
            words = [f"{words[0]}::{self._name().text}"]
        while words[0] in WORDS_OF_TYPES and self._peek() in WORDS_OF_TYPES:
            words.append(self._take().text)
        while self._peek() in QUALIFIERS:
            self._take()
        return Type(" ".join(words), self._takes("*"))

    def _constants(self) -> None:
        self._type()
        while True:
            name = self._declared()
            self._expect("=")
            self._source._values[name] = self._upto(",", ";")
            if self._take().text == ";":
                return

    def _struct(self) -> None:
        alignment = self._between("(", ")") if self._takes("alignas") else []
        name = self._declared()
        fields: list[tuple[Token, Type, list[list[Token]]]] = []
        if self._peek() == ":":  # of a base, whose fields it has too
            self._source._conditional.add(name)
            self._upto("{")
        self._expect("{")
        while not self._takes("}"):
            if self._peek() in FUNCTION or self._peek() == "static":
                self._function()
                continue
            if self._peek() in ("struct", "using"):  # inside of this one, and its own
                self._upto(";")
                self._expect(";")
                continue
            type = self._type()
            while True:
                field, dimensions = self._name(), []
                if field.text.isupper() and field.text not in self._source._values:  # a flag names the fields
                    self._source._conditional.add(name)
                    self._source._flagged[name] = type
                while self._peek() == "[":
                    dimensions.append(self._between("[", "]"))
                fields.append((field, type, dimensions))
                if not self._takes(","):
                    break
                type = Type(type.name, self._takes("*"))
            self._expect(";")
        self._expect(";")
        self._source._structs[name] = _Struct(alignment, fields)

    def _kernel(self) -> None:
        bounds: list[list[Token]] = []
        if self._takes("__launch_bounds__"):
            self._expect("(")
            while not bounds or self._takes(","):
                bounds.append(self._upto(",", ")"))
            self._expect(")")
        name = self._declared()
        parameters: list[Parameter] = []
        self._expect("(")
        while not parameters or self._takes(","):
            type = self._type()
            token = self._name()
            parameters.append(Parameter(token.text, type, token.place))
        self._expect(")")
        self._between("{", "}")
        self._source._kernels[name] = _Kernel(bounds, parameters)


def _refuse(token: Token, where: str) -> NoReturn:
    raise SourceError(f"{token.place}: {token.text!r} is not understood {where}")
