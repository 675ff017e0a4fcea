"""Prefetch over a loop: the bits of the loop without it, whatever the batches are; what it plans is used, and given up
when the loop is left."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import itertools
import statistics
import threading
import time
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from counters import Calls, Plans
from devices import assert_same_bits, equal, given_on_devices, idle, randint
from hypothesis import strategies as st
from pairs import parametrize_pairs
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from training import NAMES, OPTIMIZERS, bits, random_batch, table_configs

import tieredemb as te
from tieredemb.cache.device import staged as staged_rows
from tieredemb.cache.device import staging
from tieredemb.cache.device.moves import RowMoves
from tieredemb.cache.device.row_copies import RowCopies
from tieredemb.errors import (
    BrokenCacheError,
    CheckpointError,
    ConfigError,
    IdOutOfRangeError,
    StorageFullError,
    UncleanFileError,
)
from tieredemb.modules.forwards import LISTENERS
from tieredemb.pipeline import plan_executors
from tieredemb.pipeline.batches import map_tensors
from tieredemb.pipeline.plan_groups import drop_all
from tieredemb.pipeline.prefetch import _RUNNING, running
from tieredemb.step.planned_forwards import CompletedFuture, Planned, PlannedForwards
from tieredemb.storage.file.rows import FileRows

ROWS, WIDTH = 40, 4


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def planned_here(monkeypatch):
    """On a GPU, who submits a plan over a staged tier begins it, however long the one before has taken."""
    monkeypatch.setattr(plan_executors.WorkerExecutor, "QUICK", 60.0)


def table(**keywords):
    keywords = {"capacity": 5, "optimizer": te.Adagrad(lr=0.5, initial_accumulator_value=0.1), "mode": "sum"} | keywords
    return te.TieredEmbeddingBag(ROWS, WIDTH, **keywords)


def staged(tmp_path, name, **keywords):
    """A table whose rows pass through the host on every device."""
    return table(storage=te.File(str(tmp_path / name)), **keywords)


def ids_of_steps(steps, size=6, skew=2):
    return [(randint(0, ROWS, (size, 3), seed=step) // skew) for step in range(steps)]


def train(loop, model, forward):
    """Outputs of each batch and the bits at the end."""
    outputs = []
    for batch in loop:
        out = forward(model, batch)
        outputs.append(out.detach().clone())
        out.square().sum().backward()
    return [*outputs, *bits(model)]


# --- the same bits ----------------------------------------------------------------------------------------------------


@parametrize_pairs(depth=[1, 3, 20], capacity=[1, 9, 1.0], optimizer=dict(zip(NAMES, OPTIMIZERS, strict=True)))
def test_any_depth_gives_the_bits_of_the_plain_loop(device, depth, capacity, optimizer):
    tables = table_configs(modes=("sum", "mean", "max"), widths=(4, 5))
    batches = [random_batch(tables, 7, step) for step in range(8)]
    runs = []
    for prefetched in (False, True):
        model = te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=optimizer)
        loop = te.prefetch(batches, model, depth) if prefetched else batches
        runs.append(train(loop, model, lambda model, batch: model(batch[0], batch[1])))
        assert idle(model)
    assert_same_bits(*runs)


@pytest.mark.parametrize("storage", ["host", "file", "pmem"])
def test_any_tier_gives_the_bits_of_the_plain_loop(device, tmp_path, storage):
    expected = train(ids_of_steps(9), table(), lambda model, ids: model(ids))
    tiers = {"host": te.HostMemory(), "file": te.File(str(tmp_path / "rows")), "pmem": te.Pmem(str(tmp_path))}
    try:
        model = table(storage=tiers[storage])
    except te.TieredEmbError as error:
        pytest.skip(str(error))
    assert_same_bits(train(te.prefetch(ids_of_steps(9), model, 2), model, lambda model, ids: model(ids)), expected)


@given_on_devices(
    st.integers(0, 4),
    st.sampled_from([1, 2, 3, 7, 40]),
    st.lists(st.lists(st.integers(0, ROWS - 1), max_size=12), max_size=7),
    st.sampled_from([te.LFU(), te.LRU(), te.LFU(half_life_batches=1.0)]),
    cuda=6,
)
def test_any_batches_at_any_depth_are_exact(device, depth, capacity, batches, policy):
    """Among them the same rows in every batch, batches larger than the cache, and none at all. Integers, so that the
    oracle's sums have no order."""
    tensors = [torch.tensor(batch, dtype=torch.int64) for batch in batches]
    offsets = torch.zeros(1, dtype=torch.int64)
    bag = table(capacity=capacity, policy=policy, optimizer=te.SGD(lr=1.0))
    oracle = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 17 - 8.0
    bag.load_state_dict({"weight": torch.from_numpy(oracle).float().to(torch.get_default_device())})
    for batch, ids in zip(batches, te.prefetch(tensors, bag, depth, ids_of=lambda ids: (ids, offsets)), strict=True):
        out = bag(ids, offsets)
        assert out[0].tolist() == oracle[batch].sum(0).tolist()
        out.sum().backward()
        np.subtract.at(oracle, batch, 1.0)
    assert equal(bag.state_dict()["weight"], torch.from_numpy(oracle).float())
    assert idle(bag)


