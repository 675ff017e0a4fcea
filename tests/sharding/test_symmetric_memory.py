"""Whether ranks write into each other's memory: where each is a process of one host, whose GPUs reach one another."""

from __future__ import annotations

import contextlib
import os
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed._symmetric_memory

from tieredemb.sharding import exchange, symmetric
from tieredemb.sharding.bags import Part
from tieredemb.sharding.captures import Captures
from tieredemb.sharding.exchange import RankLocation
from tieredemb.sharding.header import Bound
from tieredemb.sharding.peer_exchange import words_of_region
from tieredemb.sharding.stats import GRADIENTS, IDS, ROWS
from tieredemb.sharding.symmetric import BufferSpec, SymmetricMemory

HERE = [RankLocation("host", "gpu0", ""), RankLocation("host", "gpu1", "")]


def part_of(space, *, is_table_wise):
    """A part of three features, of which the second rank holds two, if tables are held whole."""
    return Part(space, np.array([0, 1, 1] if is_table_wise else [-1, -1, -1]), 2, 1, sends_padding=False)


def memory_of(locations, *, device="cuda:0", has_nccl=True, flags=None, has_whole=True):
    """The memory of rank 0, to which the others announce `flags`, one after the other. `has_whole`: whether a table is
    held whole."""
    its = SimpleNamespace(has_nccl=has_nccl, locations=locations, rank=0, size=len(locations))
    headers = []

    def announce(phase, *, flag):
        theirs = 1 if flags is None else flags[len(headers)]
        headers.append(flag)
        return SimpleNamespace(flags=[flag, *[theirs] * (len(locations) - 1)])

    part = part_of(SimpleNamespace(), is_table_wise=has_whole)
    context = SimpleNamespace(exchange=its, device=torch.device(device), announce=announce, parts=[(part, None)])
    return SymmetricMemory(context), headers


