"""Ranks agree on what they are about to do: what one refuses, has planned or cannot update concerns all."""

from __future__ import annotations

import contextlib

import pytest
import torch
from devices import equal
from sharding.ranks import batch_of, calls_of, joined, step_of, tables_of
from sharding.test_sharded_failures import raised
from torch.utils.checkpoint import checkpoint

import tieredemb as te
from tieredemb.errors import StorageError
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import RowWise, TableWise

TABLES = tables_of(widths=(4, 8))


def samples(rank):
    return 5 + rank


def model_of(**keywords):
    keywords = {"sharding": RowWise(), "optimizer": te.Adagrad(lr=0.1), "capacity": 0.5} | keywords
    return ShardedTieredEmbeddingBagCollection(TABLES, average=False, **keywords)


def batch(step, rank):
    return batch_of(TABLES, step, rank, samples=samples)


def trained(steps, **keywords):
    """One process, on two ranks' batches of these steps."""
    keywords = {
        "optimizer": te.Adagrad(lr=0.1),
        "capacity": 1.0,
    } | keywords
    model = te.TieredEmbeddingBagCollection(TABLES, **keywords)
    for step in steps:
        step_of(model, joined(TABLES, [batch(step, rank) for rank in range(2)]), weighted=False)
    return model.state_dict()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert equal(found[name], weight), name


def computes_again(rank, size, recomputed, beside=contextlib.nullcontext):
    """Each forward is computed again in its backward if `recomputed`; the tables. `beside`: what a step is in."""
    model = model_of()
    with calls_of(ShardedTieredEmbeddingBagCollection, "_lookup") as lookups:
        for step in range(4):
            ids, offsets, _, upstream = batch(step, rank)
            scale = torch.ones((), requires_grad=True)  # for what is multiplied by it the rows are computed again

            def run(scale, ids=ids, offsets=offsets):
                return model(ids, offsets) * scale

            with beside():
                out = checkpoint(run, scale, use_reentrant=False) if recomputed else run(scale)
                out.backward(upstream)
    assert len(lookups) == (8 if recomputed else 4)
    weights = dict(model.state_dict())
    model.close()
    return weights


@pytest.mark.parametrize("recomputed", [False, True])
def test_forwards_computed_again_train_once(worlds, recomputed):
    assert_same(worlds(2).run(computes_again, recomputed)[0], trained(range(4)))


def misshapes(rank, size, ahead):
    """Rank 1 gives offsets of no batch in the second step, which is left out."""
    model, errors = model_of(), []
    batches = [batch(step, rank) for step in range(4)]
    if rank == 1:
        ids, offsets, *rest = batches[1]
        batches[1] = (ids, offsets[:-1], *rest)
    loop = te.prefetch(batches, model, ids_of=lambda each: each[:2]) if ahead else batches
    for each in loop:
        errors.append(raised(step_of, model, each, weighted=False))
    weights = dict(model.state_dict())
    model.close()
    return errors, weights


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_of_wrong_shape_is_refused_on_all(worlds, ahead):
    answers = worlds(2).run(misshapes, ahead)
    for errors, _ in answers:
        assert [each is None for each in errors] == [True, False, True, True]
        assert errors[1][0] == "InvalidInputError"
        assert errors[1][1].startswith("rank 1: offsets has")
    assert_same(answers[0][1], trained([0, 2, 3]))


def changes_ids(rank, size):
    """Rank 1 changes the ids of a batch in place once they were planned."""
    model = model_of()
    batches = [batch(step, rank) for step in range(4)]
    for step, each in enumerate(te.prefetch(batches, model, 2, ids_of=lambda each: each[:2])):
        if step == 1 and rank == 1:
            each[0].copy_(each[0].flip(0) % 1)
        step_of(model, each, weighted=False)
    weights = dict(model.state_dict())
    model.close()
    return weights


def test_a_plan_that_one_rank_cannot_take_is_given_up_on_all(worlds):
    model = te.TieredEmbeddingBagCollection(TABLES, optimizer=te.Adagrad(lr=0.1), capacity=1.0)
    for step in range(4):
        batches = [list(batch(step, rank)) for rank in range(2)]
        if step == 1:
            batches[1][0] = batches[1][0] % 1
        step_of(model, joined(TABLES, batches), weighted=False)
    assert_same(worlds(2).run(changes_ids)[0], model.state_dict())