def test_max_norm_scales_the_rows_of_a_forward_when_it_comes(device):
    expected = train(ids_of_steps(7), table(max_norm=0.5), lambda model, ids: model(ids))
    model = table(max_norm=0.5)
    assert_same_bits(train(te.prefetch(ids_of_steps(7), model, 3), model, lambda model, ids: model(ids)), expected)


def test_evaluation_and_other_lookups_inside_the_loop(device):
    runs = []
    for depth in (None, 2):
        model, outputs = table(), []
        batches = ids_of_steps(8)
        for step, ids in enumerate(batches if depth is None else te.prefetch(batches, model, depth)):
            with torch.no_grad():
                outputs.append(model(randint(0, ROWS, (9, 2), seed=100 + step)))
            out = model(ids) + model(ids.flip(0))
            out.square().sum().backward()
            outputs += [out.detach(), model.state_dict()["weight"]] if step % 3 == 0 else [out.detach()]
        runs.append([*outputs, *bits(model)])
    assert_same_bits(*runs)


def trains(model, ids):
    model(ids).square().sum().backward()


def looks_up(model, ids, _):
    with torch.no_grad():
        model(ids)


def loads(model, ids, path):
    """What was trained since is lost."""
    model.save_checkpoint(path)
    trains(model, ids)
    model.load_checkpoint(path)


BETWEEN = {
    "looks_up": looks_up,
    "trains": lambda model, ids, _: trains(model, ids),
    "reads_weights": lambda model, *_: model.state_dict()["weight"],
    "writes_weights": lambda model, *_: model.load_state_dict({"weight": model.state_dict()["weight"] * 0.5}),
    "counts": lambda model, *_: model.stats(),
    "flushes": lambda model, *_: model.flush(),
    "saves": lambda model, _, path: model.save_checkpoint(path),
    "loads": loads,
}


@pytest.mark.parametrize("another_thread", [False, True])
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("capacity", [2, 30])
def test_whatever_comes_while_rows_are_on_their_way(device, planned_here, tmp_path, capacity, between, another_thread):
    """The next batch is planned by then, and its rows are between the storage and the cache."""

    def comes():
        arguments = model, randint(0, ROWS, (9, 2), seed=2), str(tmp_path / "saved")
        if not another_thread:
            return between(*arguments)
        thread = threading.Thread(target=between, args=arguments)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    runs = []
    for depth in (None, 1, 3):
        model, outputs = staged(tmp_path, f"rows{depth}", capacity=capacity), []
        loop = ids_of_steps(10)
        if depth is not None:
            loop = te.prefetch(loop, model, depth, ids_of=lambda ids: ids)
        for step, ids in enumerate(loop):
            if step % 3 == 0:
                comes()
            out = model(ids)
            out.square().sum().backward()
            outputs.append(out.detach())
            if step % 3 == 1:
                comes()
        assert idle(model)
        model.close()
        reopened = staged(tmp_path, f"rows{depth}")
        runs.append([*outputs, *bits(reopened)])
        reopened.close()
    assert_same_bits(*runs[:2])
    assert_same_bits(*runs[1:])


@pytest.mark.parametrize("close", [True, False])
def test_a_module_that_is_closed_while_rows_are_on_their_way(device, planned_here, tmp_path, close):
    model, plain = staged(tmp_path, "left"), staged(tmp_path, "plain")
    loop = iter(te.prefetch(ids_of_steps(6), model, 2, ids_of=lambda ids: ids))
    for ids in itertools.islice(loop, 3):
        trains(model, ids)
        trains(plain, ids)
    if close:
        model.close()
        loop.close()
    else:
        loop.close()
        model.close()
    plain.close()
    assert_same_bits(*(bits(staged(tmp_path, name)) for name in ("left", "plain")))


@pytest.mark.parametrize("call", ["flush", "state_dict", "save_checkpoint", "load_checkpoint", "close"])
def test_rows_that_are_being_written_are_there_before_the_storage_is_used_otherwise(
    gpu, monkeypatch, planned_here, tmp_path, call
):
    gc.collect()  # or modules of other tests close their storage amid this one
    model, being_written, used = staged(tmp_path, "rows"), [], []
    model.save_checkpoint(str(tmp_path / "saved"))

    def note(name, then):
        function = getattr(RowCopies, name)

        def noted(*arguments, **keywords):
            function(*arguments, **keywords)
            then()

        monkeypatch.setattr(RowCopies, name, noted)

    def check(name):
        function = getattr(FileRows, name)

        def checked(*arguments, **keywords):
            used.append(name)
            assert not being_written, name
            return function(*arguments, **keywords)

        monkeypatch.setattr(FileRows, name, checked)

    note("scatter", lambda: being_written.append(True))
    for name in ("gather", "finish"):
        note(name, being_written.clear)
    for name in ("used_ranges", "copy_range", "reset", "flush", "seal", "close"):
        check(name)
    loop = iter(te.prefetch(ids_of_steps(9), model, 2, ids_of=lambda ids: ids))
    for ids in itertools.islice(loop, 4):
        trains(model, ids)
    next(loop)
    loop.close()
    assert not used
    getattr(model, call)(*([str(tmp_path / "saved")] if "checkpoint" in call else []))
    assert used


