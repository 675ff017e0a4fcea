"""Ids that ranks exchange through each other's memory, by one kernel a rank: here several ranks of one process, on
streams of one GPU. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tieredemb.kernels.spread import RowSpread
from tieredemb.sharding.peer_exchange import PeerExchange, words_of_region
from tieredemb.storage.cuda_driver import alloc_managed, free_managed

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
        torch.cuda._sleep(1)  # loads the kernel; CUDA may wait for other kernels with that, and so for ranks
        torch.cuda.synchronize()

    def given(self, each, seed):
        random = torch.Generator(self.device).manual_seed(seed)
        shape = (self.size, each)
        return [torch.randint(-(2**62), 2**62, shape, generator=random, device=self.device) for _ in range(self.size)]

    def send(self, *rounds, late=None, slow=None, ranks=None):
        """What each rank receives in each round. All are launched without anything between, so a rank begins one while
        others still read what the last has brought. One that is `late` begins every third round after the others; one
        that is `slow` receives into managed memory, of which the GPU has to get each page first."""
        received = [[torch.full_like(values, -7) for values in given] for given in rounds]
        managed = [] if slow is None else [alloc_managed(given[slow].nbytes) for given in rounds]
        torch.cuda.synchronize()
        for number, given in enumerate(rounds):
            for rank in range(self.size) if ranks is None else ranks:
                with torch.cuda.stream(self.streams[rank]):
                    if rank == late and number % 3 == 0:
                        torch.cuda._sleep(SPIN)
                    into = managed[number] if rank == slow else received[number][rank]
                    self.exchanges[rank].send(into, given[rank])
        if ranks is None:
            torch.cuda.synchronize()
        for address, its in zip(managed, received, strict=False):
            words = (ctypes.c_int64 * its[slow].numel()).from_address(address)
            its[slow] = torch.frombuffer(words, dtype=torch.int64).view_as(its[slow]).to(self.device)
            free_managed(address)
        return received

    def check(self, given, received):
        for rank, found in enumerate(received):
            assert torch.equal(found, torch.stack([each[rank] for each in given]))
        for memory in self.memory:
            assert int(memory[-1]) == 0  # nothing is written behind the regions


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("each", [0, 1, 77, 12_345, 100_000])
def test_each_rank_receives_its_blocks(size, each):
    ranks = Ranks(size, 100_000)
    for seed in range(5):
        given = ranks.given(each, seed)
        ranks.check(given, *ranks.send(given))


@pytest.mark.parametrize("late", [None, 0, 1, 2])
def test_nothing_is_lost_between_exchanges(late):
    """Of any sizes, whichever rank is late."""
    ranks = Ranks(3, 20_000)
    rounds = [ranks.given(20_000 if number % 4 else number * 331 % 20_000, number) for number in range(60)]
    found = ranks.send(*rounds, late=late)
    for given, received in zip(rounds, found, strict=True):
        ranks.check(given, received)
    assert late is None or all(each.wait_seconds > 1e-4 for rank, each in enumerate(ranks.exchanges) if rank != late)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_nothing_is_overwritten_that_a_rank_has_yet_to_copy(slow):
    """The others are through an exchange, and write what they send in the next, while one still copies."""
    ranks = Ranks(3, 300_000)
    rounds = [ranks.given(300_000, number) for number in range(12)]
    for given, received in zip(rounds, ranks.send(*rounds, slow=slow), strict=True):
        ranks.check(given, received)


def test_graphs_may_contain_it():
    """And exchanges outside come between their replays."""
    ranks = Ranks(2, 5000)
    given, graphs, received = ranks.given(5000, 0), [], []
    ranks.check(given, *ranks.send(given))
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
        torch.cuda.synchronize()
        ranks.check(given, received)
        few = ranks.given(seed, seed)
        ranks.check(few, *ranks.send(few))


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
