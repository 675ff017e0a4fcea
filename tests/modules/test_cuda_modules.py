"""The modules on a GPU beyond the bodies that every device runs: one set of bits at any capacity, placement and tier,
the CPU's numbers, batches larger than the cache, copies. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails.
"""

from __future__ import annotations

import copy
import ctypes.util
import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from devices import assert_close, assert_same_bits, equal, idle, on_cpu, randint
from oracle import OracleCollection, integer_weights
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import NAMES, OPTIMIZERS, bits, random_batch, table_configs, train

import tieredemb as te

pytestmark = pytest.mark.usefixtures("gpu")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Upstream gradients are given, so both devices sum the same numbers; a mean square of row-wise Adagrad, a tree on the
# GPU, moves a weight by a unit in its last place.
TOLERANCE = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
ROWS, WIDTH = 1000, 4


def placed(tables, placement):
    return [replace(table, placement=placement) for table in tables]


def run(tables, steps=6, *, weighted=False, integer=False, **keywords):
    """Trains a new collection; returns all its numbers."""
    model = te.TieredEmbeddingBagCollection(tables, **keywords)
    if integer:
        integer_weights(model)
    numbers = [*train(model, tables, steps, weighted=weighted, integer=integer), *bits(model)]
    model.close()
    return numbers


# --- one set of bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_any_capacity_placement_and_tier_gives_the_same_bits(tmp_path, optimizer, dtype):
    tables = table_configs(widths=(4, 5), modes=("sum", "mean", "max"), rows=(1, 3, 100, 300))
    keywords = {"optimizer": optimizer, "dtype": dtype}
    expected = run(placed(tables, "resident"), capacity=1.0, **keywords)
    assert_same_bits(run(placed(tables, "resident"), capacity=1.0, **keywords), expected)
    tables = placed(tables, "cached")
    for capacity in (1, 0.01, 0.1, 1.0):  # 1 is one slot for each width
        assert_same_bits(run(tables, capacity=capacity, **keywords), expected)
    storages = [te.UnifiedMemory(), te.HostMemory(), te.File(str(tmp_path / "rows"))]
    if ctypes.util.find_library("memkind"):
        storages.append(te.Pmem(str(tmp_path)))
    for storage, capacity in itertools.product(storages, (1, 0.1)):
        assert_same_bits(run(tables, capacity=capacity, storage=storage, **keywords), expected)
        for rows in tmp_path.glob("rows*"):
            rows.unlink()


def test_a_resident_table_stands_beside_a_cached_one():
    tables = table_configs(rows=(10, ROWS))
    expected = run(placed(tables, "cached"), capacity=5, optimizer=te.SparseAdam(lr=0.1))
    mixed = [replace(tables[0], placement="resident"), replace(tables[1], placement="cached")]
    assert_same_bits(run(mixed, capacity=20, optimizer=te.SparseAdam(lr=0.1)), expected)


def test_a_table_that_fits_is_resident_by_itself():
    table = te.TieredEmbedding(ROWS, WIDTH, capacity=1.0, optimizer=te.SGD(lr=0.1))
    for seed in range(3):
        table(randint(0, ROWS, (500,), seed=seed)).sum().backward()
    stats = table.stats()
    assert (stats.lookups, stats.hits, stats.evictions, stats.batches) == (1500, 1500, 0, 3)