@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageFullError])
@pytest.mark.parametrize(
    "where", [(staging.HostPhase, "read"), (staged_rows.Staged, "_gather"), (RowCopies, "reserve")]
)
def test_who_interrupts_a_plan_before_rows_change_hands_loses_nothing(
    gpu, monkeypatch, planned_here, tmp_path, where, error
):
    """A call that ends it for a later batch, or the loop's own."""
    model, plain = staged(tmp_path, "interrupted"), staged(tmp_path, "plain")
    function, seen = getattr(*where), []

    def interrupted(*arguments):
        monkeypatch.setattr(*where, function)
        seen.append(error)
        raise error("now")

    loop = te.prefetch(ids_of_steps(12), model, 2, ids_of=lambda ids: ids)
    for step, ids in enumerate(loop):
        if step in (3, 6):
            monkeypatch.setattr(*where, interrupted)
            with pytest.raises(error) if error is KeyboardInterrupt else contextlib.nullcontext():
                model.stats()
        trains(model, ids)
        trains(plain, ids)
    assert len(seen) == 2
    assert_same_bits(bits(model), bits(plain))
    assert idle(model)


def test_a_plan_that_breaks_the_cache_stops_the_call_that_ends_it(gpu, monkeypatch, planned_here, tmp_path):
    """Or rows would be written back under the keys of others."""
    model = staged(tmp_path, "broken", capacity=8)

    def interrupted(*_, **__):
        raise RuntimeError("out of memory")

    loop = iter(te.prefetch(ids_of_steps(12), model, ids_of=lambda ids: ids))
    for ids in itertools.islice(loop, 4):
        trains(model, ids)
    next(loop)
    monkeypatch.setattr(RowMoves, "generate", interrupted)
    for call in (model.flush, model.stats, model.state_dict):
        with pytest.raises(BrokenCacheError, match=r"moving rows was interrupted by RuntimeError.*mends"):
            call()
    model.save_checkpoint(str(tmp_path / "saved"))
    loop.close()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="moving rows was interrupted by RuntimeError"):
        model.load_checkpoint(str(tmp_path / "saved"))
    model.close()
    with pytest.raises(UncleanFileError):
        staged(tmp_path, "broken", capacity=8)


def test_micro_batches_of_a_step(device):
    runs = []
    for depth in (0, 1, 4):
        model, loop = table(), ids_of_steps(8)
        loop = iter(te.prefetch(loop, model, depth))
        for _ in range(4):
            with model.accumulate():
                for ids in itertools.islice(loop, 2):
                    model(ids).square().sum().backward()
        runs.append(bits(model))
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(runs[0], runs[2])


def test_recomputed_forwards_take_no_plan_of_another_batch(device):
    same = torch.arange(6).reshape(2, 3)
    runs = []
    for depth in (0, 2):
        model = table()
        for ids in te.prefetch([same] * 5, model, depth):  # the very tensor in all batches
            checkpoint(model, ids, use_reentrant=False).square().sum().backward()
        assert model.stats().batches == 5
        runs.append(bits(model))
    assert_same_bits(*runs)


# --- what it plans is used --------------------------------------------------------------------------------------------

Point = collections.namedtuple("Point", "ids label")


@dataclasses.dataclass
class Sample:
    ids: torch.Tensor
    label: torch.Tensor


class Jagged:
    """As TorchRec's `KeyedJaggedTensor`."""

    def __init__(self, ids):
        self._values = ids.reshape(-1)
        self._lengths = torch.full((len(ids),), ids.shape[1])
        self._offsets = None

    def values(self):
        return self._values

    def offsets(self):
        if self._offsets is None:
            self._offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self._lengths.cumsum(0)])
        return self._offsets


FORMS = {
    "tensor": (lambda ids: ids, lambda model, batch: model(batch)),
    "tuple": (lambda ids: (torch.zeros(3), ids), lambda model, batch: model(batch[1])),
    "dict": (lambda ids: {"label": ids[:, 0], "features": {"ids": ids}}, lambda m, b: m(b["features"]["ids"])),
    "namedtuple": (lambda ids: Point(ids, ids[0]), lambda model, batch: model(batch.ids)),
    "dataclass": (lambda ids: Sample(ids, ids[0]), lambda model, batch: model(batch.ids)),
    "jagged": (lambda ids: {"sparse": Jagged(ids)}, lambda m, b: m(b["sparse"].values(), b["sparse"].offsets()[:-1])),
    "list": (lambda ids: [ids, ids + 1], lambda model, batch: model(batch[0]) + model(batch[1])),
}


