"""Lines of a click log to arrays and back, compiled: text would otherwise cost more than the training step.

The format is Criteo's, without header: label, 13 integers, 26 categories of 8 hexadecimal digits, separated by tabs;
an integer or a category may be empty. A row of about 240 bytes takes less than a microsecond either way.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tieredemb.kernels.cpu import jit

INTEGERS = 13
CATEGORIES = 26
FIELDS = 1 + INTEGERS + CATEGORIES
NO_INTEGER = int(np.iinfo(np.int64).min)  # stands for an empty integer field
NO_CATEGORY = -1  # stands for an empty category
MAX_LINE_BYTES = 2 + INTEGERS * 21 + CATEGORIES * 9  # what `format_lines` needs for a row at most

GOOD, TOO_FEW, TOO_MANY, BAD_LABEL, BAD_INTEGER, BAD_CATEGORY = range(6)

_TAB, _NEWLINE, _MINUS, _ZERO = np.uint8(9), np.uint8(10), np.uint8(45), np.uint8(48)
_MAX_DIGITS = 18  # of an integer: more could overflow int64
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_HEX_VALUE = np.full(256, -1, dtype=np.int64)
for _value, _digit in enumerate("0123456789abcdef"):
    _HEX_VALUE[ord(_digit)] = _HEX_VALUE[ord(_digit.upper())] = _value

Array = np.ndarray[Any, Any]


@numba.njit(nogil=True, inline="never")
def _integer(text, start, end):  # type: ignore[no-untyped-def]
    """The integer in text[start:end] and whether it is one."""
    if start == end:
        return NO_INTEGER, True
    negative = text[start] == _MINUS
    first = start + 1 if negative else start
    if end - first < 1 or end - first > _MAX_DIGITS:
        return NO_INTEGER, False
    value = np.int64(0)
    for at in range(first, end):
        digit = np.int64(text[at]) - 48
        if digit < 0 or digit > 9:
            return NO_INTEGER, False
        value = np.int64(10) * value + digit
    return (-value if negative else value), True


@numba.njit(nogil=True, inline="never")
def _category(text, start, end):  # type: ignore[no-untyped-def]
    """The category in text[start:end] and whether it is one."""
    if start == end:
        return NO_CATEGORY, True
    if end - start != 8:
        return NO_CATEGORY, False
    value = 0
    for at in range(start, end):
        digit = _HEX_VALUE[text[at]]
        if digit < 0:
            return NO_CATEGORY, False
        value = value * 16 + digit
    return value, True


@jit
def parse_lines(text, labels, integers, categories):  # type: ignore[no-untyped-def]
    """Parses the lines of `text`, uint8 (bytes,), of which the last ends with a newline.

    Fills labels uint8 (rows,), integers int64 (rows, 13) and categories int64 (rows, 26), which must have room for
    every line. Returns (rows parsed, code, field): a code other than `GOOD` names the fault of the next row and the
    field, counted from 0, where it lies.
    """
    row = 0
    field = 0
    start = 0
    for at in range(text.size):
        byte = text[at]
        if byte != _TAB and byte != _NEWLINE:
            continue
        if field >= FIELDS:
            return row, TOO_MANY, field
        if field == 0:
            if at - start != 1 or (text[start] != _ZERO and text[start] != _ZERO + 1):
                # an empty line is reported for its number of fields, which says more
                return row, TOO_FEW if byte == _NEWLINE and at == start else BAD_LABEL, field
            labels[row] = text[start] - _ZERO
        elif field <= INTEGERS:
            integers[row, field - 1], good = _integer(text, start, at)
            if not good:
                return row, BAD_INTEGER, field
        else:
            categories[row, field - 1 - INTEGERS], good = _category(text, start, at)
            if not good:
                return row, BAD_CATEGORY, field
        start = at + 1
        field += 1
        if byte == _NEWLINE:
            if field != FIELDS:
                return row, TOO_FEW, field
            row += 1
            field = 0
    return row, GOOD, 0


@numba.njit(nogil=True, inline="never")
def _write_integer(text, at, value):  # type: ignore[no-untyped-def]
    if value < 0:
        text[at] = _MINUS
        at += 1
        value = -value
    digits = 1
    limit = 10
    while value >= limit:
        digits += 1
        limit *= 10
    for place in range(at + digits - 1, at - 1, -1):
        text[place] = _ZERO + np.uint8(value % 10)
        value //= 10
    return at + digits


@jit
def format_lines(labels, integers, categories, text):  # type: ignore[no-untyped-def]
    """Writes rows as lines into `text`, uint8 of at least `MAX_LINE_BYTES` a row; returns the bytes written.
    The inverse of `parse_lines`, for integers of up to 18 digits."""
    at = 0
    for row in range(labels.size):
        text[at] = _ZERO + labels[row]
        at += 1
        for column in range(INTEGERS):
            text[at] = _TAB
            at += 1
            if integers[row, column] != NO_INTEGER:
                at = _write_integer(text, at, integers[row, column])
        for column in range(CATEGORIES):
            text[at] = _TAB
            at += 1
            value = categories[row, column]
            if value != NO_CATEGORY:
                for place in range(8):
                    text[at + place] = _HEX[(value >> (28 - 4 * place)) & 15]
                at += 8
        text[at] = _NEWLINE
        at += 1
    return at
