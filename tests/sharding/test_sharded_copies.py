"""Tables that all ranks hold: what keeps their copies equal, whatever a rank does by itself. That they have the bits of
one process other tests show, beside tables of the other kinds."""

from __future__ import annotations

import os
import shutil

import torch
from devices import equal
from sharding.ranks import batch_of, calls_of, joined, step_of, tables_of, uneven
from sharding.test_sharded_failures import raised

import tieredemb as te

TABLES = tables_of(modes=("sum", "mean", "max"), widths=(4, 8), rows=(3, 17, 40, 9, 31))
SUMS = tables_of(widths=(4, 8), rows=(3, 17, 40, 9, 31))


def model_of(tables=TABLES, **keywords):
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5, "average": False} | keywords
    return te.ShardedTieredEmbeddingBagCollection(tables, sharding=te.Replicated(), **keywords)


def rows_of(model, tables=TABLES):
    """Every row of every table, as the copy of this rank has it: bags of one id."""
    most = max(table.num_embeddings for table in tables)
    ids = [torch.arange(most).clamp(max=table.num_embeddings - 1) for table in tables]
    with torch.no_grad():
        out = model(torch.cat(ids), torch.arange(most * len(tables) + 1))
    return dict(zip([table.name for table in tables], out.split([t.embedding_dim for t in tables], 1), strict=True))


def steps(model, rank, which, tables=TABLES):
    for step in which:
        step_of(model, batch_of(tables, step, rank, samples=uneven), weighted=False)


def are_alike(found):
    """Whether the copies of all ranks are those of the first."""
    return all(equal(its[name], rows) for its in found for name, rows in found[0].items())


# --- trained ----------------------------------------------------------------------------------------------------------


def trains_otherwise(rank, size, where):
    """With a capacity and a tier of each rank's own; frozen for a while, in which nothing is updated; accumulated."""
    storage = te.File(f"{where}/rows") if rank == 1 else None
    model = model_of(capacity=(1, 0.3, 1.0)[rank], storage=storage)
    steps(model, rank, range(2))
    before = rows_of(model)
    model.requires_grad_(False)
    ids, offsets, *_ = batch_of(TABLES, 2, rank, samples=uneven)
    assert not model(ids, offsets).requires_grad
    frozen = rows_of(model)
    model.requires_grad_()
    with model.accumulate():
        steps(model, rank, range(2, 4))
    after = rows_of(model)
    model.close()
    return before, frozen, after


def test_copies_are_equal_whatever_each_rank_keeps_them_in(worlds, tmp_path):
    model = te.TieredEmbeddingBagCollection(TABLES, optimizer=te.Adagrad(lr=0.1), capacity=1.0)
    whole = [joined(TABLES, [batch_of(TABLES, step, rank, samples=uneven) for rank in range(3)]) for step in range(4)]
    for batch in whole[:2]:
        step_of(model, batch, weighted=False)
    expected = rows_of(model)
    with model.accumulate():
        for batch in whole[2:]:
            step_of(model, batch, weighted=False)
    for before, frozen, after in worlds(3).run(trains_otherwise, tmp_path):
        assert are_alike([expected, before, frozen])
        assert are_alike([rows_of(model), after])


def counts_exchanges(rank, size):
    """The collectives of a lookup whose ids have been exchanged, and of its backward."""
    model = model_of(SUMS)
    ids, offsets, _, upstream = batch_of(SUMS, 0, rank, samples=uneven)
    with calls_of(torch.distributed, "all_to_all_single") as sent:
        out = model(ids, offsets)
        forward = len(sent)
        out.backward(upstream)
    model.close()
    return forward, len(sent) - forward


def test_a_lookup_exchanges_ids_alone(worlds):
    """Of both widths at once; a backward exchanges the gradients of each."""
    assert worlds(2).run(counts_exchanges) == [(1, 2)] * 2


# --- what ranks are given ---------------------------------------------------------------------------------------------


def loads_other_rows(rank, size):
    """Every rank is given rows and state of its own: those of rank 0 count, as copies are of one."""
    model = model_of()
    steps(model, rank, range(2))
    weights = {f"tables.{t.name}.weight": torch.full((t.num_embeddings, t.embedding_dim), 1.0 + rank) for t in TABLES}
    model.load_state_dict(weights)
    sums = {"sum": lambda t: torch.full((t.num_embeddings, t.embedding_dim), 2.0 + rank)}
    state = {n: {"step": torch.tensor(5.0), **{name: of(t) for name, of in sums.items()}} for n, t in enumerate(TABLES)}
    groups = [model.fused_optimizer.param_groups[0] | {"params": [*range(len(TABLES))]}]
    model.fused_optimizer.load_state_dict({"state": state, "param_groups": groups})
    steps(model, rank, range(2, 3))
    found = rows_of(model)
    model.close()
    return found


