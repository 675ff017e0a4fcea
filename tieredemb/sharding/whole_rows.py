"""Rows of whole tables, gathered on rank 0 or sent from there: a piece at a time, so that no rank needs more memory
than for what it keeps. Each call is a collective, with tensors in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from tieredemb.sharding.exchange import Exchange, LeavingOnError

PIECE_BYTES = 32 << 20
PlaceRows = Callable[[int, int, torch.Tensor], None]  # takes a rank, the number of its first received row, and the rows


class Rows(NamedTuple):
    """What all ranks know about rows that one of them sends."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: torch.Tensor) -> Rows:
        return cls(tuple(rows.shape), rows.dtype)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def gather_rows(exchange: Exchange, mine: torch.Tensor, place: PlaceRows) -> None:
    """Sends the rows of every rank, `mine` (n, …), to rank 0, which calls `place` with them."""
    for rank, description in enumerate(exchange.all_gather_object(Rows.of(mine))):
        for start, rows in _pieces(exchange, rank, 0, description, mine if rank == exchange.rank else None):
            place(rank, start, rows)


def gathered_rows(exchange: Exchange, mine: torch.Tensor) -> torch.Tensor:
    """On rank 0 the rows of all ranks, one after the other; an empty tensor on others."""
    found = [mine[:0]]
    gather_rows(exchange, mine, lambda rank, start, rows: found.append(rows))
    return torch.cat(found)


def rows_from_rank_0(
    exchange: Exchange, rank: int, given: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """On `rank` the rows that rank 0 has for it, by name, which are `given` there alone; an empty dict on others."""
    descriptions = exchange.broadcast_object(
        None if given is None else {name: Rows.of(rows) for name, rows in given.items()}
    )
    found = {}
    for name, each in descriptions.items():
        with LeavingOnError(exchange):
            out = torch.empty(each.shape if rank == exchange.rank else (0,), dtype=each.dtype, device="cpu")
        for start, rows in _pieces(exchange, 0, rank, each, None if given is None else given[name]):
            out[start : start + len(rows)] = rows
        if rank == exchange.rank:
            found[name] = out
    return found


def _pieces(
    exchange: Exchange, source: int, target: int, description: Rows, rows: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """The `rows` of rank `source` on rank `target`, with the position of each piece. They are sent as bytes, as a group
    cannot send some dtypes."""
    if source == target or not description.row_bytes:  # nothing travels
        if target == exchange.rank:
            yield 0, torch.empty(description.shape, dtype=description.dtype, device="cpu") if rows is None else rows
        return
    count, size = description.shape[0], max(1, PIECE_BYTES // description.row_bytes)
    for start in range(0, count, size):
        with LeavingOnError(exchange):
            piece = min(size, count - start)
            sent_sizes, received_sizes = [0] * exchange.size, [0] * exchange.size
            raw = torch.empty((0, description.row_bytes), dtype=torch.uint8, device="cpu")
            if rows is not None:
                raw_rows = rows[start : start + piece].contiguous()
                raw, sent_sizes[target] = raw_rows.view(torch.uint8).view(piece, description.row_bytes), piece
            if target == exchange.rank:
                received_sizes[source] = piece
            sending = exchange.sending(raw, sent_sizes, received_sizes)
        out = exchange.send(sending)
        if target == exchange.rank:
            yield start, out.view(description.dtype).view(piece, *description.shape[1:])