@pytest.mark.parametrize("form", [name for name in FORMS if name != "jagged"])
def test_the_first_batch_shows_what_the_model_looks_up(device, monkeypatch, form):
    make, forward = FORMS[form]
    batches, model = [make(ids) for ids in ids_of_steps(6)], table()
    expected = train([make(ids) for ids in ids_of_steps(6)], table(), forward)
    plans = Plans(model, monkeypatch)
    assert_same_bits(train(te.prefetch(batches, model, 2), model, forward), expected)
    forwards = 2 if form == "list" else 1
    assert (plans.found, plans.missed) == (5 * forwards, forwards)


def test_jagged_batches_are_told(device, monkeypatch):
    """Their offsets without the last are another tensor each time, so the forward has to be given the one named."""
    model = te.TieredEmbeddingBag(
        ROWS, WIDTH, mode="sum", capacity=5, optimizer=te.SGD(lr=0.5), include_last_offset=True
    )
    plans = Plans(model, monkeypatch)
    for batch in te.prefetch([Jagged(ids) for ids in ids_of_steps(5)], model):
        model(batch.values(), batch.offsets()).sum().backward()
    assert (plans.found, plans.missed) == (4, 1)


def test_constant_offsets_are_no_part_of_the_batch(device, monkeypatch):
    offsets, model = torch.arange(6) * 3, table()
    plans = Plans(model, monkeypatch)
    for ids in te.prefetch([ids.reshape(-1) for ids in ids_of_steps(5)], model):
        model(ids, offsets).sum().backward()
    assert (plans.found, plans.missed) == (4, 1)