def weighs_planned(rank, size):
    model = model_of()
    ids, offsets, weights, _ = batch(0, rank)
    found = [
        raised(model, *each[:2], weights if rank == 1 else None)
        for each in te.prefetch([(ids, offsets)], model, ids_of=lambda each: each[:2])
    ]
    model.close()
    return found


def test_weights_on_some_ranks_are_refused_where_batches_were_planned(worlds):
    for ((kind, text),) in worlds(2).run(weighs_planned):
        assert kind == "PeerError"
        assert "per_sample_weights are given on ranks [1] alone" in text


def gone(*ignored):
    raise StorageError("the rows are gone")


def cannot_update(rank, size):
    """Rank 1 finds, in the second step, that the rows of one width cannot be updated."""
    model, errors = model_of(), []
    for step in range(3):
        ids, offsets, _, upstream = batch(step, rank)
        out = model(ids, offsets)
        cache = model._held[1].engine.tables.groups[0].cache
        check = cache.check_rows
        if (rank, step) == (1, 1):
            cache.check_rows = gone
        errors.append(raised(out.backward, upstream))
        cache.check_rows = check
    weights = dict(model.state_dict())
    model.close()
    return errors, weights


def test_an_update_that_one_rank_cannot_make_none_makes(worlds):
    answers = worlds(2).run(cannot_update)
    for errors, _ in answers:
        assert [each is None for each in errors] == [True, False, True]
        assert errors[1] == ("StorageError", "rank 1: the rows are gone")
    assert_same(answers[0][1], trained([0, 2]))


def fails_inside(rank, size):
    model = model_of()

    def run():
        with model.accumulate():
            step_of(model, batch(0, rank), weighted=False)
            if rank == 1:
                raise ValueError("the user's own")

    found = raised(run)
    step_of(model, batch(1, rank), weighted=False)
    weights = dict(model.state_dict())
    model.close()
    return found, weights


def test_an_accumulation_that_one_rank_leaves_is_dropped_on_all(worlds):
    answers = worlds(2).run(fails_inside)
    for (_, text), _ in answers:
        assert "rank 1: ValueError: the user's own" in text
    assert_same(answers[0][1], trained([1]))


def orders(rank, size, ahead):
    """Of two forwards of one backward the later one was planned."""
    model = model_of()
    first, second = batch(0, rank), batch(1, rank)
    for each in te.prefetch([second], model, ids_of=lambda each: each[:2]) if ahead else [second]:
        outs = [model(*first[:2]), model(*each[:2])]
        torch.autograd.backward(outs, [first[3], each[3]])
    weights = dict(model.state_dict())
    model.close()
    return weights


def goes_back_through_others(rank, size, reached):
    """Of two lookups of the second step each rank goes back through those `reached`; the step is left out."""
    model, errors = model_of(), []
    for step in range(4):
        ids, offsets, _, upstream = batch(step, rank)
        if step == 1:
            outputs = [model(ids, offsets) for _ in range(2)]
            loss = sum((outputs[number] * upstream).sum() for number in reached[rank])
            errors.append(raised(loss.backward))
        else:
            errors.append(raised(step_of, model, (ids, offsets, None, upstream), weighted=False))
    weights = dict(model.state_dict())
    model.close()
    return errors, weights


@pytest.mark.parametrize("reached", [((0, 1), (0,)), ((0,), (1,))], ids=["more on one", "others"])
def test_ranks_that_go_back_through_different_lookups_are_refused(worlds, reached):
    found = worlds(2).run(goes_back_through_others, reached)
    counts = f"{len(reached[0])} on rank 0, {len(reached[1])} on rank 1"
    for errors, _ in found:
        assert [each is None for each in errors] == [True, False, True, True]
        assert errors[1][0] == "PeerError"
        assert f"the backward passes of the ranks have reached different lookups ({counts})" in errors[1][1]
    assert_same(found[0][1], trained([0, 2, 3]))


def test_forwards_are_ordered_by_when_they_came(worlds):
    assert_same(worlds(2).run(orders, True)[0], worlds(2).run(orders, False)[0])


