"""Streams that nothing else uses, so that no capture has in it what another thread launches."""

from __future__ import annotations

import gc

import torch

from tieredemb.kernels.streams import own_stream, side_stream

DEVICE = torch.device("cuda", 0)
IN_TURN = 32  # streams of a priority that torch hands out


class Owner:
    pass


def handles(streams):
    return [stream.cuda_stream for stream in streams]


def test_each_owner_has_a_stream_of_its_own(gpu):
    """torch's own streams come in turn, so that the 33rd is the first one again."""
    of_torch = handles(torch.cuda.Stream(priority=p) for p in (0, -1) for _ in range(IN_TURN))
    owner = Owner()
    mine = [own_stream(owner, DEVICE, p) for p in (0, -1) for _ in range(IN_TURN + 8)]
    named = [side_stream(DEVICE, -1), side_stream(DEVICE, -1, "worker"), side_stream(DEVICE, -1, "capture")]
    found = handles([*mine, *named])
    assert len(set(found)) == len(found)
    assert not set(found) & set(of_torch)
    assert side_stream(DEVICE, -1, "worker") is named[1]


def test_a_stream_is_used_again_once_its_owner_is_gone(gpu):
    gc.collect()  # owners of other tests, whose streams are free from then on
    owner = Owner()
    first = own_stream(owner, DEVICE, -1)
    with torch.cuda.stream(first):
        ones = torch.ones(1000, device="cuda")
    ones.record_stream(first)
    del owner
    del ones
    owner = Owner()
    again = own_stream(owner, DEVICE, -1)
    assert again.cuda_stream == first.cuda_stream
    with torch.cuda.stream(again):
        assert torch.ones(1000, device="cuda").sum().item() == 1000


def test_streams_have_the_priority_that_is_asked_for(gpu):
    assert [own_stream(Owner(), DEVICE, p).priority for p in (0, -1)] == [0, -1]