# --- the CPU's numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("modes", "weighted"), [(("sum", "max"), False), (("sum",), True)], ids=str)
@pytest.mark.parametrize("capacity", [1, 0.1, 1.0])
def test_integer_training_gives_the_bits_of_the_cpu(capacity, modes, weighted):
    runs = []
    for device in ("cpu", "cuda"):
        with torch.device(device):
            tables = table_configs(modes=modes, widths=(4, 5), rows=(1, 3, 40, 300))
            keywords = {"capacity": capacity, "optimizer": te.SGD(lr=1.0), "device": device}
            runs.append(run(tables, weighted=weighted, integer=True, **keywords))
    assert_same_bits(*runs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_training_is_close_to_the_cpu(optimizer, dtype):
    modes = ("sum", "mean", "max") if dtype == torch.float32 else ("sum", "mean")  # a last bit may change a maximum
    runs = []
    for device in ("cpu", "cuda"):
        with torch.device(device):
            tables = table_configs(modes=modes, widths=(4, 5))
            runs.append(run(tables, capacity=0.2, optimizer=optimizer, dtype=dtype, device=device))
    for mine, other in zip(*runs, strict=True):
        assert_close(mine, other, **(TOLERANCE[dtype] if mine.dtype == dtype else TOLERANCE[torch.float32]))


@pytest.mark.parametrize("storage", ["unified", "host", "file"])
def test_untouched_rows_are_those_of_the_cpu(tmp_path, storage):
    storages = {"unified": te.UnifiedMemory(), "host": te.HostMemory(), "file": te.File(str(tmp_path / "rows"))}
    for init in (te.Normal(mean=1.0, std=0.5), te.Uniform(low=-2.0, high=1.0)):
        ours = te.TieredEmbedding(ROWS, WIDTH, capacity=7, storage=storages[storage], init=init, seed=3)
        theirs = te.TieredEmbedding(ROWS, WIDTH, init=init, seed=3, device="cpu").state_dict()["weight"]
        with torch.no_grad():
            ids = torch.arange(0, ROWS, 3)
            assert equal(ours(ids), theirs[ids.cpu()])
        assert equal(ours.state_dict()["weight"], theirs)
        ours.close()
        for rows in tmp_path.glob("rows*"):
            rows.unlink()


# --- batches larger than the cache ------------------------------------------------------------------------------------


def two_calls_in_one_backward(model, step):
    a, b = model(batch(2 * step)), model(batch(2 * step + 1))
    (a.sum() * 2 + b.square().sum() / 8).backward()
    return [a, b]


def backwards_in_reverse_order(model, step):
    a, b = model(batch(2 * step)), model(batch(2 * step + 1))
    (b.square().sum() / 8).backward()
    (a.square().sum() / 8).backward()
    return [a, b]


def evaluation_before_the_backward(model, step):
    out = model(batch(step))
    with torch.no_grad():
        seen = [model(batch(step)), model(batch(step + 50)), model(batch(step))]
    (out.square().sum() / 8).backward()
    return [out, *seen]


def a_forward_that_is_dropped(model, step):
    model(batch(step + 20))
    kept = model(batch(step))
    model(batch(step + 30))
    kept.sum().backward()
    return [kept]


def growing_and_shrinking_batches(model, step):
    outs = []
    for n in (1, 700, 3, 4000, 50):
        out = model(randint(0, ROWS, (n, 2), seed=n + step))
        (out.square().sum() / n).backward()
        outs.append(out)
    return outs


def batch(seed):
    """Bags of 5 over a skewed tenth of the table and over all of it: batches share rows."""
    return torch.cat([randint(0, ROWS // 10, (30, 5), seed=seed), randint(0, ROWS, (30, 5), seed=seed + 1000)])


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[0], OPTIMIZERS[3]], ids=[NAMES[0], NAMES[3]])
@pytest.mark.parametrize(
    "body",
    [
        two_calls_in_one_backward,
        backwards_in_reverse_order,
        evaluation_before_the_backward,
        a_forward_that_is_dropped,
        growing_and_shrinking_batches,
    ],
)
@pytest.mark.parametrize("storage", ["unified", "file"])
def test_batches_larger_than_the_cache_are_exact(tmp_path, body, optimizer, storage):
    runs = []
    for capacity in (1.0, 1, 40):
        cold = te.File(str(tmp_path / f"rows{capacity}")) if storage == "file" else te.UnifiedMemory()
        keywords = {"capacity": capacity, "placement": "cached", "storage": cold}
        model = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", optimizer=optimizer, **keywords)
        outs = [out.detach().clone() for step in range(4) for out in body(model, step)]
        assert idle(model)
        runs.append([*outs, *bits(model)])
        model.close()
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


def test_norms_of_a_batch_larger_than_the_cache_are_limited():
    runs = []
    for capacity in (1.0, 1, 40):
        keywords = {"capacity": capacity, "placement": "cached", "max_norm": 0.5, "optimizer": te.Adagrad(lr=0.1)}
        model = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", **keywords)
        outs = [out.detach().clone() for step in range(3) for out in two_calls_in_one_backward(model, step)]
        runs.append([*outs, *bits(model)])
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


class Blocks(nn.Module):
    """Two lookups, each recomputed in the backward where `reentrant` is not None."""

    def __init__(self, bag):
        super().__init__()
        self.bag = bag

    def block(self, x, ids):
        return torch.tanh(self.bag(ids) + x)

    def forward(self, x, first, second, reentrant):
        for ids in (first, second):
            x = self.block(x, ids) if reentrant is None else checkpoint(self.block, x, ids, use_reentrant=reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("capacity", [1, 40])
def test_recomputed_batches_larger_than_the_cache_are_exact(reentrant, capacity):
    runs = []
    # reentrant checkpoints recompute the last lookup first, and so sum a row's gradients in another order
    for how, size in ((reentrant if reentrant else None, 1.0), (reentrant, capacity)):
        bag = te.TieredEmbeddingBag(
            ROWS, WIDTH, mode="sum", capacity=size, placement="cached", optimizer=te.Adagrad(lr=0.1)
        )
        model, outs = Blocks(bag), []
        for step in range(4):
            x = torch.zeros(60, WIDTH, requires_grad=True)
            out = model(x, batch(step), batch(step + 1), how)
            outs.append(out.detach().clone())
            out.square().sum().backward()
        assert idle(bag)
        runs.append([*outs, *bits(bag)])
    assert_same_bits(*runs)


@pytest.mark.parametrize("capacity", [1, 1.0])
def test_shapes_at_the_edge_train_as_torch_does(capacity):
    """Nothing at all, one row, bags of 5,000, bags of padding."""
    tables = [
        te.TableConfig(name="one", num_embeddings=1, embedding_dim=4),
        te.TableConfig(name="few", num_embeddings=7, embedding_dim=4, padding_idx=2),
    ]
    ours = te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=te.SGD(lr=1.0))
    integer_weights(ours)
    theirs = on_cpu(OracleCollection(tables, sparse=False).load_from(ours))
    reference = torch.optim.SGD(theirs.parameters(), lr=1.0)
    sizes = [([], []), ([0, 0], [0, 0]), ([1, 0], [0, 3]), ([5000, 1], [5000, 2]), ([2, 2], [0, 0])]
    for step, (one, few) in enumerate(sizes):
        edges = torch.tensor([0, *one, *few]).cumsum(0)
        ids = [torch.zeros(sum(one), dtype=torch.int64), randint(0, 7, (sum(few),), seed=step)]
        if step == 2:
            ids[1].fill_(2)
        for dtype in (torch.int64, torch.int32):
            indices = torch.cat(ids).to(dtype)
            out, expected = ours(indices, edges.to(dtype)), theirs(indices.long(), edges)
            assert equal(out, expected)
            reference.zero_grad()
            out.sum().backward()
            expected.sum().backward()
            reference.step()
    assert_same_bits(ours.state_dict().values(), [bag.weight for bag in theirs.bags])


# --- in a model -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A collection and a dense part without matrix products, whose bits might depend on a workspace."""

    def __init__(self, tables, **keywords):
        super().__init__()
        self.table = te.TieredEmbeddingBagCollection(tables, **keywords)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, sum(table.embedding_dim for table in tables)))

    def forward(self, ids, offsets):
        return torch.tanh(self.table(ids, offsets) * self.scale)


