"""Docstrings as Sphinx wants them. The library writes them to be read in an editor: names between single backticks,
and parameters as one paragraph, "`ids`: what they are · `offsets`: what those are. What follows."

A name that is public becomes a link, any other a literal; such a paragraph becomes a list and what follows it.
"""

from __future__ import annotations

import re
from typing import Any

import tieredemb
from tieredemb import errors

PUBLIC = {name: f"tieredemb.{name}" for name in tieredemb.__all__} | {
    name: f"tieredemb.errors.{name}"
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.TieredEmbError)
}
QUOTED = re.compile(r"(?<!`)`([^`]+)`(?!`)")
BROKEN_NAME = re.compile(r"(?<=[.:])\n\s*")  # a dotted name that goes on in the next line
ITEM = r"`\w+`(?:, `\w+`)*:\s"
ITEMS = re.compile(rf"^(?P<before>.*?)(?P<items>{ITEM}.*\s·\s{ITEM}.*)$", re.DOTALL)
BETWEEN_ITEMS = re.compile(rf"\s·\s(?={ITEM})")
CALL = re.compile(r"(\w+)(?:\([^<>]*\))?")
SPECIAL = re.compile(r"[*|]|(?<=\w)_(?!\w)")  # what would be markup in text that is none


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's event `autodoc-process-docstring`: changes `lines` in place."""
    lines[:] = as_rst("\n".join(lines)).split("\n")


def as_rst(text: str) -> str:
    """A docstring as reStructuredText."""
    return "\n\n".join(_paragraph(paragraph) for paragraph in text.strip("\n").split("\n\n")) + "\n"


def _paragraph(text: str) -> str:
    if text.lstrip().startswith((">>> ", "- ")):
        return text if text.lstrip().startswith(">>> ") else _quoted(text)
    found = ITEMS.match(text)
    if found is None:
        return _quoted(text)
    items = [" ".join(item.split()) for item in BETWEEN_ITEMS.split(found["items"])]
    last, _, after = items[-1].partition(". ")
    parts = [found["before"].strip(), "\n".join(f"- {item}" for item in [*items[:-1], last]), after]
    return "\n\n".join(_quoted(part) for part in parts if part)


def _quoted(text: str) -> str:
    parts, end = [], 0
    for match in QUOTED.finditer(text):
        parts += [SPECIAL.sub(r"\\\g<0>", text[end : match.start()]), _literal(match)]
        end = match.end()
    return "".join([*parts, SPECIAL.sub(r"\\\g<0>", text[end:])])


def _literal(match: re.Match[str]) -> str:
    name = BROKEN_NAME.sub("", match[1])
    call = CALL.fullmatch(name)
    return f":py:obj:`{name} <{PUBLIC[call[1]]}>`" if call and call[1] in PUBLIC else f"``{name}``"
