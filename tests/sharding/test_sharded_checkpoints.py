"""What one world saves another loads, and one process, and all go on with the same bits."""

from __future__ import annotations

import pytest
from devices import equal
from sharding.ranks import SHARDINGS, batch_of, joined, step_of, tables_of, uneven
from sharding.test_sharded_failures import raised

import tieredemb as te
from tieredemb.errors import StorageFullError
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.storage.checkpoint import directory as checkpoint_directory

TABLES = tables_of(modes=("sum", "mean"), widths=(4, 8))
WORLD = 3  # ranks whose batches are trained, however many processes do
OPTIMIZERS = [te.Adagrad(lr=0.1), te.Adam(lr=0.05), te.RowWiseAdagrad(lr=0.1)]


def shares(rank, size):
    """The ranks of three whose batches a rank of `size` trains on: one process all of them."""
    return [each for each in range(WORLD) if each * size // WORLD == rank]


def batch_for(step, rank, size):
    return joined(TABLES, [batch_of(TABLES, step, each, samples=uneven) for each in shares(rank, size)])


def make(size, sharding, optimizer, **keywords):
    if size == 0:
        return te.TieredEmbeddingBagCollection(TABLES, capacity=0.5, optimizer=optimizer, **keywords)
    return ShardedTieredEmbeddingBagCollection(
        TABLES, sharding=SHARDINGS[sharding], capacity=0.5, optimizer=optimizer, average=False, **keywords
    )


def trains(rank, size, sharding, optimizer, steps, load_from, save_to, keywords=None):
    """Loads, takes steps, and saves. `size` 0: in one process. Returns the tables, and what was saved beside them."""
    model, extra = make(size, sharding, optimizer, **(keywords or {})), None
    if load_from is not None:
        extra = model.load_checkpoint(load_from)
    for step in steps:
        step_of(model, batch_for(step, rank, max(1, size)), weighted=False)
    if save_to is not None:
        model.save_checkpoint(save_to, extra={"step": steps[-1], "rank": rank})
    weights, scores = dict(model.state_dict()), None
    model.close()
    return weights, extra, scores


def run(worlds, size, *args):
    """The same in a world of `size`, or here."""
    return trains(0, 0, *args) if size == 0 else worlds(size).run(trains, *args)[0]


@pytest.mark.parametrize(
    ("sizes", "optimizer"),
    [
        ((0, 2, 3, 0), OPTIMIZERS[0]),
        ((1, 2, 3, 1), OPTIMIZERS[1]),
        ((3, 0, 2, 3), OPTIMIZERS[2]),
        ((3, 3, 3, 3), OPTIMIZERS[1]),
    ],
    ids=str,
)
def test_saved_by_any_world_loaded_by_any_other(worlds, tmp_path, optimizer, sizes):
    expected, _, _ = trains(0, 0, "rows", optimizer, range(12), None, None)
    last = None
    for turn, size in enumerate(sizes):
        sharding = ("rows", "all kinds", "tables", "chosen")[turn]
        steps = range(3 * turn, 3 * turn + 3)
        found, extra, _ = run(worlds, size, sharding, optimizer, steps, last, tmp_path / "saved")
        assert extra is None if last is None else extra == {"step": 3 * turn - 1, "rank": 0}
        last = tmp_path / "saved"
    for name, weight in expected.items():
        assert equal(found[name], weight), name


def fails_to_save(rank, size, who, where, when):
    """Saves once, takes a step, and saves again, in which one rank fails; then loads."""
    model = make(size, "rows", OPTIMIZERS[0])
    step_of(model, batch_for(0, rank, size), weighted=False)
    model.save_checkpoint(where, extra={"step": 0})
    before = dict(model.state_dict())
    step_of(model, batch_for(1, rank, size), weighted=False)
    real = getattr(checkpoint_directory, when)

    def full(*args, **keywords):
        raise StorageFullError("no space is left")

    if rank == who:
        setattr(checkpoint_directory, when, full)
    found = raised(model.save_checkpoint, where, extra={"step": 1})
    setattr(checkpoint_directory, when, real)
    extra = model.load_checkpoint(where)
    after = dict(model.state_dict())
    model.close()
    return found, extra, before, after


@pytest.mark.parametrize(("who", "when"), [(0, "write_spaces"), (1, "write_spaces"), (0, "commit")])
def test_a_save_that_fails_on_one_rank_leaves_the_last_checkpoint(worlds, tmp_path, who, when):
    answers = worlds(2).run(fails_to_save, who, tmp_path / "saved", when)
    for found, extra, _, _ in answers:
        assert found[0] == "StorageFullError"
        assert found[1].startswith(f"rank {who}: ")
        assert extra == {"step": 0}
    _, _, before, after = answers[0]
    for name, weight in before.items():
        assert equal(after[name], weight)
    files = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert len(files) == 1 + 2 * 2  # the manifest, and of each rank a file for each width


def loads_other_things(rank, size, where):
    model = make(size, "rows", OPTIMIZERS[0])
    other = ShardedTieredEmbeddingBagCollection(TABLES[:2], capacity=0.5, optimizer=OPTIMIZERS[0])
    model.save_checkpoint(where)
    found = raised(other.load_checkpoint, where), raised(model.load_checkpoint, f"{where}-none")
    step_of(model, batch_for(0, rank, size), weighted=False)
    model.close()
    other.close()
    return found


def test_what_cannot_be_loaded_is_raised_on_all(worlds, tmp_path):
    for other, none in worlds(2).run(loads_other_things, tmp_path / "saved"):
        assert other[0] == none[0] == "CheckpointError"
        assert "rank 0: the checkpoint in" in other[1]
        assert "there is no checkpoint in" in none[1]
