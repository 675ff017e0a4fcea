"""Lookups without gradient of tables in a CPU's memory: rows are read where they lie, with the numbers and scores of
lookups that bring them into slots first."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

import tieredemb as te
from tieredemb.errors import ForkedError, IdOutOfRangeError, InvalidInputError, StorageError

ROWS, WIDTH, SLOTS = 200, 20, 30  # 16 lanes and a rest
READINGS = 16  # one of so many brings missed rows into a full cache


def bag(tmp_path=None, *, slots=SLOTS, width=WIDTH, **keywords):
    """Over memory; or over a file, whose rows come into slots before they are read."""
    storage = te.HostMemory() if tmp_path is None else te.File(str(tmp_path / "rows"))
    keywords = {"mode": "sum", "optimizer": te.Adagrad(lr=0.1), "policy": te.LFU(half_life_batches=20)} | keywords
    return te.TieredEmbeddingBag(ROWS, width, capacity=slots, storage=storage, **keywords)


def batches(count, *, seed=0, bags=9, most=7):
    """Ids and offsets, some bags empty."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(0, most + 1, (bags,), generator=random)
        ids = (torch.rand(int(lengths.sum()), generator=random) ** 3 * ROWS).long()
        yield ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])


def train(module, inputs):
    module(*inputs).square().sum().backward()


@pytest.mark.parametrize("width", [1, 8, 20, 47, 64, 88, 200])
@pytest.mark.parametrize("keywords", [
    {}, {"mode": "mean", "padding_idx": 3}, {"mode": "max", "padding_idx": 3}, {"dtype": torch.bfloat16},
    {"dtype": torch.float16, "mode": "mean"}, {"policy": te.LRU()}, {"policy": te.LFU(remember_evicted=False)},
], ids=str)  # fmt: skip
def test_outputs_and_counts_are_those_of_rows_in_slots(keywords, width, tmp_path):
    here, there = bag(width=width, **keywords), bag(tmp_path, width=width, **keywords)
    for step, (inputs, others) in enumerate(zip(batches(12), batches(12, seed=1), strict=True)):
        for module in (here, there):
            train(module, inputs)
        with torch.inference_mode() if step % 2 else torch.no_grad():
            assert torch.equal(here(*others), there(*others))
            assert torch.equal(here(*others), there(*others))  # rows that were never written were, by the first
    assert torch.equal(here.weight.detach(), there.weight.detach())
    mine, others = here.stats(), there.stats()
    assert (mine.batches, mine.lookups, mine.unique) == (others.batches, others.lookups, others.unique)
    there.close()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("most", [1, 3])
def test_bits_of_numbers_that_compare_alike(mode, most):
    """A minus before a zero, and what is in a single NaN, are those of a forward that trains."""
    weight = torch.tensor([0.0, -0.0, torch.nan, 1e-42, -torch.inf])[torch.randint(5, (ROWS, WIDTH))]
    weight.view(torch.int32)[weight.isnan()] += 5
    module = bag(mode=mode, _weight=weight)
    for inputs in batches(8, most=most, bags=40):
        trained = module(*inputs).detach()
        with torch.no_grad():
            assert torch.equal(module(*inputs).view(torch.int32), trained.view(torch.int32))


def test_weights_of_samples(tmp_path):
    here, there = bag(), bag(tmp_path)
    for inputs in batches(5):
        weights = torch.rand(len(inputs[0]))
        with torch.no_grad():
            assert torch.equal(here(*inputs, weights), there(*inputs, weights))
    there.close()