@pytest.fixture
def gpus(monkeypatch):
    """Of this process: their UUIDs, and which of them the first one reaches."""
    found = SimpleNamespace(uuids=["gpu0", "gpu1"], reached={1})
    monkeypatch.delenv("TIEREDEMB_PEER_MEMORY", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found.uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: SimpleNamespace(uuid=found.uuids[k]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, k: k in found.reached)
    return found


def test_gpus_of_one_host_reach_each_other(gpus):
    assert memory_of(HERE)[0]._reaches_all()


def test_one_gpu_reaches_itself(gpus):
    gpus.reached = set()
    assert memory_of(HERE[:1])[0]._reaches_all()


@pytest.mark.parametrize(("value", "reaches"), [("0", False), ("", False), ("1", True)])
def test_rows_are_sent_where_the_environment_says_so(gpus, monkeypatch, value, reaches):
    monkeypatch.setenv("TIEREDEMB_PEER_MEMORY", value)
    assert memory_of(HERE)[0]._reaches_all() == reaches


def test_a_rank_of_another_host_is_not_reached(gpus):
    assert not memory_of([HERE[0], RankLocation("other", "gpu1", "")])[0]._reaches_all()


def test_a_rank_that_memory_cannot_be_handed_to_is_not_reached(gpus):
    """Of another container on this host."""
    locations = [place._replace(shares=shares) for place, shares in zip(HERE, "ab", strict=True)]
    assert not memory_of(locations)[0]._reaches_all()


def test_processes_share_a_pid_namespace_and_a_temporary_directory(monkeypatch, tmp_path):
    own = exchange._shared_by_processes()
    assert exchange._shared_by_processes() == own
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        assert exchange._shared_by_processes() != own
    monkeypatch.setattr(os, "readlink", lambda _: "another namespace")
    assert exchange._shared_by_processes() != own
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert exchange._shared_by_processes() != exchange._shared_by_processes()  # with nobody


def test_a_gpu_that_this_process_does_not_see_is_not_reached(gpus):
    gpus.uuids = ["gpu0"]
    assert not memory_of(HERE)[0]._reaches_all()


def test_a_gpu_without_a_way_to_it_is_not_reached(gpus):
    gpus.reached = set()
    assert not memory_of(HERE)[0]._reaches_all()


OF_IDS = BufferSpec(0, 0, 40, 1, torch.int64, IDS)
SPECS = [BufferSpec(0, 0, 10, 8, torch.float32, ROWS), BufferSpec(0, 0, 7, 8, torch.bfloat16, GRADIENTS)]


@pytest.mark.parametrize("keywords", [{"device": "cpu"}, {"has_nccl": False}], ids=str)
def test_ranks_that_do_not_exchange_by_nccl_tell_each_other_nothing(gpus, keywords):
    memory, headers = memory_of(HERE, **keywords)
    assert memory.make(SPECS, OF_IDS) is None
    assert not headers


class Memory:
    """Notes whether nobody captures while it is freed."""

    def __init__(self, freed):
        self._freed = freed

    def __del__(self):
        self._freed.append(self._freed.is_locked)


class Freed(list):
    is_locked = False

    @contextlib.contextmanager
    def lock(self, _):
        self.is_locked = True
        yield
        self.is_locked = False


@pytest.mark.parametrize(
    ("flags", "allocated", "mapped"),
    [([0], True, True), ([1], False, True), ([1, 0], True, True), ([1, 1], True, False)],
    ids=["another has no memory", "this has none", "another cannot map it", "this cannot"],
)
def test_what_one_rank_cannot_none_does(gpus, monkeypatch, flags, allocated, mapped):
    memory, headers = memory_of(HERE, flags=flags)
    maps, freed = [], Freed()
    monkeypatch.setattr(symmetric, "capture_lock", freed.lock)

    def allocate(held, *_):
        held += [Memory(freed) for _ in range(allocated)]
        return allocated

    def mapping(held, tokens, starts):
        assert tokens == [headers[0], 1]
        assert list(starts.values()) == [512, 1536, 2048]
        maps.append(True)
        held.append(Memory(freed))
        return {} if mapped else None

    monkeypatch.setattr(memory, "_allocate", allocate)
    monkeypatch.setattr(memory, "_mapped", mapping)
    assert memory.make(SPECS, OF_IDS) is None
    assert memory.make(SPECS, OF_IDS) is None  # nor asks again
    assert [bool(each) for each in headers] == [allocated, mapped][: len(flags)]
    assert len(maps) == len(flags) - 1
    assert freed == [True] * (allocated + len(maps))
    assert memory.bytes == 0


def test_another_torch_may_know_of_no_such_memory(gpus, monkeypatch):
    """It is no public part of it."""
    memory, _ = memory_of(HERE)
    monkeypatch.setattr(symmetric, "on_device", contextlib.nullcontext)
    with monkeypatch.context() as patch:
        patch.delattr(torch.distributed._symmetric_memory, "empty")
        assert not memory._allocate([], 1, 1)
    monkeypatch.setattr(torch.distributed._symmetric_memory, "rendezvous", lambda memory: None)
    memory._exchange.group = None
    assert memory._mapped([torch.zeros(8, dtype=torch.uint8)], [1, 1], {}) is None


@pytest.mark.parametrize("others", [1, 7])
def test_memory_that_is_not_the_other_ranks_is_not_written_to(gpus, monkeypatch, others):
    """As where two processes have one PID, and what torch hands over comes back: each rank tells what its memory begins
    with."""
    memory, _ = memory_of(HERE, device="cpu")
    own = torch.zeros(2 * symmetric.ALIGNED, dtype=torch.uint8)
    own[:8].view(torch.int64).fill_(5)
    theirs = own.clone()
    theirs[:8].view(torch.int64).fill_(7)
    handle = SimpleNamespace(get_buffer=lambda rank, size, dtype: (own, theirs)[rank])
    monkeypatch.setattr(torch.distributed._symmetric_memory, "rendezvous", lambda memory, group: handle)
    monkeypatch.setattr(symmetric, "on_device", contextlib.nullcontext)
    memory._exchange.group = None
    found = memory._mapped([own], [5, others], {SPECS[0]: 64})
    assert (found is not None) == (others == 7)
    if found:
        assert found.words == [own.data_ptr() + 8, theirs.data_ptr() + 8]
        assert found.buffers[SPECS[0]].to.begins.tolist() == [own.data_ptr() + 64, theirs.data_ptr() + 64]


@pytest.mark.parametrize(("size", "fits"), [(100, True), (101, False)])
def test_a_share_of_the_free_memory_is_not_exceeded(gpus, monkeypatch, size, fits):
    memory, _ = memory_of(HERE)
    memory._share = 0.25
    monkeypatch.setattr(symmetric, "on_device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (400, 1000))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    made = torch.zeros(128, dtype=torch.uint8)
    monkeypatch.setattr(torch.distributed._symmetric_memory, "empty", lambda *_, **__: made)
    assert memory._allocate([], size, 1) == fits


def test_where_no_buffers_are_wanted_ranks_announce_nothing(gpus):
    memory, headers = memory_of(HERE)
    assert memory.make([], OF_IDS) is None
    assert not headers


def test_buffers_are_separate_and_aligned(gpus):
    starts, size = memory_of(HERE)[0]._laid_out(SPECS)
    assert starts == [512, 1536]  # behind the words of ranks; 2 ranks × 10 rows × 32 bytes are 640
    assert size == 2048


@pytest.fixture
def captures_of(gpus, monkeypatch):
    """Captured steps over parts of two widths; notes when ranks meet."""

    def make(row_bound, *, has_whole):
        return _captures_of(monkeypatch, row_bound, has_whole=has_whole)

    return make


def _captures_of(monkeypatch, row_bound, *, has_whole):
    def part(width, *, is_table_wise):
        return part_of(SimpleNamespace(width=width), is_table_wise=is_table_wise)

    tables = SimpleNamespace(config=SimpleNamespace(output_dtype=torch.bfloat16))
    of_widths = [[part(4, is_table_wise=False), part(4, is_table_wise=has_whole)], [part(8, is_table_wise=False)]]
    shards = [
        SimpleNamespace(parts=parts, space=parts[0].space, engine=SimpleNamespace(tables=tables)) for parts in of_widths
    ]
    memory, _ = memory_of(HERE)
    context = memory._context
    context.exchange.failures, context.exchange.counting_replays = 0, contextlib.nullcontext
    context.row_bound, context.parts = row_bound, [(part, shard) for shard in shards for part in shard.parts]
    context.bounds = lambda rows: (Bound(50, rows),) * 3
    context.most_samples, context.output_dtype, context.place_in_output = 7, torch.float32, lambda number: number
    captures, met, made = Captures(context, None, None), [], []
    monkeypatch.setattr(captures.symmetric, "make", lambda buffers, of_ids: (made.append(of_ids), buffers)[1])
    monkeypatch.setattr(captures.symmetric, "barrier", lambda: met.append(True))
    monkeypatch.setattr(captures.symmetric, "exchange_of_ids", lambda of_ids: of_ids if of_ids in made else None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return captures, met


@pytest.mark.parametrize(("ahead", "row_bound", "rows"), [(True, 30, 30), (True, None, 50), (False, 30, 50)])
def test_forwards_of_a_step_have_buffers_in_turn(captures_of, ahead, row_bound, rows):
    """Of each part for rows, or bags, and for gradients; there is one barrier, before the first is used."""
    captures, met = captures_of(row_bound, has_whole=True)
    given = [(torch.zeros(1), torch.zeros(call)) for call in range(2)]
    assert captures.buffers() is None
    with captures.capturing(given, planned=given if ahead else ()):
        assert not met
        found = [captures.buffers() for _ in range(3)]
        assert len(met) == 1
    assert captures.buffers() is None
    for call in range(2):
        one, whole, other = found[call]
        assert whole == (  # three bags of a sample come back, and one rank pools two of them
            BufferSpec(call, 1, 11, 4, torch.float32, ROWS),
            BufferSpec(call, 1, 14, 4, torch.float32, GRADIENTS),
        )
        assert one == (
            BufferSpec(call, 0, rows, 4, torch.bfloat16, ROWS),
            BufferSpec(call, 0, 50, 4, torch.float32, GRADIENTS),
        )
        assert other == (
            BufferSpec(call, 2, rows, 8, torch.bfloat16, ROWS),
            BufferSpec(call, 2, 50, 8, torch.float32, GRADIENTS),
        )
    assert found[2] is None


@pytest.mark.parametrize("ahead", [False, True])
def test_ids_of_a_captured_step_go_through_the_buffer_of_its_exchanges(captures_of, ahead):
    """But for those of a forward that a step recomputes which goes ahead: on another branch they have no order."""
    captures, _ = captures_of(30, has_whole=False)
    bounds, given = (Bound(50, 30 if ahead else None),) * 3, [(torch.zeros(1), torch.zeros(0))]
    assert captures.exchange_of_ids(bounds, is_planned=ahead) is None
    with captures.capturing(given, planned=given if ahead else ()):
        assert captures.exchange_of_ids(bounds, is_planned=ahead) == BufferSpec.for_ids(captures._context, bounds, 7)
        assert captures.exchange_of_ids(bounds, is_planned=not ahead) is None
        assert captures.exchange_of_ids((Bound(51, 30), *bounds[1:]), is_planned=ahead) is None


@pytest.mark.parametrize("has_whole", [False, True])
def test_ids_have_a_buffer(gpus, monkeypatch, has_whole):
    """Of each feature a number, and the ids, and how long the bags are that a rank pools, of two exchanges."""
    memory, _ = memory_of(HERE, has_whole=has_whole)
    allocated = []
    monkeypatch.setattr(memory, "_add", allocated.append)
    of_ids = BufferSpec.for_ids(memory._context, (Bound(50, 30),), 7)
    assert of_ids == BufferSpec(0, 0, words_of_region(3 + 50 + has_whole * 2 * 7), 1, torch.int64, IDS)
    assert memory.make(SPECS, of_ids) is None
    assert allocated == [[*SPECS, of_ids]]
    assert memory.exchange_of_ids(of_ids) is None  # it was not allocated
    memory._exchanges[of_ids] = exchange = object()
    assert memory.exchange_of_ids(of_ids) is exchange
    assert memory.exchange_of_ids(of_ids._replace(each=1)) is None