def test_compiled_model_gives_the_bits_of_the_eager_one_and_is_compiled_once():
    torch._dynamo.reset()
    tables = table_configs(widths=(4, 5), modes=("sum", "mean"))
    eager = Model(tables, capacity=0.2, optimizer=te.RowWiseAdagrad(lr=0.1))
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="aot_eager")
    counts = []
    for step in range(6):
        ids, offsets, _, upstream = random_batch(tables, 7, step)  # N differs from step to step
        out, expected = compiled(ids, offsets), eager(ids, offsets)
        assert equal(out, expected)
        for each in (out, expected):
            each.backward(upstream)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] > 0
    assert counts == counts[:1] * 6
    assert_same_bits([*bits(model.table), model.scale.grad], [*bits(eager.table), eager.scale.grad])
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_and_loss_scaling_around_a_model(dtype):
    tables = table_configs(widths=(4, 5))
    table = te.TieredEmbeddingBagCollection(tables, capacity=0.2, optimizer=te.SparseAdam(lr=0.1))
    torch.manual_seed(0)
    top = nn.Linear(18, 1)
    dense, fused = torch.optim.SGD(top.parameters(), lr=0.001), table.fused_optimizer  # float16 overflows soon
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=1000)
    fused.attach_grad_scaler(scaler)

    def step(seed, factor=1.0):
        ids, offsets, _, _ = random_batch(tables, 7, seed)
        dense.zero_grad()
        fused.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = top(table(ids, offsets)).float().square().mean() * factor
        scaler.scale(loss).backward()
        found = bool(fused.found_inf)
        for optimizer in (dense, fused):
            scaler.step(optimizer)
        scaler.update()
        return found

    start = bits(table)
    assert not step(0)
    assert not step(1)
    before, scale = bits(table), scaler.get_scale()
    assert scale == 2.0**8
    assert not all(equal(a, b) for a, b in zip(start, before, strict=True))
    for factor in (float("inf"), float("nan")):
        assert step(2, factor)
        assert_same_bits(bits(table), before)
    assert scaler.get_scale() == scale / 4
    assert not step(3)
    assert not all(equal(a, b) for a, b in zip(bits(table), before, strict=True))
    assert all(torch.isfinite(value).all() for value in bits(table))


