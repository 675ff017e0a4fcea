"""Notes of records, shortened for a table: what is the same in every row is said once, in a legend below it.

Records keep whole sentences, so that each can be read by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.record import Record

NUMBER = r"([\d.,]*\d)"


class Shorter(NamedTuple):
    """`pattern`: what notes say · `short`: what the table says in its place · `legend`: what that means."""

    pattern: str
    short: str
    legend: str


SHORTER = (
    Shorter(
        rf"{NUMBER} missed rows and {NUMBER} written back a batch",
        r"\1 in, \2 out",
        "in, out: rows missed and rows written back a batch",
    ),
    Shorter(rf"{NUMBER} missed rows a batch", r"\1 in", "in: rows missed a batch"),
    Shorter(
        rf"PCIe alone needs {NUMBER} ms, (\d+)% of the step",
        r"PCIe \1 ms (\2%)",
        "PCIe: what it alone needs to carry these rows, and its share of the step",
    ),
    Shorter(
        rf"p50 {NUMBER} ms, p99 {NUMBER} ms, host {NUMBER} ms",
        r"p50 \1, p99 \2, host \3",
        "p50, p99: of single steps, in ms, by device events; host: of a step's mean, in ms, until Python had enqueued "
        "all of its work",
    ),
    Shorter(
        rf"{NUMBER} missed steps replayed a batch",
        r"\1 replayed",
        "replayed: steps that rows had missed and took one by one, a batch",
    ),
    Shorter("between device events ", "device ", "device: between device events around the call"),
    Shorter(
        rf"batch buffers not included; torch allocated {NUMBER} MiB while it was built",
        r"built: \1 MiB",
        "HBM is without batch buffers; built: what torch had allocated when the module was built",
    ),
    Shorter(rf"then {NUMBER} s to set all weights", r"weights: \1 s", "weights: what setting all weights took then"),
    Shorter(", the bits of all resident", ", same bits", "same bits: the last loss has those of all resident"),
)
IN_BRACKETS = re.compile(r" \(([^)]*)\)$")


def brief(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """The records of one table with short notes, and what the short words mean."""
    meanings: dict[str, None] = {}
    origins = {found[1] for record in records if (found := IN_BRACKETS.search(record.peer))}
    if len(origins) == 1:
        records = [replace(record, peer=IN_BRACKETS.sub("", record.peer)) for record in records]
        meanings |= {f"peer: {origins.pop()}": None}
    for pattern, short, meaning in SHORTER:
        if any(re.search(pattern, record.note) for record in records):
            records = [replace(record, note=re.sub(pattern, short, record.note)) for record in records]
            meanings[meaning] = None
    return list(records), list(meanings)