@pytest.mark.parametrize("kind", ["embedding", "collection of two widths", "collection that pools nothing"])
def test_other_modules(kind, tmp_path):
    def made(storage):
        if kind == "embedding":
            return te.TieredEmbedding(ROWS, WIDTH, padding_idx=2, capacity=SLOTS, storage=storage)
        tables = [
            te.TableConfig(name=f"t{t}", num_embeddings=ROWS, embedding_dim=width)
            for t, width in enumerate([8, 8, 8] if kind.endswith("nothing") else [8, 24, 8])
        ]
        of = te.TieredEmbeddingCollection if kind.endswith("nothing") else te.TieredEmbeddingBagCollection
        return of(tables, capacity=SLOTS, storage=storage)

    here, there = made(te.HostMemory()), made(te.File(str(tmp_path / "rows")))
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, ROWS, (3, 12), generator=random)
        inputs = [ids]
        if kind.endswith("widths"):
            inputs = [ids.flatten(), torch.arange(0, 37, 2)]  # of three features six bags of two
        elif kind != "embedding":
            inputs = [{f"t{t}": ids[t] for t in range(3)}]
        with torch.no_grad():
            mine, others = here(*inputs), there(*inputs)
        if isinstance(mine, dict):
            assert list(mine) == list(others)
            mine, others = torch.cat([*mine.values()]), torch.cat([*others.values()])
        assert torch.equal(mine, others)
    there.close()


def test_converted_tables_share_a_cache():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(3))
    plain = [table.weight.detach().clone() for table in model]
    te.replace_embedding_bags(model, capacity=0.1)
    with torch.no_grad():
        for inputs in batches(40):
            for table, weight in zip(model, plain, strict=True):
                expected = nn.functional.embedding_bag(inputs[0], weight, inputs[1], mode="sum")
                torch.testing.assert_close(table(*inputs), expected)
    counted = [table.stats() for table in model]
    assert {each.batches for each in counted} == {40}
    assert sum(each.lookups for each in counted) == te.stats(model).lookups
    assert sum(each.hits for each in counted) == te.stats(model).hits


def test_rows_stay_in_a_full_cache_but_for_one_reading_of_many():
    module = bag()
    for inputs in batches(6):
        train(module, inputs)
    before = module.stats()
    with torch.no_grad():
        for inputs in batches(READINGS - 1, seed=1):
            module(*inputs)
        between = module.stats()
        assert (between - before).rows_filled == (between - before).evictions == 0
        assert 0 < (between - before).hits < (between - before).lookups
        inputs = next(batches(1, seed=2))
        module(*inputs)
    brought = module.stats() - between
    assert 0 < brought.rows_filled <= SLOTS
    assert brought.evictions == brought.rows_filled
    assert brought.rows_overflow == 0