def test_copies_take_the_rows_and_the_state_of_one_rank(worlds):
    assert are_alike(worlds(2).run(loads_other_rows))


def drawn(rows, generator):
    torch.nn.init.normal_(rows)


def begins_otherwise(rank, size):
    torch.manual_seed(rank)
    table = te.TableConfig(name="t", num_embeddings=9, embedding_dim=4, init=drawn)
    return raised(model_of, [table])


def test_rows_that_an_init_draws_for_each_rank_by_itself_are_refused(worlds):
    for kind, text in worlds(2).run(begins_otherwise):
        assert kind == "ConfigError"
        assert text.startswith("what the copy of table 't' begins with differs between the ranks: rows of CRC-32 ")
        assert "an init that is to draw from its generator alone on rank 1" in text


# --- files and checkpoints --------------------------------------------------------------------------------------------


def reopens(rank, size, where):
    """Trains over files, and goes on with them."""
    model = model_of(storage=te.File(f"{where}/rows"))
    steps(model, rank, range(3))
    expected = rows_of(model)
    model.close()
    model = model_of(storage=te.File(f"{where}/rows"))
    found = rows_of(model)
    model.close()
    return expected, found


def test_copies_lie_in_files_of_their_own(worlds, tmp_path):
    answers = worlds(2).run(reopens, tmp_path)
    assert are_alike([rows for each in answers for rows in each])
    assert sorted(os.listdir(tmp_path)) == [f"rows.width{w}-rank{r}of2" for w in (4, 8) for r in (0, 1)]


def forgets(rank, size, where):
    """Rank 1 has files, and rank 0 begins anew."""
    storage = te.File(f"{where}/rows") if rank else None
    model = model_of(storage=storage)
    steps(model, rank, range(3))
    model.close()
    return raised(model_of, storage=storage)


def test_copies_that_do_not_begin_alike_are_refused(worlds, tmp_path):
    for kind, text in worlds(2).run(forgets, tmp_path):
        assert kind == "ConfigError"
        assert "begins with differs between the ranks: new rows on rank 0, the rows of a file on rank 1" in text


def takes_unclean_files(rank, size, where, sharding):
    """Of files as a killed process leaves them: the error of who would take them as they are."""
    keywords = {"sharding": sharding, "capacity": 1, "optimizer": te.SGD(lr=0.1)}
    model = te.ShardedTieredEmbeddingBagCollection(TABLES, storage=te.File(f"{where}-open"), **keywords)
    steps(model, rank, range(3))
    for width in (4, 8):
        name = f"width{width}-rank{rank}of{size}"
        shutil.copy(f"{where}-open.{name}", f"{where}.{name}")
    model.state_dict()
    model.close()

    def opens():
        storage = te.File(where, recover=True)
        te.ShardedTieredEmbeddingBagCollection(TABLES, storage=storage, **keywords).close()

    return raised(opens)


def test_copies_that_a_kill_has_left_are_not_taken_as_they_are(worlds, tmp_path):
    assert worlds(2).run(takes_unclean_files, f"{tmp_path}/dealt", te.RowWise()) == [None, None]
    for kind, text in worlds(2).run(takes_unclean_files, f"{tmp_path}/copied", {"t0": te.Replicated()}):
        assert kind == "UncleanFileError"
        assert "Every rank has a copy of 't0', of which each may lack other updates: so recover=True is refused" in text


def saves(rank, size, sharding, where):
    model = te.ShardedTieredEmbeddingBagCollection(TABLES, sharding=sharding, capacity=0.5, optimizer=te.SGD(lr=0.1))
    steps(model, rank, range(3))
    model.save_checkpoint(where)
    model.close()


def test_a_checkpoint_has_each_row_once(worlds, tmp_path):
    sizes = []
    for name, sharding in (("copies", te.Replicated()), ("rows", te.RowWise())):
        worlds(3).run(saves, sharding, tmp_path / name)
        sizes.append(sum(each.stat().st_size for each in (tmp_path / name).glob("rows-*")))
    assert sizes[0] == sizes[1] > 0
