"""Initial rows that a function gives: as `nn.init` users write it, the same each time, in chunks, and written once."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from devices import assert_close, assert_same_bits
from torch import nn

import tieredemb as te
from tieredemb.config import Written
from tieredemb.errors import ConfigError
from tieredemb.tables import given_rows

ROWS, WIDTH = 40, 6


def normal(rows, generator):
    return nn.init.normal_(rows, std=0.01, generator=generator)


def xavier(rows, generator):
    nn.init.xavier_uniform_(rows, generator=generator)


def drawn(rows, generator):
    return torch.rand(rows.shape, generator=generator, dtype=torch.float64, device="cpu")


def bag_of(init, **keywords):
    return te.TieredEmbeddingBag(ROWS, WIDTH, **{"capacity": 5, "mode": "sum", "init": init, **keywords})


def rows_of(module):
    return module.state_dict()["weight"]


@pytest.mark.parametrize("init", [normal, xavier, drawn])
def test_rows_are_what_the_function_gives(device, init):
    bag = bag_of(init, device=device)
    expected = torch.zeros(ROWS, WIDTH, device="cpu")
    for part in given_rows.initial_rows(te.TableConfig(name="w", num_embeddings=ROWS, embedding_dim=WIDTH), init, 0, 0):
        expected[part[0] : part[0] + len(part[1])] = part[1]
    assert_same_bits([rows_of(bag).cpu()], [expected])
    assert expected.std() > 0
    ids = torch.tensor([[3, 3, 39]], device=device)
    assert_close(bag(ids)[0], 2 * expected[3] + expected[39])


def test_rows_are_the_same_each_time_and_others_by_seed_and_table(device):
    first, again, other = (rows_of(bag_of(normal, seed=seed, device=device)) for seed in (1, 1, 2))
    assert_same_bits([first], [again])
    assert not torch.equal(first, other)
    tables = [te.TableConfig(name=n, num_embeddings=ROWS, embedding_dim=WIDTH, init=normal) for n in "ab"]
    both = te.TieredEmbeddingBagCollection(tables, capacity=5, device=device).state_dict()
    assert not torch.equal(both["tables.a.weight"], both["tables.b.weight"])


def test_large_tables_are_filled_in_chunks(device, monkeypatch):
    monkeypatch.setattr(given_rows, "CHUNK", 7)
    seen = []

    def counted(rows, generator):
        seen.append(len(rows))
        return normal(rows, generator)

    bag = bag_of(counted, device=device)
    assert seen == [7] * 5 + [5]
    rows = rows_of(bag)
    assert len(rows.unique(dim=0)) == ROWS  # no chunk is like another
    assert_same_bits([rows], [rows_of(bag_of(normal, device=device))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_rounded_and_the_padding_is_zeros(device, dtype):
    bag = bag_of(normal, padding_idx=4, dtype=dtype, device=device)
    exact = rows_of(bag_of(normal, device=device))
    exact[4] = 0
    assert_same_bits([rows_of(bag)], [exact.to(dtype)])


def test_what_is_returned_stays_as_it_is(device):
    given = torch.randn(ROWS, WIDTH, device="cpu")
    before = given.clone()
    bag = bag_of(lambda rows, generator: given, padding_idx=0, device=device)
    assert_same_bits([given], [before])
    assert_same_bits([rows_of(bag).cpu()[1:]], [before[1:]])


def test_copies_pickles_and_checkpoints_need_no_function(device, tmp_path):
    bag = bag_of(lambda rows, generator: rows.fill_(0.5), optimizer=te.SGD(lr=0.1), device=device)
    bag(torch.tensor([[1, 2]], device=device)).sum().backward()
    data = io.BytesIO()
    torch.save(bag, data)
    data.seek(0)
    copies = [copy.deepcopy(bag), pickle.loads(pickle.dumps(bag)), torch.load(data, weights_only=False)]
    for each in copies:
        assert_same_bits([rows_of(each)], [rows_of(bag)])
    assert bag.table_configs[0].init == Written()
    bag.save_checkpoint(tmp_path)
    other = bag_of(lambda rows, generator: None, optimizer=te.SGD(lr=0.1), device=device)
    assert not rows_of(other).any()
    other.load_checkpoint(tmp_path)
    assert_same_bits([rows_of(other)], [rows_of(bag)])


def test_a_file_is_filled_when_it_is_new(device, tmp_path):
    def open_(init, **keywords):
        return bag_of(
            init, storage=te.File(str(tmp_path / "rows"), **keywords), optimizer=te.SGD(lr=1.0), device=device
        )

    bag = open_(normal)
    bag(torch.tensor([[1, 2]], device=device)).sum().backward()
    expected = rows_of(bag)
    bag.close()

    def never(rows, generator):
        raise AssertionError("the rows are there")

    bag = open_(never)
    assert_same_bits([rows_of(bag)], [expected])
    bag.close()
    bag = open_(drawn, fresh=True)
    assert_same_bits([rows_of(bag)], [rows_of(bag_of(drawn, device=device))])
    bag.close()


def test_a_function_that_fails_leaves_no_file_that_looks_whole(device, tmp_path):
    def fails(rows, generator):
        raise KeyError("mine")

    storage = te.File(str(tmp_path / "rows"))
    with pytest.raises(KeyError, match="mine"):
        bag_of(fails, storage=storage, device=device)
    again = bag_of(normal, storage=storage, device=device)
    assert torch.equal(again.state_dict()["weight"], bag_of(normal, device=device).state_dict()["weight"])
    again.close()


@pytest.mark.parametrize(
    ("init", "said"),
    [
        (lambda rows, generator: rows[:3], r"returned a tensor of shape \(3, 6\) for rows of shape \(40, 6\)"),
        (lambda rows, generator: 3, "returned 3 for rows of shape"),
        ("normal", "must be Normal.*, Uniform.* or a function of rows and a generator, got 'normal'"),
        (nn.Linear, "or a function of rows and a generator"),
    ],
)
def test_bad_functions_are_refused(init, said):
    with pytest.raises(ConfigError, match=said):
        bag_of(init)
