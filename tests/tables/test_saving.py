"""state_dict and checkpoints of the modules; files that reopen; kills at any moment."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import forks
import pytest
import torch
from devices import equal, randint
from torch import nn

import tieredemb as te
from tieredemb.errors import (
    BrokenCacheError,
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    StorageError,
    StorageFormatError,
    StorageFullError,
    StorageLockedError,
    UncleanFileError,
)
from tieredemb.storage import range_copies
from tieredemb.storage.system import system
from tieredemb.tables import table_set
from tieredemb.tables.group import move_group
from tieredemb.tables.row_state import LAGGING

ROWS, WIDTH = 40, 4


def make(optimizer=None, **keywords):
    keywords = {"capacity": 4, "mode": "sum"} | keywords
    return te.TieredEmbeddingBag(ROWS, WIDTH, optimizer=optimizer or te.SparseAdam(lr=0.1), **keywords)


def step(bag, *values):
    bag(torch.tensor([values])).sum().backward()


def everything(bag):
    state = bag.fused_optimizer.state_dict()["state"][0]
    return [bag.state_dict()["weight"], *(state[name] for name in sorted(state) if name != LAGGING)]


def numbers(model):
    """Weights and optimizer state of all tables of a collection."""
    state = model.fused_optimizer.state_dict()["state"]
    return [*model.state_dict().values(), *(value for entry in state.values() for value in entry.values())]


def same(a, b):
    return all(equal(x, y) for x, y in zip(a, b, strict=True))


def test_state_dict_loads_into_torch_and_back(device):
    bag = make()
    step(bag, 1, 2, 3)
    theirs = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
    assert theirs.load_state_dict(bag.state_dict(), strict=True)
    with torch.no_grad():
        theirs.weight += 1
    assert bag.load_state_dict(theirs.state_dict(), strict=True)
    assert equal(bag.state_dict()["weight"], theirs.weight)


def test_state_dict_is_a_snapshot(device):
    bag = make()
    taken = bag.state_dict()["weight"]
    kept = taken.clone()
    step(bag, 1, 2)
    bag.flush()
    assert equal(taken, kept)


def test_state_dict_asks_for_huge_pages():
    bag = te.TieredEmbeddingBag(300_000, 32, capacity=10, device="cpu")
    weight = bag.state_dict()["weight"]
    middle, flags = weight.data_ptr() + weight.nbytes // 2, ""
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, dash, rest = line.partition(" ")[0].partition("-")
            if dash and ":" not in first:
                is_here = int(first, 16) <= middle < int(rest, 16)
            elif is_here and line.startswith("VmFlags:"):
                flags = line
    assert " hg" in flags or not os.path.exists("/sys/kernel/mm/transparent_hugepage")


def test_state_dict_inside_a_model_has_prefixed_names(device):
    tables = [te.TableConfig(name=n, num_embeddings=5, embedding_dim=4) for n in ("a", "b")]
    model = nn.Sequential(te.TieredEmbeddingBagCollection(tables), nn.Linear(8, 1))
    names = ["0.tables.a.weight", "0.tables.b.weight", "1.weight", "1.bias"]
    assert list(model.state_dict()) == names
    model.load_state_dict(model.state_dict(), strict=True)
    state = model.state_dict()
    del state["0.tables.b.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.tables\.b\.weight"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.more"):
        model.load_state_dict(model.state_dict() | {"0.more": torch.zeros(1)})


def test_load_state_dict_refuses_other_shapes_and_changes_nothing(device):
    bag = make()
    before = bag.state_dict()["weight"]
    with pytest.raises(RuntimeError, match=r"shape \(3, 3\)"):
        bag.load_state_dict({"weight": torch.zeros(3, 3)})
    assert equal(bag.state_dict()["weight"], before)


def test_state_dict_larger_than_memory_is_refused_in_favour_of_checkpoints(device, monkeypatch):
    import tieredemb.tables.table_set as table_set

    monkeypatch.setattr(table_set, "available_memory_bytes", lambda: 100)
    with pytest.raises(StorageFullError, match="save_checkpoint"):
        make().state_dict()


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["host", "file"])
@pytest.mark.parametrize("optimizer", [te.SGD(lr=0.1), te.Adagrad(), te.RowWiseAdagrad(), te.SparseAdam()], ids=repr)
def test_checkpoint_continues_bit_for_bit_at_another_capacity_and_tier(device, tmp_path, optimizer, storage):
    bag = make(optimizer)
    for values in ((1, 2, 3), (3, 4), (5, 6, 7, 8, 9)):
        step(bag, *values)
    bag.fused_optimizer.param_groups[0]["lr"] = 0.025
    bag.save_checkpoint(str(tmp_path / "checkpoint"), extra={"epoch": 3})
    other = make(
        optimizer,
        capacity=1.0,
        storage=te.File(str(tmp_path / "rows")) if storage == "file" else None,
        policy=te.LRU() if storage == "file" else None,
    )
    step(other, 30, 31)
    assert other.load_checkpoint(str(tmp_path / "checkpoint")) == {"epoch": 3}
    for values in ((1, 9), (20, 21)):
        step(bag, *values)
        step(other, *values)
    assert same(everything(bag), everything(other))


def test_checkpoint_keeps_the_scores(device):
    import tempfile

    bag, other = make(te.SGD(lr=0.1)), make(te.SGD(lr=0.1))
    for _ in range(5):
        step(bag, 1, 2)
    step(bag, 3)
    with tempfile.TemporaryDirectory() as directory:
        bag.save_checkpoint(directory)
        other.load_checkpoint(directory)
    for values in ((3,), (1,), (2,), (4,), (5,)):  # 5 needs a slot: the row used least goes, as it would have gone
        step(other, *values)
    before = other.stats()
    step(other, 1, 2)
    assert (other.stats() - before).hits == 2


def test_checkpoint_of_other_tables_is_refused_before_anything_changes(device, tmp_path):
    bag = make()
    step(bag, 1, 2)
    bag.save_checkpoint(str(tmp_path))
    for other in (te.TieredEmbeddingBag(ROWS + 1, WIDTH, optimizer=te.SparseAdam()), make(te.Adagrad()), make(seed=5)):
        before = other.state_dict()["weight"]
        with pytest.raises(CheckpointError):
            other.load_checkpoint(str(tmp_path))
        assert equal(other.state_dict()["weight"], before)


def test_a_load_that_was_refused_keeps_no_module_alive(device, tmp_path):
    make().save_checkpoint(tmp_path)

    def refused():
        bag = make(te.SGD(lr=0.1))
        with pytest.raises(CheckpointError):
            bag.load_checkpoint(tmp_path)
        return weakref.ref(bag)

    bag = refused()
    gc.collect()
    assert bag() is None


def test_load_checkpoint_waits_for_batches_in_flight(device, tmp_path):
    bag, plain = make(), make()
    bag.save_checkpoint(str(tmp_path))
    step(bag, 7)
    out = bag(torch.tensor([[1]]))
    with pytest.raises(StorageError, match="in flight"):
        bag.load_checkpoint(str(tmp_path))
    out.sum().backward()
    for row in (7, 1):
        step(plain, row)
    assert same(everything(bag), everything(plain))
    bag.load_checkpoint(str(tmp_path))


def test_checkpoint_needs_a_directory_name(device):
    bag = make()
    for call in (bag.save_checkpoint, bag.load_checkpoint):
        with pytest.raises(ConfigError, match="empty"):
            call("")


def test_damaged_checkpoint_changes_nothing(device, tmp_path):
    bag, plain = make(), make()
    step(bag, 1, 2)
    bag.save_checkpoint(str(tmp_path))
    rows = next(tmp_path.glob("rows-*"))
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1
    rows.write_bytes(content)
    step(bag, 3)  # in the hot cache alone
    with pytest.raises(CheckpointError):
        bag.load_checkpoint(str(tmp_path))
    for values in ((1, 2), (3,)):
        step(plain, *values)
    assert same(everything(bag), everything(plain))


# --- files ------------------------------------------------------------------------------------------------------------


def test_file_reopens_with_rows_state_steps_and_scores(device, tmp_path):
    path = str(tmp_path / "rows")
    kept, plain = make(storage=te.File(path)), make()
    for bag in (kept, plain):
        step(bag, 1, 2, 3)
        step(bag, 3, 4)
    kept.close()
    kept = make(storage=te.File(path))
    for bag in (kept, plain):
        step(bag, 2, 3, 5)
    assert same(everything(kept), everything(plain))
    kept.flush()
    assert kept.tables.groups[0].cache.cold.metadata.batch == 3


def test_file_refuses_another_meaning_of_its_rows(device, tmp_path):
    path = str(tmp_path / "rows")
    make(storage=te.File(path)).close()
    for other in ({"seed": 1}, {"optimizer": te.SGD(lr=1.0)}, {"dtype": torch.float16}, {"padding_idx": 1}):
        with pytest.raises(StorageFormatError):
            make(storage=te.File(path), **other)
    make(storage=te.File(path), capacity=9, policy=te.LRU(), optimizer=te.SparseAdam(lr=5.0)).close()
    make(storage=te.File(path), init=te.Normal(mean=0, std=1)).close()


def test_tables_on_a_file_are_neither_copied_nor_pickled(device, tmp_path):
    bag, twin = make(storage=te.File(tmp_path / "rows")), make()
    for copied in (copy.deepcopy, pickle.dumps):
        step(bag, 1, 2)
        step(twin, 1, 2)
        with pytest.raises(ConfigError, match=r"on the file tier cannot be copied or pickled.*save_checkpoint"):
            copied(bag)
    assert same(everything(bag), everything(twin))


def test_module_that_is_collected_closes_its_file(device, tmp_path):
    path = str(tmp_path / "rows")
    bag = make(storage=te.File(path))
    step(bag, 1, 2)
    expected = everything(bag)
    del bag
    assert same(everything(make(storage=te.File(path))), expected)


TRAIN = """
    import sys, torch
    import tieredemb as te
    if sys.argv[3] != "cpu":
        torch.set_default_device(sys.argv[3])
    storage, optimizer = te.File(sys.argv[1]), te.SparseAdam(lr=0.1)
    bag = te.TieredEmbeddingBag(40, 4, mode="sum", capacity=4, optimizer=optimizer, storage=storage)
    for step in range(10**9 if sys.argv[2] == "forever" else int(sys.argv[2])):
        bag(torch.tensor([[step % 40, step * 7 % 40]])).sum().backward()
        if step == 20:
            print("running", flush=True)
