"""What a model takes of a batch's tensors is taken again of another batch, or it is not known."""

from __future__ import annotations

import warnings

import pytest
import torch
from counters import Plans
from devices import assert_same_bits, randint
from torch import nn
from training import bits

import tieredemb as te
from tieredemb.pipeline.views import find_view
from tieredemb.step.planned_forwards import identity

TAKEN = {
    "all": lambda x: x,
    "column": lambda x: x[:, 2],
    "last column": lambda x: x[..., -1],
    "column as a matrix": lambda x: x[:, 2:3],
    "column with a dimension": lambda x: x[:, 2].unsqueeze(1),
    "columns": lambda x: x[:, 1:3],
    "columns to the end": lambda x: x[:, 1:],
    "one behind the other": lambda x: x.view(-1),
    "flattened": lambda x: x.flatten(),
    "another shape": lambda x: x.reshape(len(x), 2, -1),
    "a further dimension": lambda x: x.unsqueeze(-1),
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("next_size", [1, 3, 9])
def test_parts_are_taken_of_batches_of_any_size(take, size, next_size):
    first, then = torch.arange(size * 4).view(size, 4), torch.arange(100, 100 + next_size * 4).view(next_size, 4)
    view = find_view(first, take(first))
    assert view is not None
    assert identity((view.of(first),)) == identity((take(first),))
    if size > 1 or next_size == 1:  # a single sample looks as a column does
        assert identity((view.of(then),)) == identity((take(then),))


@pytest.mark.parametrize("layout", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize(
    "take", [lambda x: x[1], lambda x: x[:, 1], lambda x: x[:, :, 1], lambda x: x[1:, 0], lambda x: x[1, :, 1:]]
)
def test_parts_of_tensors_of_any_layout(take, layout):
    for whole in (torch.arange(60).view(3, 4, 5), torch.arange(420).view(6, 7, 10)[1:4, 2:6, 5:]):
        view = find_view(whole.permute(layout), take(whole.permute(layout)))
        assert view is not None
        assert identity((view.of(whole.permute(layout)),)) == identity((take(whole.permute(layout)),))


def test_what_is_no_such_part_is_not_known():
    x = torch.arange(40).view(5, 8)
    others = x[:, ::2], x[::2], x.clone()[:, 1], x[:, 1] + 1, x.int()[:, 1], x[:, :0], x.view(torch.int32)[:, 0]
    assert [find_view(x, other) for other in others] == [None] * len(others)
    assert find_view(x[:, 4:], x[:, 1]) is None  # before it
    assert find_view(x[:, :4], x[:, 5]) is None  # beside it
    assert find_view(x[2:], x[:, 5]) is None


@pytest.mark.parametrize("take", [lambda x: x[:, 2], lambda x: x[1:3], lambda x: x[4], lambda x: x.view(-1)])
@pytest.mark.parametrize("shape", [(5, 9), (5, 4, 2), (4,)])
def test_a_tensor_of_another_form_is_refused(take, shape):
    x = torch.arange(40).view(5, 8)
    view = find_view(x, take(x))
    other = torch.zeros(shape, dtype=torch.int64)
    if view.sizes[1:] == (0,) and shape == (5, 9):
        view.of(other)  # of the samples alone something is taken
    else:
        with pytest.raises(ValueError, match="not a tensor as that"):
            view.of(other)


class Columns(nn.Module):
    """Tables for the columns of a batch, as models have them that nobody here wrote."""

    def __init__(self, tables=3):
        super().__init__()
        self.tables = nn.ModuleList(
            [te.TieredEmbedding(40, 4, capacity=9, optimizer=te.Adagrad(lr=0.5)) for _ in range(tables)]
        )

    def forward(self, x):
        return sum(table(x[:, field]) * (1 + field) for field, table in enumerate(self.tables))


@pytest.mark.parametrize("depth", [1, 3])
def test_columns_of_a_batch_are_fetched_ahead(device, monkeypatch, depth):
    batches = [randint(0, 40, (size, 3), seed=size) for size in (7, 7, 7, 7, 2)]

    def run(model, loop):
        for x in loop:
            model(x).square().sum().backward()
        return [part for table in model.tables for part in bits(table)]

    model = Columns()
    plans = [Plans(table, monkeypatch) for table in model.tables]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(model, te.prefetch(batches, model, depth))
    assert [(each.found, each.missed) for each in plans] == [(4, 1)] * 3
    assert_same_bits(found, run(Columns(), batches))


def test_offsets_that_a_model_cuts_to_size_are_those_of_its_first_batch_alone(device, monkeypatch):
    """A larger batch has others: it is planned when its forward comes."""
    starts = torch.arange(7) * 3

    def run(loop, model):
        for ids in loop:
            model(ids.reshape(-1), starts[: len(ids)]).square().sum().backward()
        return bits(model)

    def table():
        return te.TieredEmbeddingBag(40, 4, mode="sum", capacity=9, optimizer=te.Adagrad(lr=0.5))

    batches, model = [randint(0, 40, (size, 3), seed=size) for size in (3, 3, 3, 7, 3)], table()
    plans = Plans(model, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(te.prefetch(batches, model), model)
    assert (plans.found, plans.missed) == (3, 2)
    assert_same_bits(found, run(batches, table()))