def cannot_be_saved(rank, size):
    model = model_of()
    if rank == 1:
        model._held[0].engine.tables.weight = gone
    found = raised(model.state_dict)
    step_of(model, batch(0, rank), weighted=False)
    model.close()
    return found


def test_a_table_that_one_rank_cannot_hold_is_raised_on_all(worlds):
    assert worlds(2).run(cannot_be_saved) == [("StorageError", "rank 1: the rows are gone")] * 2


def builds_otherwise(rank, size):
    return {
        "seed": raised(model_of, seed=rank),
        "optimizer": raised(model_of, optimizer=te.SGD(lr=0.1 + rank)),
        "sharding": raised(model_of, sharding=(RowWise(), TableWise())[rank]),
        "output_dtype": raised(model_of, output_dtype=(None, torch.bfloat16)[rank]),
        "is_weighted": raised(model_of, is_weighted=bool(rank)),
        "what updates the rows": raised(
            model_of, optimizer=(torch.optim.Adam, torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]))[rank]
        ),
        "fails": raised(model_of, capacity=-1 if rank else 0.5),
    }


def test_ranks_that_build_different_collections_are_refused(worlds):
    for found in worlds(2).run(builds_otherwise):
        for name in ("seed", "optimizer", "sharding", "output_dtype", "is_weighted", "what updates the rows"):
            assert found[name][0] == "ConfigError"
            assert f"{name} differs between the ranks" in found[name][1]
        assert found["fails"][0] == "ConfigError"
        assert found["fails"][1].startswith("rank 1: ")


def differs(rank, size, path):
    """In what may differ: each rank has a cache and a tier of its own."""
    own = {"capacity": (3, 0.7)[rank], "storage": (te.File(str(path)), te.HostMemory())[rank]}
    model = model_of(**own, check_ids=("always", "deferred")[rank])
    for step in range(3):
        step_of(model, batch(step, rank), weighted=False)
    weights = dict(model.state_dict())
    model.close()
    return weights


def test_ranks_may_differ_in_capacity_and_tier(worlds, tmp_path):
    assert_same(worlds(2).run(differs, tmp_path / "rows")[0], trained(range(3)))


def ones(rows, generator):
    rows.fill_(1.0)


RESIDENT = [
    te.TableConfig(name="a", num_embeddings=9, embedding_dim=4, placement="resident"),
    te.TableConfig(name="b", num_embeddings=7, embedding_dim=4, init=ones),
    te.TableConfig(name="c", num_embeddings=8, embedding_dim=4),
]


def saves_what_it_does_not_hold(rank, size, where):
    """Table b is rank 1's, and a rank 0's, each of which has a row of the other that nobody requests."""
    model = ShardedTieredEmbeddingBagCollection(
        RESIDENT, sharding={"a": TableWise(rank=0), "b": TableWise(rank=1)}, capacity=0.9,
        optimizer=te.Adagrad(lr=0.1),
    )  # fmt: skip
    ids = torch.tensor([0, 1, 0, 1, 0, 1])
    model(ids, torch.arange(7)).sum().backward()
    before = dict(model.state_dict())
    model.save_checkpoint(where)
    model(ids, torch.arange(7)).sum().backward()
    model.load_checkpoint(where)
    after = dict(model.state_dict())
    model.close()
    return before, after


def test_a_checkpoint_holds_no_row_that_is_nobodys(worlds, tmp_path):
    before, after = worlds(2).run(saves_what_it_does_not_hold, tmp_path / "saved")[0]
    assert_same(after, before)
    alone = te.TieredEmbeddingBagCollection(RESIDENT, capacity=0.9, optimizer=te.Adagrad(lr=0.1))
    alone.load_checkpoint(tmp_path / "saved")
    assert_same(alone.state_dict(), before)


def lives_in_files(rank, size, path):
    """The same path on all ranks, tables of two widths; opened again."""
    for step in range(2):
        model = model_of(storage=te.File(str(path)), capacity=4)
        step_of(model, batch(step, rank), weighted=False)
        weights = dict(model.state_dict())
        model.close()
    return weights


def test_files_of_all_ranks_lie_beside_each_other(worlds, tmp_path):
    assert_same(worlds(2).run(lives_in_files, tmp_path / "rows")[0], trained([0, 1]))