def test_several_modules_inside_a_model(device, monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = nn.ModuleDict({"a": table(), "b": table(seed=1)})
            self.rows = te.TieredEmbedding(ROWS, WIDTH, capacity=3, optimizer=te.SGD(lr=0.5))

        def forward(self, batch):
            return self.bags["a"](batch["a"]) + self.bags["b"](batch["b"]) * self.rows(batch["c"])

    def batches():
        return [{"a": ids, "b": ids + 20, "c": ids[:, 0]} for ids in ids_of_steps(6)]

    def run(loop, model):
        for batch in loop:
            model(batch).square().sum().backward()
        return [part for module in (*model.bags.values(), model.rows) for part in bits(module)]

    plain = Model()
    expected = run(batches(), plain)
    learned, told = Model(), Model()
    plans = [Plans(module, monkeypatch) for module in (*learned.bags.values(), learned.rows)]
    assert_same_bits(run(te.prefetch(batches(), learned, 2), learned), expected)
    assert [(each.found, each.missed) for each in plans] == [(5, 1)] * 3
    plans = [Plans(module, monkeypatch) for module in (*told.bags.values(), told.rows)]

    def name(batch):
        return {"bags.a": batch["a"], told.bags["b"]: (batch["b"],), "rows": [batch["c"]]}

    assert_same_bits(run(te.prefetch(batches(), told, ids_of=name), told), expected)
    assert [(each.found, each.missed) for each in plans] == [(6, 0)] * 3


def test_workers_of_a_data_loader(monkeypatch):
    data = TensorDataset(torch.arange(24).reshape(12, 2) % ROWS, torch.arange(12))
    runs = []
    for prefetched in (False, True):
        loader, model = DataLoader(data, batch_size=3, num_workers=2), table()
        loop = te.prefetch(loader, model) if prefetched else loader
        assert len(loop) == 4
        for _ in range(2):
            runs.append(train(loop, model, lambda model, batch: model(batch[0])))
    assert_same_bits(runs[0], runs[2])
    assert_same_bits(runs[1], runs[3])


def test_a_tensor_that_was_changed_is_planned_anew(device, monkeypatch):
    batches, model = ids_of_steps(4), table()
    plans = Plans(model, monkeypatch)
    for ids in te.prefetch(batches, model, ids_of=lambda ids: ids):
        before = model(ids.clone()).detach()
        ids.add_(1)
        assert not equal(model(ids), before)
        ids.sub_(1)
        with torch.no_grad():
            assert equal(model(ids), before)
        break
    assert plans.found == 0
    assert idle(model)


def test_a_failing_plan_leaves_its_error_to_the_forward(device):
    good, bad = torch.tensor([[1, 2]]), torch.tensor([[3, ROWS]])
    model = table(check_ids="always")
    seen = []
    # on a GPU nothing is planned ahead then, which a warning says
    warned = contextlib.nullcontext() if device == "cpu" else pytest.warns(UserWarning, match="plan nothing ahead")
    with warned:
        loop = te.prefetch([good, bad, good.float(), good.clone()], model, 3, ids_of=lambda ids: ids)
    for ids in loop:
        try:
            model(ids).sum().backward()
        except IdOutOfRangeError as error:
            seen.append(str(error))
        except te.TieredEmbError as error:
            seen.append(str(error))
    assert len(seen) == 2
    assert f"id {ROWS} at position 1" in seen[0]
    assert "float32" in seen[1]
    assert idle(model)


def test_a_storage_that_fails_fails_the_batch_that_needs_it(device, monkeypatch, tmp_path):
    model = staged(tmp_path, "failing")
    cold = model.tables.groups[0].cache.cold
    reserve, lost = cold.reserve_scores, {10, 15}

    def failing(keys):
        if lost & set(keys.tolist()):
            raise StorageFullError(f"cannot read {sorted(keys.tolist())}")  # a GPU misses them in any order
        reserve(keys)

    monkeypatch.setattr(cold, "reserve_scores", failing)  # the first step of each read
    batches = [torch.tensor([[row, row + 1]]) for row in range(0, 20, 2)]
    expected, failed = table(), []
    for step, ids in enumerate(te.prefetch(batches, model, 2, ids_of=lambda ids: ids)):
        try:
            model(ids).sum().backward()
        except StorageFullError as error:
            failed.append((step, str(error)))
            lost.discard(15)  # in reach again when its forward comes
        else:
            expected(ids).sum().backward()
    assert failed == [(5, "cannot read [10, 11]")]
    lost.clear()
    assert idle(model)
    assert_same_bits(bits(model), bits(expected))


class Moved:
    """As TorchRec's types move."""

    def __init__(self, *where):
        self.where = where

    def to(self, *where, **how):
        return Moved(*where)


@dataclasses.dataclass
class Placed:
    """Has fields, and a `to` of its own."""

    ids: torch.Tensor

    def to(self, device):
        raise AssertionError


class Items(list):
    def __init__(self, first, second):
        super().__init__([first, second])


def test_batches_of_any_form_are_mapped():
    tensor = torch.tensor([1.0])
    named, ordered = Point(tensor, "label"), collections.OrderedDict(b=tensor, a=[tensor])
    default = collections.defaultdict(int, ids=(tensor, None))
    batch = {
        "named": named,
        "ordered": ordered,
        "default": default,
        "sample": Sample(tensor, 3),
        "other": Moved(),
        5: "x",
    }
    mapped = map_tensors(batch, lambda value: value + 1, lambda value: getattr(value, "to", lambda _: value)("there"))
    assert mapped["named"].ids == 2
    assert mapped["named"].label == "label"
    assert list(mapped["ordered"]) == ["b", "a"]
    assert mapped["ordered"]["a"][0] == 2
    assert mapped["default"]["ids"] == (2, None)
    assert mapped["default"]["absent"] == 0
    assert mapped["sample"].ids == 2
    assert mapped["sample"].label == 3
    assert mapped["other"].where == ("there",)
    assert mapped[5] == "x"
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert map_tensors(packed, torch.neg) is packed
    assert map_tensors(packed, torch.neg, lambda value: value.to(torch.float64)).data.dtype == torch.float64
    assert map_tensors(Placed(tensor), torch.neg).ids == -1
    assert map_tensors(Items(tensor, 3), torch.neg) == [-tensor, 3]
    assert tensor == 1
    assert batch["ordered"]["b"] is tensor
    assert map_tensors(types.MappingProxyType({"ids": tensor}), torch.neg)["ids"] == -1


def test_batches_in_host_memory_come_to_the_gpu(gpu, monkeypatch):
    with torch.device("cpu"):
        batches = [{"ids": ids, "name": "n"} for ids in ids_of_steps(7)]
    expected = train(ids_of_steps(7), table(), lambda model, ids: model(ids))
    for depth in (0, 1, 3):
        model = table()
        plans = Plans(model, monkeypatch)
        seen = train(te.prefetch(batches, model, depth), model, lambda model, batch: model(batch["ids"]))
        assert_same_bits(seen, expected)
        assert plans.found == (6 if depth else 0)


def test_batches_of_another_form_plan_when_their_forward_comes(device, monkeypatch):
    def batch(step, ids):
        return {"ids": ids} if step != 3 else {"other": ids}

    def forward(model, batch):
        return model(batch["ids"] if "ids" in batch else batch["other"])

    expected = train(ids_of_steps(6), table(), lambda model, ids: model(ids))
    model = table()
    plans = Plans(model, monkeypatch)
    loop = te.prefetch([batch(step, ids) for step, ids in enumerate(ids_of_steps(6))], model, 2)
    assert_same_bits(train(loop, model, forward), expected)
    assert (plans.found, plans.missed) == (4, 2)


def test_sparse_tensors_in_a_batch_are_left_alone(device):
    model = table()
    batches = [{"label": torch.eye(3).to_sparse(), "ids": ids, "sizes": list(range(5))} for ids in ids_of_steps(4)]
    expected = train(ids_of_steps(4), table(), lambda model, ids: model(ids))
    assert_same_bits(train(te.prefetch(batches, model), model, lambda model, batch: model(batch["ids"])), expected)


def test_an_error_of_ids_of_comes_at_its_batch(device):
    model, seen = table(), []

    def name(ids):
        if ids.sum() == batches[3].sum():
            raise KeyError("no such feature")
        return ids

    batches = ids_of_steps(6)

    def loop():
        for ids in te.prefetch(batches, model, 2, ids_of=name):
            model(ids).sum().backward()
            seen.append(ids)

    with pytest.raises(KeyError, match="no such feature"):
        loop()
    assert len(seen) == 3


def test_an_output_that_is_dropped_inside_the_loop_locks_nothing(device):
    model = table()
    for ids in te.prefetch(ids_of_steps(5), model, 0, ids_of=lambda ids: ids):
        out = model(ids)
        del out
        assert idle(model)
    for step, ids in enumerate(te.prefetch(ids_of_steps(5), model, 1, ids_of=lambda ids: ids)):
        out = model(ids)
        del out
        assert step < 4 or idle(model)  # until then the next batch may be in flight


@pytest.mark.parametrize("depth", [0, 2])
def test_a_storage_that_is_full_loses_nothing(device, monkeypatch, tmp_path, depth):
    model, plain = staged(tmp_path, "full"), staged(tmp_path, "plain")
    cold = model.tables.groups[0].cache.cold
    reserve, asked, failed = cold.reserve, [], []

    def full(keys):
        if len(keys):
            asked.append(len(keys))
            if len(asked) in (3, 4, 9):
                raise StorageFullError("full")
        return reserve(keys)

    monkeypatch.setattr(cold, "reserve", full)
    batches = ids_of_steps(30)
    for step, ids in enumerate(te.prefetch(batches, model, depth, ids_of=lambda ids: ids)):
        while True:
            try:
                out = model(ids)
            except StorageFullError:
                failed.append(step)
            else:
                break
        out.sum().backward()
        assert_same_bits([out], [trained(plain, ids)])
    assert len(asked) > 9
    assert failed or depth  # a plan that failed ahead is made again by its forward
    assert_same_bits(bits(model), bits(plain))
    assert idle(model)


def trained(model, ids):
    out = model(ids)
    out.sum().backward()
    return out


def test_a_batch_computes_while_the_next_one_waits_for_its_storage(device, monkeypatch, tmp_path):
    model, plain = staged(tmp_path, "ahead"), staged(tmp_path, "plain")
    cold = model.tables.groups[0].cache.cold
    reserve, computed, waited = cold.reserve_scores, threading.Semaphore(0), []

    def slow(keys):
        if threading.current_thread().name.startswith("tieredemb-prefetch"):
            waited.append(computed.acquire(timeout=20))
        reserve(keys)

    monkeypatch.setattr(cold, "reserve_scores", slow)  # the first step of each read
    monkeypatch.setattr(plan_executors.WorkerExecutor, "QUICK", 0.0)  # or a GPU's plans are made on this thread
    batches = ids_of_steps(6)
    for step, ids in enumerate(te.prefetch(batches, model, ids_of=lambda ids: ids)):
        if step == 0 and device == "cpu":
            computed.release()  # nothing computes while the first one is fetched; on a GPU this thread does that
        model(ids).sum().backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        computed.release()
    for ids in batches:
        plain(ids).sum().backward()
    assert len(waited) >= (5 if device == "cpu" else 4)  # on a GPU this thread makes the first plan
    assert all(waited)
    assert_same_bits(bits(model), bits(plain))
    assert idle(model)


def test_lookups_and_updates_go_on_while_a_plan_waits_for_the_storage(device, monkeypatch, tmp_path):
    model, plain = staged(tmp_path, "slow"), staged(tmp_path, "plain")
    cold = model.tables.groups[0].cache.cold
    reserve, waits, may_go_on = cold.reserve_scores, threading.Event(), threading.Event()

    def slow(keys):
        waits.set()
        assert may_go_on.wait(20)
        reserve(keys)

    early, late = torch.tensor([[1, 2]]), torch.tensor([[30, 31]])
    out = model(early)
    monkeypatch.setattr(cold, "reserve_scores", slow)
    later = threading.Thread(target=lambda: model(late).sum().backward())
    later.start()
    assert waits.wait(20)
    update = threading.Thread(target=lambda: out.sum().backward())
    update.start()
    update.join(20)
    went_on = not update.is_alive()
    may_go_on.set()
    later.join()
    update.join()
    assert went_on
    for ids in ([[1, 2]], [[30, 31]]):
        plain(torch.tensor(ids)).sum().backward()
    assert_same_bits(bits(model), bits(plain))


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["break", "error", "loader's error", "end", "close"])
def test_a_loop_that_is_left_locks_nothing(device, how):
    model = table(capacity=6)

    def loader():
        for step, ids in enumerate(ids_of_steps(9, size=2)):
            if how == "loader's error" and step == 5:
                raise KeyError("the loader's own")
            yield ids

    steps = 0

    def loop():
        nonlocal steps
        batches = iter(te.prefetch(loader(), model, 3, ids_of=lambda ids: ids))
        for ids in batches:
            model(ids).sum().backward()
            steps += 1
            if how == "break" and steps == 4:
                break
            if how == "error" and steps == 4:
                raise KeyError("the loop's own")
            if how == "close" and steps == 4:
                batches.close()

    if "error" in how:
        with pytest.raises(KeyError, match="the loader" if how.startswith("loader") else "the loop"):
            loop()
    else:
        loop()
    assert steps == {"loader's error": 5, "end": 9}.get(how, 4)
    assert idle(model)
    with torch.no_grad():  # every row can be evicted
        before = model.stats()
        model(torch.arange(6)[None] + 30)
    assert (model.stats() - before).rows_overflow == 0


