"""Ids that ranks exchange through each other's memory, by one kernel a rank: here several ranks of one process, on
streams of one GPU. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import pytest
import torch

from tieredemb.kernels.spread import RowSpread
from tieredemb.sharding.peer_exchange import PeerExchange, words_of_region

pytestmark = pytest.mark.usefixtures("gpu")
SPIN = 3_000_000  # clock cycles: some 2 ms


class Ranks:
    """`size` ranks, which send each other `capacity` words at most."""

    def __init__(self, size, capacity, timeout=60.0):
        self.device, self.size, self.capacity = torch.device("cuda", torch.cuda.current_device()), size, capacity
        each = words_of_region(capacity)
        self.memory = [torch.zeros(size * each + 1, dtype=torch.int64, device=self.device) for _ in range(size)]
        begins = torch.tensor([memory.data_ptr() for memory in self.memory], device=self.device)
        self.streams = [torch.cuda.Stream(self.device) for _ in range(size)]
        self.exchanges = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                regions = RowSpread(begins, each, rank * each)
                self.exchanges.append(PeerExchange(self.device, regions, rank, timeout))
        torch.cuda.synchronize()

    def given(self, each, seed):
        random = torch.Generator("cpu").manual_seed(seed)
        shape = (self.size * each,)
        drawn = [torch.randint(-(2**62), 2**62, shape, generator=random, device="cpu") for _ in range(self.size)]
        return [values.to(self.device) for values in drawn]

    def send(self, given, late=None, ranks=None):
        """What each rank receives; the one that is `late` begins after the others."""
        received = [torch.full_like(values, -7) for values in given]
        torch.cuda.synchronize()
        for rank in range(self.size) if ranks is None else ranks:
            with torch.cuda.stream(self.streams[rank]):
                if rank == late:
                    torch.cuda._sleep(SPIN)
                self.exchanges[rank].send(received[rank], given[rank])
        return received

    def check(self, given, received):
        torch.cuda.synchronize()
        blocks = [values.chunk(self.size) if len(values) else [values] * self.size for values in given]
        for rank, found in enumerate(received):
            assert torch.equal(found, torch.cat([blocks[sender][rank] for sender in range(self.size)]))
        for memory in self.memory:
            assert int(memory[-1]) == 0  # nothing is written behind the regions


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("each", [0, 1, 77, 12_345, 100_000])
def test_each_rank_receives_its_blocks(size, each):
    ranks = Ranks(size, 100_000)
    for seed in range(5):
        given = ranks.given(each, seed)
        ranks.check(given, ranks.send(given))


def test_sizes_may_differ_between_exchanges():
    ranks = Ranks(2, 1000)
    for seed, each in enumerate([1000, 3, 0, 999, 1, 1000, 500]):
        given = ranks.given(each, seed)
        ranks.check(given, ranks.send(given))


@pytest.mark.parametrize("late", range(3))
def test_nothing_is_lost_where_a_rank_is_late(late):
    """Exchanges follow each other without anything between: a rank writes one while others still read the last."""
    ranks = Ranks(3, 20_000)
    every = [ranks.given(20_000, seed) for seed in range(8)]
    found = [ranks.send(given, late=late if number % 3 == 0 else None) for number, given in enumerate(every)]
    for given, received in zip(every, found, strict=True):
        ranks.check(given, received)
    assert all(each.wait_seconds > 1e-4 for rank, each in enumerate(ranks.exchanges) if rank != late)


def test_graphs_may_contain_it():
    """And exchanges outside come between their replays."""
    ranks = Ranks(2, 5000)
    given, graphs, received = ranks.given(5000, 0), [], []
    ranks.check(given, ranks.send(given))
    for rank, stream in enumerate(ranks.streams):
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(given[rank])
        with torch.cuda.graph(graph, stream=stream):
            ranks.exchanges[rank].send(out, given[rank])
        graphs.append(graph)
        received.append(out)
    for seed in range(1, 6):
        for values, drawn in zip(given, ranks.given(5000, seed), strict=True):
            values.copy_(drawn)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        ranks.check(given, received)
        few = ranks.given(seed, seed)
        ranks.check(few, ranks.send(few))


def test_a_wait_for_a_rank_that_has_gone_is_ended():
    ranks = Ranks(2, 100)
    given = ranks.given(100, 0)
    ranks.send(given, ranks=[0])
    exchange = ranks.exchanges[0]
    exchange._timeout = 0.05
    assert not exchange.ends_in_time()
    exchange.end()
    exchange._timeout = 10.0
    assert exchange.ends_in_time()
    torch.cuda.synchronize()