"""


def test_process_that_exits_leaves_a_clean_file(device, tmp_path):
    path = str(tmp_path / "rows")
    command = [sys.executable, "-c", textwrap.dedent(TRAIN), path, "30", device]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    assert "Error" not in process.stderr, process.stderr
    bag, plain = make(storage=te.File(path)), make()
    for i in range(30):
        step(plain, i % 40, i * 7 % 40)
    assert same(everything(bag), everything(plain))


def test_file_of_a_living_process_is_refused_and_of_a_killed_one_is_unclean(tmp_path):
    path = str(tmp_path / "rows")
    with forks.Script(TRAIN, path, "forever", "cpu") as process:
        assert process.readline() == "running\n"
        with pytest.raises(StorageLockedError, match=str(process.pid)):
            make(storage=te.File(path))
    with pytest.raises(UncleanFileError, match="recover"):
        make(storage=te.File(path))
    make(storage=te.File(path, recover=True)).close()
    make(storage=te.File(path)).close()


class SavedRun:
    """A training run over two key spaces that can be saved and resumed."""

    def __init__(self, directory):
        tables = [te.TableConfig(name=n, num_embeddings=3000, embedding_dim=d) for n, d in (("a", 4), ("b", 8))]
        self.model = te.TieredEmbeddingBagCollection(tables, capacity=50, optimizer=te.Adagrad(lr=0.1))
        self.directory = str(directory)
        self.steps = 0

    def step(self):
        ids = (torch.arange(200) * (self.steps * 31 + 7)) % 3000
        (self.model(ids, torch.arange(0, 201, 20)).square().sum() / 100).backward()
        self.steps += 1

    def save(self):
        self.model.save_checkpoint(self.directory, extra={"steps": self.steps})

    def resume(self):
        self.steps = self.model.load_checkpoint(self.directory)["steps"]

    def finish(self, steps):
        while self.steps < steps:
            self.step()
        return [*self.model.state_dict().values(), *self.model.fused_optimizer.state_dict()["state"][1].values()]


def saves_for_ever(directory, pipe):
    torch.set_num_threads(2)
    run = SavedRun(directory)
    while True:
        run.step()
        run.save()
        pipe.send(run.steps)


@pytest.mark.parametrize("saves", [1, 2, 5])
def test_killed_at_any_moment_the_last_complete_checkpoint_loads_bit_for_bit(tmp_path, saves):
    process, pipe = forks.call(saves_for_ever, tmp_path)
    said = [pipe.recv() for _ in range(saves)][-1]
    time.sleep(0.0137 * saves)
    process.kill()
    process.join()
    resumed = SavedRun(tmp_path)
    resumed.resume()
    assert resumed.steps >= said
    assert same(resumed.finish(resumed.steps + 5), SavedRun("").finish(resumed.steps))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_full_disk_is_an_error_and_training_goes_on_when_there_is_space(small_disk):
    rows, width = 20_000, 64
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(700_000))
    keywords = {"mode": "sum", "capacity": 300, "optimizer": te.SGD(lr=0.1)}
    bag = te.TieredEmbeddingBag(rows, width, storage=te.File(str(small_disk / "rows")), **keywords)
    plain = te.TieredEmbeddingBag(rows, width, **keywords)
    batches = [torch.arange(400) + 350 * first for first in range(6)]  # 2,150 rows, 550 kB: more than what is left
    failed = []
    for ids in batches:
        try:
            bag(ids[None]).sum().backward()
            plain(ids[None]).sum().backward()
        except StorageFullError:
            failed.append(ids)
    assert failed
    ballast.unlink()
    for ids in failed:
        for module in (bag, plain):
            module(ids[None]).sum().backward()
    used = torch.cat(batches)[None]
    with torch.no_grad():
        assert equal(bag(used), plain(used))


@pytest.mark.parametrize("ids", [300, 1500])
def test_checkpoint_over_a_file_replaces_rows_that_have_just_left_the_cache(device, tmp_path, ids):
    bag = te.TieredEmbedding(2000, 4, capacity=200, optimizer=te.SGD(lr=1.0), storage=te.File(str(tmp_path / "rows")))

    def train():
        for seed in range(3):
            bag(randint(0, 2000, (ids,), seed=seed)).sum().backward()

    train()
    bag.save_checkpoint(tmp_path / "saved")
    expected = [value.clone() for value in bag.state_dict().values()]
    train()
    bag.load_checkpoint(tmp_path / "saved")
    assert same(bag.state_dict().values(), expected)
    bag.flush()
    assert same(bag.state_dict().values(), expected)


def test_rows_evaluated_in_inference_mode_over_a_file_can_be_trained(device, tmp_path):
    def make(name):
        return te.TieredEmbedding(
            300, 4, capacity=7, optimizer=te.Adagrad(lr=0.5), storage=te.File(str(tmp_path / name))
        )

    evaluated, plain = make("evaluated"), make("plain")
    for seed in range(6):
        if seed % 2 == 0:
            with torch.inference_mode():
                evaluated(randint(0, 300, (40 + 40 * seed,), seed=100 + seed))
        ids = randint(0, 300, (50,), seed=seed)
        for bag in (evaluated, plain):
            bag(ids).sum().backward()
        evaluated.flush()
    assert same(evaluated.state_dict().values(), list(plain.state_dict().values()))


def test_close_that_failed_can_be_repeated(tmp_path, monkeypatch):
    path = str(tmp_path / "rows")
    tables = [te.TableConfig(name=n, num_embeddings=9, embedding_dim=d) for n, d in (("a", 2), ("b", 3))]

    def opened():
        return te.TieredEmbeddingBagCollection(tables, capacity=2, optimizer=te.SGD(lr=1.0), storage=te.File(path))

    model = opened()
    model(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).sum().backward()
    expected = list(model.state_dict().values())
    model(torch.tensor([3, 4]), torch.tensor([0, 1, 2])).backward(torch.zeros(1, 5))  # dirty again

    def full(*_):
        raise StorageFullError("no space left on the test device")

    with monkeypatch.context() as patched:
        patched.setattr(model.tables.groups[0].cache.cold, "write", full)
        with pytest.raises(StorageFullError):
            model.close()
    # none is closed, so that all can be saved elsewhere
    model.save_checkpoint(str(tmp_path / "saved"))
    twin = te.TieredEmbeddingBagCollection(tables, optimizer=te.SGD(lr=1.0))
    twin.load_checkpoint(str(tmp_path / "saved"))
    assert same(twin.state_dict().values(), expected)
    model.close()
    model.close()
    assert same(opened().state_dict().values(), expected)


def test_state_dict_hooks_run_as_in_torch(device):
    bag = make()
    bag.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: state.update({f"{prefix}weight": state.pop(f"{prefix}old")})
    )
    assert nn.Sequential(bag).load_state_dict({"0.old": torch.ones(ROWS, WIDTH)})
    assert equal(bag.state_dict()["weight"], torch.ones(ROWS, WIDTH))


class Biased(te.TieredEmbeddingBag):
    """A subclass with parameters of its own."""

    def __init__(self):
        super().__init__(ROWS, WIDTH, mode="sum")
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.top = nn.Linear(WIDTH, 2)


def test_parameters_of_a_subclass_are_loaded_moved_and_frozen(device):
    first, second = Biased(), nn.Sequential(Biased())
    with torch.no_grad():
        first.bias += 1
    state = first.state_dict()
    second.load_state_dict({f"0.{name}": value for name, value in state.items()}, strict=True)
    assert all(equal(value, state[name[2:]]) for name, value in second.state_dict().items())
    del state["bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        first.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*more"):
        first.load_state_dict(first.state_dict() | {"more": torch.zeros(1)})
    first._apply(lambda tensor: tensor + 1)
    assert first.bias.tolist() == [2.0] * WIDTH
    assert not first.requires_grad_(False).top.weight.requires_grad


def test_checkpoint_holds_no_half_of_another_threads_step(device, tmp_path):
    """Every step adds the same to every row, in two key spaces."""
    tables = [te.TableConfig(name=n, num_embeddings=2000, embedding_dim=d) for n, d in (("a", 4), ("b", 8))]
    model = te.TieredEmbeddingBagCollection(tables, capacity=0.1, optimizer=te.SGD(lr=1.0))
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    other = copy.deepcopy(model)
    stop = threading.Event()

    ids, offsets = torch.arange(2000).repeat(2), torch.arange(4001)

    def train():
        while not stop.is_set():
            model(ids, offsets).sum().backward()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(5):
            model.save_checkpoint(str(tmp_path))
            other.load_checkpoint(str(tmp_path))
            assert len({value for weight in other.state_dict().values() for value in weight.unique().tolist()}) == 1
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("optimizer", [te.SparseAdam(lr=0.1), te.Adagrad(lr=0.1), te.Adam(lr=0.1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_state_moves_in_parts_as_in_one(device, monkeypatch, optimizer, dtype, threads):
    monkeypatch.setattr(table_set, "COPY_BYTES", 500)
    monkeypatch.setattr(range_copies, "_CHUNK_BYTES", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source, target = (make(optimizer=optimizer, dtype=dtype) for _ in range(2))
        for ids in ((1, 2, 3), (2, 7), (ROWS - 1,)):
            step(source, *ids)
        step(target, 2, 5)  # hot rows that the load replaces
        target.load_state_dict(source.state_dict())
        target.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
        assert same(everything(target), everything(source))
        step(source, 2, 9)
        step(target, 2, 9)
        assert same(everything(target), everything(source))
    finally:
        torch.set_num_threads(before)


def test_load_state_dict_without_space_changes_nothing(device, monkeypatch):
    bag = make()
    step(bag, 1, 2, 3)
    before, state = everything(bag), {"weight": torch.zeros(ROWS, WIDTH)}

    def full(start, stop):
        raise StorageFullError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(bag.tables.groups[0].cache.cold, "reserve_range", full)
        with pytest.raises(StorageFullError):
            bag.load_state_dict(state)
    assert same(everything(bag), before)
    bag.load_state_dict(state)
    assert equal(bag.state_dict()["weight"], state["weight"])


@pytest.mark.parametrize("error", [OSError(5, "planted"), StorageFullError("planted"), KeyboardInterrupt()], ids=repr)
def test_load_that_fails_half_way_breaks_the_cache_until_another_one(device, tmp_path, monkeypatch, error):
    bag = make()
    step(bag, 1, 2, 3)
    bag.save_checkpoint(str(tmp_path / "one"))
    saved = everything(bag)
    step(bag, 1, 2, 5, 6, 7)

    def fails(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(bag.tables.groups[0].cache.cold, "reserve", fails)
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError):
            bag.load_checkpoint(str(tmp_path / "one"))
    for call in (bag.stats, bag.flush, bag.state_dict, lambda: step(bag, 1)):
        with pytest.raises(BrokenCacheError, match=r"load_checkpoint was interrupted.*mends"):
            call()
    bag.save_checkpoint(str(tmp_path / "half"))
    with pytest.raises(CheckpointError, match=r"load_checkpoint was interrupted.*recover=True"):
        make().load_checkpoint(str(tmp_path / "half"))
    make().load_checkpoint(str(tmp_path / "half"), recover=True)
    bag.load_checkpoint(str(tmp_path / "one"))
    assert same(everything(bag), saved)
    step(bag, 1, 2, 9)


def test_broken_cache_is_loaded_though_a_batch_is_held(device, tmp_path, monkeypatch):
    """As by the traceback of what broke it."""
    bag = make()
    step(bag, 1, 2, 3)
    bag.save_checkpoint(str(tmp_path))
    saved = everything(bag)
    held = bag(torch.tensor([[4, 5]])).sum()
    with pytest.raises(StorageError, match="in flight"):
        bag.load_checkpoint(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(bag.tables, "_write_weight", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bag.load_state_dict(bag.state_dict())
    bag.load_checkpoint(str(tmp_path))
    with pytest.raises(StorageError, match="look it up again"):
        held.backward()
    assert same(everything(bag), saved)
    step(bag, 4, 5)


def test_load_state_dict_that_was_interrupted_is_mended_by_another(device, monkeypatch):
    bag, twin = make(), make()
    for module in (bag, twin):
        step(module, 1, 2, 3)
    with monkeypatch.context() as patched:
        patched.setattr(bag.tables, "_write_weight", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bag.load_state_dict(twin.state_dict())
    optimizer = twin.fused_optimizer.state_dict()
    with pytest.raises(BrokenCacheError, match="load_state_dict was interrupted by ZeroDivisionError"):
        bag.fused_optimizer.load_state_dict(optimizer)  # of what is not in suspect
    bag.load_state_dict(twin.state_dict())
    bag.fused_optimizer.load_state_dict(optimizer)
    for module in (bag, twin):
        step(module, 4, 1)
    assert same(everything(bag), everything(twin))


def test_move_that_fails_half_way_leaves_all_tables_where_they_were(monkeypatch, tmp_path):
    tables = [te.TableConfig(name=f"t{width}", num_embeddings=40, embedding_dim=width) for width in (4, 5)]
    keywords = {"capacity": 10, "optimizer": te.SparseAdam(lr=0.1), "device": "cpu"}
    moved = te.TieredEmbeddingBagCollection(tables, storage=te.File(str(tmp_path / "rows")), **keywords)
    plain = te.TieredEmbeddingBagCollection(tables, **keywords)

    def fail_for_the_second(group, *where):
        if group.space.width == 5:
            raise DeviceMemoryError("no room")
        return move_group(group, *where)

    monkeypatch.setattr("tieredemb.tables.table_set.move_group", fail_for_the_second)
    with torch.device("cpu"):
        for step in range(3):
            for model in (moved, plain):
                model(torch.arange(8) + 5 * step, torch.tensor([0, 2, 4, 6, 8])).sum().backward()
            with pytest.raises(DeviceMemoryError):
                moved.tables.move(torch.device("cpu"))
        assert same(numbers(moved), numbers(plain))
        moved.close()
        again = te.TieredEmbeddingBagCollection(tables, storage=te.File(str(tmp_path / "rows")), **keywords)
        assert same(numbers(again), numbers(plain))


def test_save_needs_no_space_on_the_disk_of_the_row_file(device, tmp_path, monkeypatch):
    """Rows that the file has no page for come from the hot cache."""
    from tieredemb.storage.system import system

    bag, twin = make(storage=te.File(str(tmp_path / "rows")), capacity=9), make(capacity=1.0)
    for module in (bag, twin):
        step(module, 1, 2, 3)
    bag.flush()
    for module in (bag, twin):
        step(module, 3, 20, 39, 5)

    def dead(*_):
        raise OSError(5, "planted")

    with monkeypatch.context() as patched:
        for call in ("fallocate", "msync"):
            patched.setattr(system, call, dead)
        bag.tables.groups[0].cache.cold._weight_pages.clear()
        bag.save_checkpoint(str(tmp_path / "elsewhere"))
    loaded = make()
    loaded.load_checkpoint(str(tmp_path / "elsewhere"))
    assert same(everything(loaded), everything(twin))
    bag.close()


MOST_MIB = 48  # for two chunks of each of many threads, and what libraries make at a first use
PEAKS = """
    import sys, torch, tieredemb as te
    MIB = 1 << 20

    def kib(name):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(name))

    def grows(call):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak is what there is now
        before = kib("VmRSS:")
        call()
        return (kib("VmHWM:") - before) >> 10

    torch.set_num_threads(2)
    rows = 1_000_000
    module = te.TieredEmbeddingBag(rows, 64, capacity=1000, optimizer=te.Adagrad(lr=0.1), device="cpu")
    weight = torch.rand(rows, 64)
    module.load_state_dict({"weight": weight})
    small = te.TieredEmbeddingBag(100, 64, capacity=10, optimizer=te.Adagrad(lr=0.1), device="cpu")
    small.save_checkpoint(sys.argv[1] + "/small")  # what is made and compiled once
    small.load_checkpoint(sys.argv[1] + "/small")
    print(grows(lambda: module.load_state_dict({"weight": weight})))
    print(grows(lambda: module.save_checkpoint(sys.argv[1] + "/large")))
    print(grows(lambda: module.load_checkpoint(sys.argv[1] + "/large")))
    assert torch.equal(module.state_dict()["weight"], weight)