def test_readings_amid_a_step_evict_nothing():
    """As a metric or a second network that looks up between a forward and its backward."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(2))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    te.replace_embedding_bags(model, capacity=0.1, optimizer=optimizer)
    inputs, evicting = list(batches(80)), 0
    for step, (mine, others) in enumerate(zip(inputs[:40], inputs[40:], strict=True)):
        loss = sum(table(*mine).square().sum() for table in model)
        before = te.stats(model)
        with torch.no_grad():
            for table in model:
                table(*others)
        evicting += step > 10 and (te.stats(model) - before).evictions > 0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert evicting == 0


def test_a_lookup_of_a_signal_handler_amid_a_reading_is_refused():
    module, seen = bag(slots=6), []

    def handler(*_):
        try:
            with torch.enable_grad():
                train(module, (torch.tensor([[1], [2]]),))
        except StorageError:
            seen.append("refused")
        else:
            seen.append("done")
        signal.setitimer(signal.ITIMER_REAL, 0.0007)  # the next one, not amid this one, however slow the machine is

    # what is imported and compiled at a first use is no part of this
    train(module, (torch.tensor([[1], [2]]),))
    with torch.no_grad():
        module(*next(batches(1)))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        with torch.no_grad():
            for inputs in batches(400):
                module(*inputs)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    (group,) = module.tables.groups
    keys = group.cache.hot.key[group.cache.hot.key >= 0]
    assert len(set(keys.tolist())) == len(keys)


def test_a_forked_child_is_refused_while_a_thread_has_the_rows():
    module, (ids, offsets) = bag(), next(batches(1))
    with torch.no_grad():
        module(ids, offsets)
    (group,) = module.tables.groups
    with group.cache.lock:  # of this thread: in the child it is nobody's to give back
        child = os.fork()
        if child == 0:
            threading.Thread(target=_exit_unless_refused, args=(module, ids, offsets)).start()
            threading.Event().wait(20)
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _exit_unless_refused(module, *inputs):
    try:
        with torch.no_grad():
            module(*inputs)
    except ForkedError:
        os._exit(0)
    os._exit(1)


def test_rows_come_into_free_slots():
    module = bag(slots=ROWS)
    inputs = torch.arange(50)[:, None]
    with torch.no_grad():
        module(inputs)
        assert module.stats().rows_filled == 50
        module(inputs)
    assert module.stats().hits == 50


def test_uses_count_for_the_policy(tmp_path):
    """Rows that were read again and again stay, and those that were updated once go; as where readings bring rows."""
    for module in (bag(slots=4, policy=te.LFU()), bag(tmp_path, slots=4, policy=te.LFU())):
        train(module, (torch.arange(4)[:, None],))
        with torch.no_grad():
            for _ in range(5):
                module(torch.arange(10, 14)[:, None])
        for _ in range(2):
            train(module, (torch.arange(10, 14)[:, None],))
        train(module, (torch.arange(4)[:, None],))
        before = module.stats()
        train(module, (torch.arange(10, 14)[:, None],))
        scored = module.stats() - before
        assert scored.lookups == 4
        module.close()


def test_scores_are_those_of_rows_in_slots(tmp_path):
    scores = []
    for storage in (None, tmp_path):
        module = bag(storage)
        for inputs, others in zip(batches(20), batches(20, seed=1), strict=True):
            train(module, inputs)
            with torch.no_grad():
                module(*others)
        module.flush()
        (group,) = module.tables.groups
        scores.append(torch.from_numpy(group.cache.cold.state[:, -1].astype("int64")))
        module.close()
    assert torch.equal(*scores)


@pytest.mark.parametrize(("inputs", "error"), [
    (([3, ROWS], [0]), IdOutOfRangeError), (([3, -1], [0]), IdOutOfRangeError), (([3, 4], [1]), InvalidInputError),
    (([3, 4, 5], [0, 2, 1]), InvalidInputError),
])  # fmt: skip
def test_a_refused_batch_changes_nothing(inputs, error):
    module = bag()
    train(module, next(batches(1)))
    before, rows = module.stats(), module.weight.detach().clone()
    with torch.no_grad(), pytest.raises(error):
        module(*map(torch.tensor, inputs))
    assert module.stats() == before
    assert torch.equal(module.weight.detach(), rows)


def test_a_bad_id_of_one_width_scores_no_row_of_another():
    tables = [te.TableConfig(name=f"t{w}", num_embeddings=ROWS, embedding_dim=w, mode="sum") for w in (8, 16)]
    module = te.TieredEmbeddingBagCollection(tables, capacity=SLOTS)
    with torch.no_grad():
        module(torch.tensor([1, 2]), torch.tensor([0, 1, 2]))
        before = module.stats()
        with pytest.raises(IdOutOfRangeError, match="t16"):
            module(torch.tensor([1, ROWS]), torch.tensor([0, 1, 2]))
    assert module.stats() == before


@pytest.mark.parametrize("inputs", [([], [0, 0]), ([], []), ([5], [0])], ids=str)
def test_empty_bags_and_batches(inputs):
    module = bag()
    with torch.no_grad():
        out = module(*(torch.tensor(part, dtype=torch.int64) for part in inputs))
    assert out.shape == (len(inputs[1]), WIDTH)
    assert bool(out.any()) == bool(inputs[0])


def test_results_do_not_depend_on_the_number_of_threads():
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            module = bag(width=64)
            outputs = []
            for inputs in batches(6, bags=4000):
                train(module, inputs)
                with torch.no_grad():
                    outputs.append(module(*inputs))
            found.append((torch.cat(outputs), module.stats()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