def test_embeddings_of_a_model_on_the_gpu_are_replaced_there():
    model = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH, mode="sum"), nn.Linear(WIDTH, 1))
    expected = model(batch(0))
    with torch.device("cpu"):  # the default device of a user
        te.replace_embedding_bags(model, capacity=10, optimizer=te.SGD(lr=0.1))
    out = model(batch(0))
    assert out.is_cuda
    assert_close(out, expected)
    out.sum().backward()


# --- batches that stay in flight --------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [3, 40])  # ids whose rows have slots, and more than the cache has
@pytest.mark.parametrize("storage", ["unified", "file"])
def test_a_forward_that_is_kept_alive_locks_all_that_follows_and_nothing_is_lost(tmp_path, storage, held):
    results = []
    for capacity, placement in ((12, "cached"), (1.0, "resident")):
        keywords = {"storage": te.File(str(tmp_path / placement))} if storage == "file" else {}
        table = te.TieredEmbedding(
            ROWS, WIDTH, capacity=capacity, placement=placement, optimizer=te.Adagrad(lr=0.1), **keywords
        )
        seen, kept = [], table(torch.arange(held))
        for step in range(12):
            with torch.no_grad():
                seen.append(table(torch.arange(10 * step, 10 * step + 10) % ROWS))
            out = table(torch.arange(7 * step, 7 * step + 9) % ROWS)
            out.square().sum().backward()
            seen.append(out.detach())
        kept.square().sum().backward()
        seen.append(table(torch.arange(ROWS)).detach())
        results.append([*seen, table.state_dict()["weight"]])
    assert_same_bits(*results)


@pytest.mark.parametrize("storage", ["unified", "file"])
def test_batches_larger_and_smaller_than_the_cache_take_turns(tmp_path, storage):
    """What an index of rows without slots held for one batch is gone for the next that needs it."""
    results = []
    for capacity, placement in ((12, "cached"), (1.0, "resident")):
        keywords = {"storage": te.File(str(tmp_path / placement))} if storage == "file" else {}
        table = te.TieredEmbedding(
            ROWS, WIDTH, capacity=capacity, placement=placement, optimizer=te.Adagrad(lr=0.1), **keywords
        )
        seen = []
        for step in range(6):
            large = [table(torch.arange(30) * (1 + step) % ROWS), table(torch.arange(25) * 3 % ROWS)]
            sum(out.square().sum() for out in large).backward()
            seen += [out.detach() for out in large]
            for small in range(3):
                out = table((torch.arange(4) + 5 * small + step) % ROWS)
                out.square().sum().backward()
                seen.append(out.detach())
        results.append([*seen, table.state_dict()["weight"]])
    assert_same_bits(*results)


