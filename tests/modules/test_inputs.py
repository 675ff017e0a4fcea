"""What callers pass, against torch: what it takes is taken, and what it refuses is refused by an error of its type."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import assert_close, equal, on_cpu
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, InvalidInputError, TieredEmbError

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def torch_and_ours(kind, **options):
    """torch's module on the CPU and ours, with the same rows."""
    theirs = on_cpu(getattr(nn, kind)(10, 4, **options))
    ours = getattr(te, f"Tiered{kind}")(10, 4, **options, capacity=3, check_ids="always")
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


# --- ids and offsets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("offsets_dtype", [*INTEGERS, None])
def test_bags_take_the_integers_that_torch_takes(device, dtype, offsets_dtype):
    theirs, ours = torch_and_ours("EmbeddingBag")
    ids = torch.tensor([1, 9, 0, 9]).to(dtype)
    given = (ids.reshape(2, 2),) if offsets_dtype is None else (ids, torch.tensor([0, 1, 1]).to(offsets_dtype))
    try:
        expected = theirs(*given)
    except RuntimeError:
        with pytest.raises(InvalidInputError, match="must be int32 or int64"):
            ours(*given)
        return
    assert_close(ours(*given), expected)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 2), (1, 2, 2)])
def test_embedding_takes_the_integers_and_shapes_that_torch_takes(device, dtype, shape):
    theirs, ours = torch_and_ours("Embedding")
    ids = torch.zeros(shape, dtype=dtype) + 9
    try:
        expected = theirs(ids)
    except RuntimeError:
        with pytest.raises(InvalidInputError, match="must be int32 or int64"):
            ours(ids)
        return
    assert_close(ours(ids), expected)


L = torch.tensor
REFUSED_BAGS = {
    "float ids": ({}, lambda: (L([1.0]), L([0]))),
    "ids of no dtype": ({}, lambda: (L([]), L([0]))),
    "float offsets": ({}, lambda: (L([1]), L([0.0]))),
    "ids without dimension": ({}, lambda: (L(3), L([0]))),
    "ids of three dimensions": ({}, lambda: (L([[[1]]]),)),
    "offsets of two dimensions": ({}, lambda: (L([1]), L([[0]]))),
    "offsets beside bags": ({}, lambda: (L([[1]]), L([0]))),
    "no offsets": ({}, lambda: (L([1]),)),
    "no last offset": ({"include_last_offset": True}, lambda: (L([1]), torch.empty(0, dtype=torch.int64))),
    "first offset": ({}, lambda: (L([1, 2]), L([1, 2]))),
    "offset beyond the ids": ({}, lambda: (L([1, 2]), L([0, 9]))),
    "id above": ({}, lambda: (L([1, 10]), L([0]))),
    "id below": ({}, lambda: (L([1, -1]), L([0]))),
    "weights of double": ({}, lambda: (L([1]), L([0]), torch.ones(1, dtype=torch.float64))),
    "weights of half": ({}, lambda: (L([1]), L([0]), torch.ones(1, dtype=torch.float16))),
    "weights of integers": ({}, lambda: (L([1]), L([0]), L([1]))),
    "weights of another shape": ({}, lambda: (L([1, 2]), L([0]), torch.ones(1))),
    "weights flat beside bags": ({}, lambda: (L([[1, 2]]), None, torch.ones(2))),
    "weights of means": ({"mode": "mean"}, lambda: (L([1]), L([0]), torch.ones(1))),
}


@pytest.mark.parametrize("what", REFUSED_BAGS)
def test_what_torch_refuses_of_bags_is_refused_by_its_type(device, what):
    options, make = REFUSED_BAGS[what]
    theirs, ours = torch_and_ours("EmbeddingBag", **{"mode": "sum"} | options)
    given = make()
    with pytest.raises((ValueError, RuntimeError)) as refused:
        theirs(*given)
    with pytest.raises(refused.type) as error:
        ours(*given)
    assert isinstance(error.value, InvalidInputError)
    assert isinstance(error.value, ValueError)
    assert ours.stats().batches == 0


def test_weights_of_another_dtype_are_refused_in_words_of_torch(device):
    for module in torch_and_ours("EmbeddingBag", mode="sum"):
        with pytest.raises(RuntimeError, match="have the same type as"):
            module(torch.tensor([[1]]), None, torch.ones(1, 1, dtype=torch.float16))


@pytest.mark.parametrize("ids", [[1, 2], 3, None, np.array([1])], ids=str)
def test_ids_that_are_no_tensor_are_a_type_error_as_in_torch(device, ids):
    theirs, ours = torch_and_ours("Embedding")
    for module in (theirs, ours):
        with pytest.raises(TypeError):
            module(ids)


@pytest.mark.parametrize("bad", [10, -1])
def test_embedding_raises_an_index_error_for_ids_as_torch_does(device, bad):
    theirs, ours = torch_and_ours("Embedding")
    for module in (theirs, ours):
        with pytest.raises(IndexError):
            module(torch.tensor([bad]))


def test_negative_id_is_told_of_padding(device):
    _, ours = torch_and_ours("Embedding")
    with pytest.raises(InvalidInputError, match="padding_idx"):
        ours(torch.tensor([-1]))


def test_early_last_offset_ends_the_last_bag(device):
    """As in torch's fastest path alone (float32 sums on the CPU): elsewhere its last bag takes the ids beyond, too."""
    for mode in ("sum", "mean", "max"):
        _, ours = torch_and_ours("EmbeddingBag", mode=mode, include_last_offset=True)
        rows = ours.state_dict()["weight"]
        assert_close(ours(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])), rows[[1, 2]])


# --- numbers of constructors ------------------------------------------------------------------------------------------

