"""How long exchanges take on a GPU, eagerly and in graphs. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import pytest
import torch

from tieredemb.sharding.exchange_clock import AT_ONCE, ExchangeClock

pytestmark = pytest.mark.usefixtures("gpu")
SPIN = 20_000_000  # clock cycles: some 10 ms
LEAST, MOST = 2e-3, 1.0  # seconds


@pytest.fixture
def clock():
    return ExchangeClock(torch.device("cuda", torch.cuda.current_device()))


def test_what_is_exchanged_is_timed_and_nothing_else(clock):
    assert clock.seconds == 0
    with clock.running():
        torch.cuda._sleep(SPIN)
    one = clock.seconds
    torch.cuda._sleep(SPIN)
    assert LEAST < one < MOST
    assert clock.seconds == one
    for _ in range(3):
        with clock.running():
            torch.cuda._sleep(SPIN)
    assert clock.seconds - one > 3 * LEAST


def test_exchanges_of_several_streams_are_added(clock):
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(AT_ONCE // len(streams)):
        for stream in streams:
            with torch.cuda.stream(stream), clock.running():
                torch.cuda._sleep(SPIN // 100)
    torch.cuda.synchronize()
    assert AT_ONCE // len(streams) * len(streams) * LEAST / 100 < clock.seconds < MOST


def test_a_stream_that_has_not_come_to_an_end_counts_nothing(clock):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), clock.running():
        torch.cuda._sleep(10 * SPIN)
    assert clock.seconds == 0
    stream.synchronize()
    assert clock.seconds > 10 * LEAST


def test_each_replay_of_a_graph_counts(clock):
    with clock.running():  # compiles the kernel
        pass
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), clock.running():
        torch.cuda._sleep(SPIN)
    before = clock.seconds
    for number in range(1, 4):
        graph.replay()
        assert number * LEAST < clock.seconds - before < MOST
