"""Row files and checkpoints that ranks find are compared: those that do not belong together are refused by all."""

from __future__ import annotations

import shutil

import pytest
import torch

import tieredemb as te

TABLES = [
    te.TableConfig(name="user", num_embeddings=50, embedding_dim=4),
    te.TableConfig(name="item", num_embeddings=30, embedding_dim=8),
]
OPTIMIZERS = {"SGD": te.SGD(lr=0.1), "Adagrad": te.Adagrad(lr=0.1), "Adam": te.Adam(lr=0.1)}


def collection(optimizer, where=None, *, tables=TABLES, **flags):
    storage = None if where is None else te.File(f"{where}/rows", **flags)
    return te.ShardedTieredEmbeddingBagCollection(
        tables, sharding=te.RowWise(), capacity=0.2, optimizer=OPTIMIZERS[optimizer], average=False, storage=storage
    )


def train(model, rank, first, steps):
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.cat([torch.randint(0, table.num_embeddings, (6,), generator=draw) for table in TABLES])
        model(ids, torch.arange(0, 13, 1)).sum().backward()


def raised(action):
    try:
        action()
    except te.TieredEmbError as error:
        return type(error).__name__, str(error)
    return "", ""


def opens(rank, size, optimizer, where, flags):
    """Opens files, and takes a step; the error, or the generation before and after it."""
    try:
        model = collection(optimizer, where, **flags)
    except te.TieredEmbError as error:
        return type(error).__name__, str(error)
    before = model.row_files()
    train(model, rank, 5, 1)
    after = model.row_files()
    model.close()
    return before, after


def writes(rank, size, optimizer, where, sessions):
    for session in range(sessions):
        model = collection(optimizer, where)
        train(model, rank, 2 * session, 2)
        rows = model.state_dict()
        model.close()
    return rows


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_files_of_ranks_open_again_and_count_as_one(worlds, tmp_path, optimizer):
    worlds(2).run(writes, optimizer, str(tmp_path), 1)
    for number in (2, 3):
        found = worlds(2).run(opens, optimizer, str(tmp_path), {})
        for rank, (before, after) in enumerate(found):
            assert (before["generation"], after["generation"]) == (number, number + 1)
            assert before["identity"] == after["identity"] == found[0][0]["identity"]
            assert all(f"rank{rank}of2" in file for file in after["files"])


@pytest.mark.parametrize("flags", [{}, {"recover": True}], ids=["plain", "recover"])
@pytest.mark.parametrize("how", ["missing", "older"])
def test_a_file_of_a_rank_that_does_not_belong_is_refused_by_all(worlds, tmp_path, how, flags):
    worlds(2).run(writes, "Adam", str(tmp_path), 1)
    victim = tmp_path / "rows.width8-rank1of2"
    older = victim.read_bytes()
    worlds(2).run(opens, "Adam", str(tmp_path), {})
    victim.unlink()
    if how == "older":
        victim.write_bytes(older)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    for kind, text in worlds(2).run(opens, "Adam", str(tmp_path), flags):
        assert kind == "StorageFormatError"
        assert "rows.width8-rank1of2' is missing" in text if how == "missing" else "generation 3" in text
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_files_of_another_number_of_ranks_are_refused_until_they_are_discarded(worlds, tmp_path):
    worlds(2).run(writes, "SGD", str(tmp_path), 1)
    for kind, text in worlds(3).run(opens, "SGD", str(tmp_path), {}):
        assert kind == "StorageFormatError"
        assert "the number of processes differs" in text
    assert all("of2" in each.name for each in tmp_path.iterdir())
    for before, _ in worlds(3).run(opens, "SGD", str(tmp_path), {"fresh": True}):
        assert before["generation"] == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        f"rows.width{width}-rank{rank}of3" for width in (4, 8) for rank in range(3)
    )


def builds_other_tables(rank, size, where):
    tables = [*TABLES[:1], te.TableConfig(name="item", num_embeddings=30 + rank, embedding_dim=8)]
    return raised(lambda: collection("SGD", where, tables=tables))


def test_ranks_that_are_to_build_other_tables_create_no_file(worlds, tmp_path):
    for kind, text in worlds(2).run(builds_other_tables, str(tmp_path)):
        assert kind == "ConfigError"
        assert "tables differs between the ranks" in text
    assert not list(tmp_path.iterdir())


def loads_what_it_found(rank, size, optimizer, where, found):
    model = collection(optimizer)
    for step in range(2):
        train(model, rank, step, 1)
        model.save_checkpoint(f"{where}/step{step}", extra={"step": step})
    before = model.state_dict()
    error = raised(lambda: model.load_checkpoint(f"{where}/{found[rank]}"))
    after = model.state_dict()
    train(model, rank, 2, 1)
    return error, all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_that_load_different_checkpoints_are_all_refused(worlds, tmp_path, optimizer):
    found = worlds(2).run(loads_what_it_found, optimizer, str(tmp_path), ["step1", "step0"])
    for (kind, text), is_same in found:
        assert kind == "CheckpointError"
        assert "rank 0 loads" in text
        assert f"in '{tmp_path}/step1', whose extra is {{'step': 1}}" in text
        assert f"in '{tmp_path}/step0', whose extra is {{'step': 0}}" in text
        assert is_same


def test_ranks_load_one_checkpoint_by_different_names(worlds, tmp_path):
    (tmp_path / "latest").symlink_to(tmp_path / "step1")
    for (kind, _), is_same in worlds(2).run(loads_what_it_found, "Adam", str(tmp_path), ["step1", "latest"]):
        assert (kind, is_same) == ("", True)


def test_a_copied_checkpoint_is_that_checkpoint(worlds, tmp_path):
    worlds(2).run(loads_what_it_found, "SGD", str(tmp_path), ["step1", "step1"])
    shutil.copytree(tmp_path / "step1", tmp_path / "copy")
    for error in worlds(2).run(loads, str(tmp_path)):
        assert error == ("", "")


def loads(rank, size, where):
    model = collection("SGD")
    return raised(lambda: model.load_checkpoint(f"{where}/{'step1' if rank else 'copy'}"))


def opens_otherwise(rank, size, where):
    """Opens files of small tables that were held whole without saying so, and then as they were written."""
    given = {"capacity": 0.2, "optimizer": OPTIMIZERS["SGD"], "average": False, "storage": te.File(f"{where}/rows")}
    model = te.ShardedTieredEmbeddingBagCollection(TABLES, sharding=te.TableWise(), **given)
    train(model, rank, 0, 2)
    rows = model.state_dict()
    model.close()
    error = raised(lambda: te.ShardedTieredEmbeddingBagCollection(TABLES, **given))
    model = te.ShardedTieredEmbeddingBagCollection(TABLES, sharding=te.TableWise(), **given)
    again = model.state_dict()
    model.close()
    return error, rows, again


def test_files_of_another_sharding_are_refused_by_its_name_and_kept(worlds, tmp_path):
    for (kind, text), rows, again in worlds(2).run(opens_otherwise, str(tmp_path)):
        assert kind == "StorageFormatError"
        assert "pass that (earlier versions held tables of less than 1 MiB whole: TableWise())" in text
        assert rows.keys() == again.keys()
        assert all(torch.equal(rows[name], again[name]) for name in rows)
