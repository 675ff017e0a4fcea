"""Rows that are sent to rank 0 and from there, in pieces: all of them arrive, and no piece is too large."""

from __future__ import annotations

import math

import pytest
import torch
from devices import assert_same_bits

from tieredemb.sharding import whole_rows
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.whole_rows import gathered_rows, rows_from_rank_0

PIECE = 64  # bytes
KINDS = [(torch.float32, (5,)), (torch.int64, ()), (torch.uint8, (7,)), (torch.bfloat16, (3, 2)), (torch.int32, (0,))]
COUNTS = {"some": (3, 0, 20), "none": (0, 0, 0), "one": (0, 1, 0), "even": (16, 16, 16)}


def rows_of(rank, count, kind, inner):
    return (torch.arange(count * math.prod(inner)) + 100 * rank).to(kind).view(count, *inner)


def both_ways(rank, size, counts):
    """On each rank what was gathered of every kind, what it was sent, and the bytes of the largest piece."""
    before, whole_rows.PIECE_BYTES = whole_rows.PIECE_BYTES, PIECE
    exchange, sizes = Exchange(None, None), []

    def noted(sending):
        sizes.append(max(sending.given.nbytes, sending.out.nbytes))
        return Exchange.send(exchange, sending)

    exchange.send = noted
    gathered = [gathered_rows(exchange, rows_of(rank, counts[rank], *kind)) for kind in KINDS]
    sent = {}
    for target in range(size):
        given = {str(n): rows_of(target, counts[target], *kind) for n, kind in enumerate(KINDS)}
        sent |= rows_from_rank_0(exchange, target, given if rank == 0 else None)
    exchange.close()
    whole_rows.PIECE_BYTES = before  # other tests run in this process
    return gathered, [sent[str(n)] for n in range(len(KINDS))], max(sizes, default=0)


@pytest.mark.parametrize("counts", COUNTS)
def test_rows_travel_in_pieces(worlds, counts):
    its = COUNTS[counts]
    found = worlds(3).run(both_ways, its)
    every = [torch.cat([rows_of(rank, its[rank], *kind) for rank in range(3)]) for kind in KINDS]
    assert_same_bits(found[0][0], every)
    for rank, (gathered, sent, largest) in enumerate(found):
        if rank:
            assert not any(map(len, gathered))
        assert_same_bits(sent, [rows_of(rank, its[rank], *kind) for kind in KINDS])
        assert [(each.dtype, each.shape[1:]) for each in sent] == KINDS
        assert largest <= PIECE
    assert max(largest for *_, largest in found) > PIECE // 2 or counts in ("none", "one")