"""


def test_whole_tables_are_set_saved_and_loaded_in_chunks(tmp_path):
    """Of 500 MiB of rows and state none of these calls has more than a few in memory a second time."""
    script = [sys.executable, "-c", textwrap.dedent(PEAKS), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 3
    assert max(peaks) < MOST_MIB, peaks


@pytest.mark.parametrize("junk", [None, 3, 1.5, b"there", {}, ["there"], "a\0b"], ids=repr)
def test_a_directory_that_is_none_is_refused_by_save_and_load(junk):
    bag = te.TieredEmbeddingBag(10, 2, capacity=3)
    for call in (bag.save_checkpoint, bag.load_checkpoint):
        with pytest.raises(ConfigError, match="directory must be the path of a directory"):
            call(junk)


def test_recover_of_a_load_must_be_true_or_false(tmp_path):
    bag = te.TieredEmbeddingBag(10, 2, capacity=3)
    bag.save_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="recover must be True or False"):
        bag.load_checkpoint(tmp_path, recover="yes")


def test_a_load_finds_the_files_of_one_save_whenever_another_replaces_it(tmp_path, monkeypatch):
    def made():
        return te.TieredEmbeddingBag(30, 2, mode="sum", capacity=5, optimizer=te.Adam(lr=0.1))

    def step(bag, number):
        bag(torch.tensor([[number % 30, 3]])).sum().backward()

    saver, real, count, at = made(), system.open, 0, -1

    def opens(path, flags, mode=0o666):
        """Saves once more amid a load, before its open number `at`."""
        nonlocal count
        if loading:
            count += 1
            if count == at:
                replace()
        return real(path, flags, mode)

    def replace():
        nonlocal loading
        loading = False
        step(saver, at)
        saver.save_checkpoint(tmp_path, extra={"save": "later"})
        loading = True

    monkeypatch.setattr(system, "open", opens)
    loading, found = False, []
    for at in range(1, 6):  # noqa: B007 - `opens` reads it
        saver.save_checkpoint(tmp_path, extra={"save": "first"})
        first, loader, count = saver.state_dict()["weight"].clone(), made(), 0
        loading = True
        found.append(loader.load_checkpoint(tmp_path)["save"])
        loading = False
        expected = first if found[-1] == "first" else saver.state_dict()["weight"]
        assert torch.equal(loader.state_dict()["weight"], expected)
        step(loader, 1)
    assert set(found) == {"first", "later"}