def test_a_loop_is_left_by_who_has_a_lock_that_its_plan_waits_for(device, monkeypatch):
    """As Ctrl-C may leave one taken until the frames are gone that it went through."""
    model, ended = table(capacity=6), threading.Event()
    steps = ids_of_steps(4, size=2)
    cache = model.tables.groups[0].cache
    monkeypatch.setattr(cache, "release_locks", lambda: None)  # or it would be given back when a plan is asked for

    def leaves():
        loop = iter(te.prefetch(steps, model, 2, ids_of=lambda ids: ids))
        with cache.whole():
            next(loop)  # has others planned, on a thread where there is one
            loop.close()
        ended.set()

    thread = threading.Thread(target=leaves, daemon=True)
    thread.start()
    thread.join(30)
    assert ended.is_set()
    for ids in te.prefetch(steps, model):
        model(ids).sum().backward()
    deadline = time.monotonic() + 30
    while not idle(model) and time.monotonic() < deadline:
        time.sleep(0.01)  # what was being planned is dropped once it is made
    assert idle(model)


def calls_of_warm_steps(step):
    """Python calls of the package in a step: the median of several, their backward on this thread, which counts."""
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(9):
            step()
        with Calls() as calls:
            found = []
            for _ in range(5):
                before = len(calls.files)
                step()
                found.append(len(calls.files) - before)
    return statistics.median(found)