def test_counts_of_more_uses_than_a_digit_holds_are_ranked():
    table = te.TieredEmbedding(
        ROWS, WIDTH, capacity=10, policy=te.LFU(half_life_batches=math.inf), optimizer=te.SGD(lr=0.1)
    )
    expected = table.state_dict()["weight"]
    with torch.no_grad():
        table(torch.arange(10))
        hot = table.tables.groups[0].cache.hot
        hot.score.copy_(2**21 + 5 * (torch.arange(10, dtype=torch.int32) * 7 % 10))
        before, weakest = hot.key.tolist(), hot.key[hot.score.argsort()[:4]].tolist()
        table(torch.arange(10, 14))
        assert set(before) - set(hot.key.tolist()) == set(weakest)
        assert equal(table(torch.arange(ROWS)), expected)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["cached", "resident"])
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_train_on_their_own(how, placement):
    tables = placed(table_configs(widths=(4, 5)), placement)
    capacity = 1.0 if placement == "resident" else 5
    first = te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=te.SparseAdam(lr=0.1))
    train(first, tables, 3)
    second = how(first)
    expected = [*train(first, tables, 4), *bits(first)]
    again = [*train(second, tables, 4), *bits(second)]
    assert again[0].is_cuda
    assert_same_bits(again, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize(("source", "target"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_checkpoints_travel_between_devices(tmp_path, source, target, optimizer):
    tables = table_configs(widths=(4, 5), rows=(1, 3, 17, 300))
    with torch.device(source):
        saved = te.TieredEmbeddingBagCollection(tables, capacity=5, optimizer=optimizer, device=source)
        train(saved, tables, 5)
        saved.save_checkpoint(str(tmp_path), extra={"epoch": 1})
    with torch.device(target):
        loaded = te.TieredEmbeddingBagCollection(tables, capacity=0.5, optimizer=optimizer, device=target)
        train(loaded, tables, 2)  # which the checkpoint replaces
        assert loaded.load_checkpoint(str(tmp_path)) == {"epoch": 1}
        assert_same_bits(bits(loaded), bits(saved))
        train(loaded, tables, 2)
    with torch.device(source):
        train(saved, tables, 2)
    for mine, other in zip(bits(loaded), bits(saved), strict=True):
        assert_close(mine, other, **TOLERANCE[torch.float32])


# --- moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["host", "file"])
@pytest.mark.parametrize("optimizer", [OPTIMIZERS[0], OPTIMIZERS[3]], ids=[NAMES[0], NAMES[3]])
def test_tables_move_with_their_model(tmp_path, optimizer, storage):
    cold = te.File(str(tmp_path / "rows")) if storage == "file" else te.HostMemory()
    tables = table_configs(widths=(4, 5), rows=(1, 3, 17, 300))
    model = nn.Sequential(
        te.TieredEmbeddingBagCollection(tables, capacity=9, optimizer=optimizer, storage=cold, device="cpu")
    )
    (table,) = model
    for device in ("cpu", "cuda", "cpu", "cuda"):
        before = bits(table)
        assert model.to(device) is model
        assert_same_bits(bits(table), before)
        with torch.device(device):
            outs = train(table, tables, 3)
        assert outs[0].device.type == device
        assert not all(equal(a, b) for a, b in zip(bits(table), before, strict=True))
    table.close()


def test_moved_tables_train_as_those_that_stayed():
    tables = table_configs(widths=(4, 5), rows=(1, 3, 17, 300))
    stayed, moved = (
        te.TieredEmbeddingBagCollection(tables, capacity=9, optimizer=te.SparseAdam(lr=0.1)) for _ in range(2)
    )
    for step in range(3):
        train(stayed, tables, 1 + step)
        train(moved, tables, 1 + step)
        moved.cpu()
        moved.cuda()
    assert_same_bits(bits(moved), bits(stayed))


def test_tables_with_a_batch_in_flight_do_not_move():
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=9, optimizer=te.SGD(lr=1.0))
    out = bag(batch(0))
    with pytest.raises(te.errors.StorageError, match="in flight"):
        bag.cpu()
    out.sum().backward()
    assert not bag.cpu()(batch(0).cpu()).is_cuda