WHOLE = {
    "numpy": np.int64,
    "narrow numpy": np.int8,
    "array": np.array,
    "torch": lambda number: torch.tensor(number, device="cpu"),
}


@pytest.mark.parametrize("of", WHOLE)
def test_integers_of_others_are_taken_for_sizes(of):
    whole = WHOLE[of]
    table = te.TableConfig(name="t", num_embeddings=whole(9), embedding_dim=whole(4), padding_idx=whole(-1))
    assert table == te.TableConfig(name="t", num_embeddings=9, embedding_dim=4, padding_idx=8)
    assert [type(number) for number in (table.num_embeddings, table.embedding_dim, table.padding_idx)] == [int] * 3
    for make in (te.TieredEmbedding, te.TieredEmbeddingBag):
        module = make(whole(9), whole(4), padding_idx=whole(2), capacity=whole(3), seed=whole(5), device="cpu")
        plain = make(9, 4, padding_idx=2, capacity=3, seed=5, device="cpu")
        assert repr(module) == repr(plain)
        assert equal(module.state_dict()["weight"], plain.state_dict()["weight"])
        assert [type(n) for n in (module.num_embeddings, module.embedding_dim, module.padding_idx)] == [int] * 3
        assert te.prefetch([], module, depth=whole(2)).depth == 2


@pytest.mark.parametrize("single", [np.float32, np.float64, np.float16])
def test_floats_of_numpy_are_taken_for_numbers(single):
    half = single(0.5)
    assert te.SparseAdam(lr=half, betas=(half, half)) == te.SparseAdam(lr=0.5, betas=(0.5, 0.5))
    assert repr(te.Normal(std=half)) == repr(te.Normal(std=0.5))
    assert repr(te.LFU(half_life_batches=single(3))) == repr(te.LFU(half_life_batches=3.0))
    module = te.TieredEmbeddingBag(10, 4, capacity=half, max_norm=half, norm_type=single(2), device="cpu")
    assert (module.tables.config.capacity, module.max_norm, module.norm_type) == (0.5, 0.5, 2.0)
    assert [type(number) for number in (module.max_norm, module.norm_type)] == [float] * 2
    assert type(te.Adagrad(lr=half).lr) is float


def test_optimizer_of_numpy_numbers_is_saved_and_loaded(tmp_path):
    for lr in (np.float32(0.5), 0.5):
        bag = te.TieredEmbeddingBag(np.int32(10), 4, optimizer=te.SGD(lr=lr), device="cpu")
        bag.save_checkpoint(tmp_path / "saved")
        bag.load_checkpoint(tmp_path / "saved")
        assert bag.fused_optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), 2.0, np.float64(2), "2", None, [2]], ids=repr)
def test_what_is_no_integer_is_a_type_error_by_name(value):
    for name in ("num_embeddings", "embedding_dim"):
        with pytest.raises(TypeError, match=name) as error:
            te.TieredEmbedding(**{"num_embeddings": 10, "embedding_dim": 4} | {name: value}, device="cpu")
        assert isinstance(error.value, ConfigError)
    if value is not None:
        with pytest.raises(TypeError, match="padding_idx"):
            te.TieredEmbedding(10, 4, padding_idx=value, device="cpu")


# --- capacities in words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "slots"), [("5%", 50), ("0.05", 50), ("100%", 1000), ("0.01%", 1), ("70", 70), ("12.5%", 125)]
)
def test_capacity_in_words_is_that_of_the_command_lines(words, slots):
    bag = te.TieredEmbeddingBag(1000, 4, capacity=words, device="cpu")
    assert [group.slots for group in bag.tables.groups] == [slots]


def test_percentage_is_shared_among_widths():
    tables = [te.TableConfig(name=f"t{d}", num_embeddings=100 * d, embedding_dim=d) for d in (2, 4)]
    collection = te.TieredEmbeddingBagCollection(tables, capacity="5%", device="cpu")
    assert [group.slots for group in collection.tables.groups] == [10, 20]


@pytest.mark.parametrize("words", ["0%", "101%", "-1%", "nan%", "%", "five", "0", "-3", ""])
def test_capacity_in_words_that_means_nothing_is_refused(words):
    with pytest.raises(ConfigError, match=r"capacity|size"):
        te.TieredEmbeddingBag(1000, 4, capacity=words, device="cpu")


@pytest.mark.parametrize("value", [True, np.True_, None, (1,)], ids=repr)
def test_capacity_that_is_no_number_is_refused(value):
    tables = [te.TableConfig(name=f"t{d}", num_embeddings=100, embedding_dim=d) for d in (2, 4)]
    for some in (tables[:1], tables):
        with pytest.raises(TieredEmbError, match="capacity"):
            te.TieredEmbeddingBagCollection(some, capacity=value, device="cpu")


def test_max_norm_scales_the_padding_row_of_an_embedding_as_torch_does(device):
    theirs, ours = torch_and_ours("Embedding", padding_idx=1, max_norm=1.0)
    rows = torch.full((10, 4), 9.0)
    theirs.load_state_dict({"weight": rows})
    ours.load_state_dict({"weight": rows})
    for module in (theirs, ours):
        module(torch.tensor([1, 2, 1]))
    assert_close(ours.state_dict()["weight"], theirs.state_dict()["weight"])


@pytest.mark.parametrize("capacity", ["5%", np.float64(0.05), np.int64(10)], ids=repr)
def test_capacity_of_a_converted_model_may_be_in_words(capacity):
    model = nn.Sequential(nn.EmbeddingBag(100, 4), nn.Linear(4, 100), nn.Embedding(100, 8)).cpu()
    te.replace_embedding_bags(model, capacity=capacity)
    assert [group.slots for table in (model[0], model[2]) for group in table.tables.groups] == [5, 5]