def state_around():
    """What a loop changes that steps depend on, beside the model."""
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("tieredemb-prefetch")}
    return torch._C._is_multithreading_enabled(), gc.isenabled(), [*LISTENERS], [*_RUNNING], threads


@pytest.mark.parametrize("how", ["end", "break", "error", "captured"])
def test_steps_after_a_loop_do_what_they_did_before(device, how):
    model, (first, *batches) = table(), ids_of_steps(90)

    def step(ids=first):
        model(ids).square().sum().backward()

    calls, state = calls_of_warm_steps(step), state_around()
    train = te.graph_step(step) if how == "captured" else step
    with contextlib.suppress(KeyError):
        for number, ids in enumerate(te.prefetch(batches, model)):
            train(ids)
            if number == 80 and how == "break":
                break
            if number == 80 and how == "error":
                raise KeyError("the loop's own")
    assert state_around() == state
    assert not model.planned.waiting
    assert calls_of_warm_steps(step) == calls


def test_a_loop_does_not_keep_the_batch_that_it_has_learned_from(device):
    model, batches = table(), []

    def loader():
        for ids in ids_of_steps(6):
            ids = ids.clone()
            batches.append(weakref.ref(ids))
            yield ids

    for number, ids in enumerate(te.prefetch(loader(), model)):
        model(ids).sum().backward()
        del ids
        if number == 4:
            gc.collect()
            assert batches[0]() is None


def test_loops_follow_one_another(device):
    model, batches = table(), ids_of_steps(4)
    loop = te.prefetch(batches, model, 2)
    runs = [train(loop, model, lambda model, ids: model(ids)) for _ in range(3)]
    plain = table()
    assert_same_bits([part for run in runs for part in run], [
        part for _ in range(3) for part in train(ids_of_steps(4), plain, lambda model, ids: model(ids))
    ])  # fmt: skip


def test_checkpoints_and_copies_inside_the_loop_drop_its_plans(device, tmp_path):
    model = table()
    for step, ids in enumerate(te.prefetch(ids_of_steps(6), model, 2, ids_of=lambda ids: ids)):
        model(ids).sum().backward()
        if step == 1:
            model.save_checkpoint(str(tmp_path))
            saved = bits(model)
        if step == 3:
            model.load_checkpoint(str(tmp_path))
            assert_same_bits(bits(model), saved)
    plain = table()
    for step, ids in enumerate(ids_of_steps(6)):
        if step not in (2, 3):
            plain(ids).sum().backward()
    assert_same_bits(bits(model), bits(plain))


# --- bad input --------------------------------------------------------------------------------------------------------


def test_ids_that_the_model_computes_are_warned_about(device):
    model = table()
    with pytest.warns(UserWarning, match="what 'the model' will.*nothing is fetched ahead.*ids_of.*loop over"):
        runs = train(te.prefetch(ids_of_steps(5), model), model, lambda model, ids: model((ids + 1) % ROWS))
    assert_same_bits(runs, train(ids_of_steps(5), table(), lambda model, ids: model((ids + 1) % ROWS)))


def test_warnings_name_the_line_of_the_loop(device):
    def go_through(loop, model):
        for ids in loop:
            model((ids + 1) % ROWS)

    for ids_of in (None, lambda ids: ids):
        model = table()
        with pytest.warns(UserWarning, match="ids_of") as told:
            go_through(te.prefetch(ids_of_steps(3), model, ids_of=ids_of), model)
        lines = {(each.filename, each.lineno) for each in told if "ids_of" in str(each.message)}
        assert lines == {(__file__, go_through.__code__.co_firstlineno + 1)}


def test_plans_that_no_forward_takes_are_warned_about(device):
    model = table()
    with pytest.warns(UserWarning, match="planned a batch that no forward looked up.*ids_of"):
        train(te.prefetch(ids_of_steps(5), model, ids_of=lambda ids: ids), model, lambda model, ids: model(ids.clone()))
    assert idle(model)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"depth": -1}, "depth"),
        ({"depth": 1.5}, "depth"),
        ({"depth": True}, "depth"),
        ({"ids_of": 3}, "ids_of"),
        ({"model": nn.Linear(2, 2)}, "no tiered tables"),
        ({"model": None}, "model must be"),
    ],
)
def test_wrong_arguments_are_refused(keywords, message):
    with pytest.raises(ConfigError, match=message):
        te.prefetch(**{"loader": [], "model": table(), **keywords})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (lambda ids: {"nothing": ids}, "'nothing'"),
        (lambda ids: {table(): ids}, "no tiered module of the model"),
        (lambda ids: (ids, ids, ids), "ids, or"),
        (lambda ids: "ids", "ids, or"),
        (lambda ids: [], None),
    ],
)
def test_what_ids_of_returns_is_checked(told, message):
    model = table()
    loop = te.prefetch(ids_of_steps(2), model, ids_of=told)
    if message is None:
        assert len(list(loop)) == 2
        return
    with pytest.raises(ConfigError, match=message):
        list(loop)


def test_quick_plans_over_a_storage_are_made_by_who_submits_them(gpu, monkeypatch, tmp_path):
    """And in the order of the batches, whatever thread makes each."""
    model, plain = staged(tmp_path, "mixed"), staged(tmp_path, "plain")
    cold, reserve, made = model.tables.groups[0].cache.cold, model.tables.groups[0].cache.cold.reserve_scores, []

    def seen(keys):
        quick = not threading.current_thread().name.startswith("tieredemb-prefetch")
        made.append(quick)
        time.sleep(0.0 if len(made) in (1, 2, 5, 6, 7) else 0.05)
        reserve(keys)

    monkeypatch.setattr(cold, "reserve_scores", seen)
    monkeypatch.setattr(plan_executors.WorkerExecutor, "QUICK", 0.04)
    batches = ids_of_steps(14)
    for ids in te.prefetch(batches, model, 3, ids_of=lambda ids: ids):
        model(ids).sum().backward()
    for ids in batches:
        plain(ids).sum().backward()
    assert_same_bits(bits(model), bits(plain))
    assert {True, False} <= set(made)
    assert idle(model)


def test_a_tensor_that_shows_less_of_its_memory_since_has_no_plan():
    """An assignment to its data counts up no version."""
    ids, forwards, tables = torch.arange(6), PlannedForwards(), object()
    forwards.add(Planned([(tables, (ids,))], CompletedFuture(None)))
    ids.data = ids.data[:4]
    assert forwards.take(tables, (ids,)) is None
    assert len(forwards.waiting) == 1


def test_plans_are_all_given_up_whatever_one_raises():
    dropped = []

    class Among:
        def drop(self, planned):
            dropped.append(planned)
            if planned == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drop_all([(Among(), number) for number in range(3)])
    assert sorted(dropped) == [0, 1, 2]


def test_a_captured_step_is_told_of_as_many_batches_as_it_asks_for():
    """Which the loader is asked for, and which nobody else plans; the next loop has its own depth again."""
    table = te.TieredEmbeddingBag(100, 4, optimizer=te.SGD(lr=0.1))
    given, fetched = [torch.tensor([[number]]) for number in range(6)], []

    def loader():
        for ids in given:
            fetched.append(ids)
            yield ids

    def given_up():
        pass

    loop, ahead = te.prefetch(_Again(loader), table), []
    for ids in loop:
        run = running(ids)
        run.leave_planning_to(given_up, 2)
        ahead.append((len(fetched), run.following(2)))
    numbers = [(count, [int(each) for each in following]) for count, following in ahead]
    assert numbers == [(2, [1]), (4, [2, 3]), (5, [3, 4]), (6, [4, 5]), (6, [5]), (6, [])]
    fetched.clear()
    next(iter(loop))
    assert len(fetched) == 2


def test_a_loop_behind_one_that_a_captured_step_has_planned_for_plans_nothing_in_vain():
    """Its first batch plans for itself, and the next ones too if no captured step takes them."""
    model, batches = table(), ids_of_steps(6)

    def given_up():
        pass

    def run(*, is_taken):
        before, planned = model.stats(), []
        for ids in te.prefetch(batches, model, ids_of=lambda ids: ids):
            if is_taken:
                running(ids).leave_planning_to(given_up, 2)
            planned.append(bool(model.planned.waiting))
            model(ids).sum().backward()
        return (model.stats() - before).lookups, planned

    lookups = sum(ids.numel() for ids in batches)
    assert run(is_taken=True)[0] > lookups  # the first loop plans ahead before it knows
    assert run(is_taken=True) == (lookups, [False] * 6)
    assert run(is_taken=False) == (lookups, [False] + [True] * 5)


class _Again:
    """What a function returns, for each loop anew."""

    def __init__(self, function):
        self._function = function

    def __iter__(self):
        return self._function()
