"""Bad input on a GPU, told at once or at the next synchronisation, and a GPU that is full. Skips without a GPU;
TIEREDEMB_REQUIRE_CUDA=1 fails.
"""

from __future__ import annotations

import gc
import re

import pytest
import torch
from devices import assert_same_bits, equal, randint
from oracle import integer_weights
from training import bits

import tieredemb as te
from tieredemb.errors import (
    BrokenCacheError,
    CheckpointError,
    ConfigError,
    IdOutOfRangeError,
    InvalidInputError,
    TieredEmbError,
)

pytestmark = pytest.mark.usefixtures("gpu")

ROWS, WIDTH = 50, 4
SYNCHRONISATIONS = {
    "stats": lambda module, directory: module.stats(),
    "flush": lambda module, directory: module.flush(),
    "state_dict": lambda module, directory: module.state_dict(),
    "save_checkpoint": lambda module, directory: module.save_checkpoint(str(directory)),
}


def make(**keywords):
    keywords = {"capacity": 5, "optimizer": te.SGD(lr=1.0), "mode": "sum"} | keywords
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, **keywords)
    integer_weights(bag)
    return bag


def told(module):
    """The error that waits in a module, or None."""
    try:
        module.stats()
    except InvalidInputError as error:
        return error
    return None


# --- deferred ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", SYNCHRONISATIONS)
def test_bad_id_is_told_at_the_next_synchronisation_and_once(tmp_path, where):
    bag = make()
    before = bits(bag)
    bag(torch.tensor([1, 2, ROWS, 3]), torch.tensor([0, 2])).sum().backward()
    with pytest.raises(IdOutOfRangeError, match=rf"id {ROWS} at position 2 .*'weight' \(0 … {ROWS - 1}\)"):
        SYNCHRONISATIONS[where](bag, tmp_path)
    SYNCHRONISATIONS[where](bag, tmp_path)
    assert_same_bits(bits(bag), before)


def test_bad_id_is_told_at_a_later_forward_as_that_of_an_earlier_batch():
    bag = make()
    bag(torch.tensor([ROWS])[None]).sum().backward()
    torch.cuda.synchronize()
    with pytest.raises(IdOutOfRangeError, match=f"id {ROWS} at position 0 .*earlier batch.*this one was not begun"):
        bag(torch.tensor([1])[None])
    assert bag.stats().batches == 1
    bag(torch.tensor([1])[None]).sum().backward()
    assert told(bag) is None


def test_bad_id_is_told_by_close_which_has_closed(tmp_path):
    path = str(tmp_path / "rows")
    bag = make(storage=te.File(path))
    before = bits(bag)
    bag(torch.tensor([ROWS])[None]).sum().backward()
    with pytest.raises(IdOutOfRangeError, match=f"id {ROWS} at position 0 .*earlier batch"):
        bag.close()
    bag.close()
    again = te.TieredEmbeddingBag(ROWS, WIDTH, capacity=5, optimizer=te.SGD(lr=1.0), mode="sum", storage=te.File(path))
    assert_same_bits(bits(again), before)


@pytest.mark.parametrize("bad", [-1, ROWS, 2**31, 2**40, -(2**62)])
@pytest.mark.parametrize("capacity", [5, 1.0])
def test_bad_ids_read_zeros(bad, capacity):
    for mode in ("sum", "mean"):
        bag = make(mode=mode, capacity=capacity)
        weight = bag.state_dict()["weight"].cpu()
        out = bag(torch.tensor([1, 2, bad, 3, bad]), torch.tensor([0, 2, 4]))
        assert out.shape == (3, WIDTH)
        assert equal(out[0] * (1 if mode == "sum" else 2), weight[1] + weight[2])
        assert mode == "mean" or equal(out[1], weight[3])
        assert equal(out[2], torch.zeros(WIDTH))
        assert isinstance(told(bag), IdOutOfRangeError)


def test_later_batches_train_as_if_the_bad_one_had_never_been():
    bag, plain = make(optimizer=te.SparseAdam(lr=0.1)), make(optimizer=te.SparseAdam(lr=0.1))
    errors = []
    for step in range(12):
        ids = randint(0, ROWS, (6, 3), seed=step)
        if step % 4 == 2:
            bad = ids.clone()
            bad[3, 1] = ROWS + step
            try:
                bag(bad).sum().backward()
            except IdOutOfRangeError as error:  # of an earlier batch: this one was not begun
                errors.append(error)
                bag(bad).sum().backward()
        try:
            out = bag(ids)
        except IdOutOfRangeError as error:
            errors.append(error)
            out = bag(ids)
        out.square().sum().backward()
        plain(ids).square().sum().backward()
    errors.append(told(bag))
    assert "position 10" in str(next(error for error in errors if error is not None))
    assert_same_bits(bits(bag), bits(plain))


@pytest.mark.parametrize("capacity", [2, 1.0])
def test_bad_id_of_one_table_reaches_no_row_of_another(capacity):
    tables = [te.TableConfig(name=n, num_embeddings=9, embedding_dim=d) for n, d in (("a", 4), ("b", 4), ("c", 5))]
    model = te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=te.SGD(lr=1.0), max_norm=0.1)
    before = bits(model)
    ids = torch.tensor([1, 9, 3, 4])  # 9 of "a" is where the rows of "b" begin
    model(ids, torch.tensor([0, 2, 3, 4])).sum().backward()
    with pytest.raises(IdOutOfRangeError, match=r"id 9 at position 1 .*'a'"):
        model.flush()
    assert_same_bits(bits(model), before)


def test_embedding_with_a_bad_id_updates_nothing():
    embedding = te.TieredEmbedding(ROWS, WIDTH, capacity=5, optimizer=te.SGD(lr=1.0), padding_idx=2)
    before = bits(embedding)
    out = embedding(torch.tensor([[1, 2], [-1, 4]]))
    assert equal(out[0, 0], before[0][1])
    assert equal(out[1, 0], torch.zeros(WIDTH))
    out.sum().backward()
    with pytest.raises(IdOutOfRangeError, match="id -1 at position 2 "):
        embedding.state_dict()
    assert_same_bits(bits(embedding), before)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2], r"offsets\[0\] must be 0"),
        ([0, 3, 2], r"offsets\[2\] = 2 after offsets\[1\] = 3"),
        ([0, 7], r"beyond the 6 ids"),
        ([0, 2**40], r"beyond the 6 ids"),
        ([0, -1], r"offsets\[1\] = -1"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_bad_offsets_are_told_at_the_next_synchronisation_and_update_nothing(offsets, message, last):
    bag = make(include_last_offset=last)
    before = bits(bag)
    out = bag(torch.arange(6), torch.tensor(offsets))
    assert out.shape == (len(offsets) - last, WIDTH)
    out.sum().backward()
    with pytest.raises(InvalidInputError, match=message):
        bag.flush()
    assert_same_bits(bits(bag), before)
    bag(torch.arange(6), torch.tensor([0, 6] if last else [0])).sum().backward()
    assert equal(bag.state_dict()["weight"][:6], before[0][:6] - 1)


def test_last_offset_of_a_collection_must_be_the_number_of_ids():
    tables = [te.TableConfig(name=n, num_embeddings=9, embedding_dim=4) for n in ("a", "b")]
    model = te.TieredEmbeddingBagCollection(tables, capacity=2, optimizer=te.SGD(lr=1.0))
    before = bits(model)
    model(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])).sum().backward()
    with pytest.raises(InvalidInputError, match="the last offset is 2 but there are 3 ids"):
        model.flush()
    assert_same_bits(bits(model), before)


def test_an_interrupt_while_rows_move_is_not_forgotten(monkeypatch, tmp_path):
    """New keys would own the rows that were there before."""
    bag, plain = make(), make()
    for module in (bag, plain):
        module(torch.arange(3, 6)[None]).sum().backward()
    before = bits(plain)

    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(bag.tables.groups[0].cache._moves, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bag(torch.arange(3)[None])
    monkeypatch.undo()
    for call in (lambda: bag(torch.arange(3)[None]), bag.flush, bag.state_dict, bag.stats):
        with pytest.raises(BrokenCacheError, match=r"interrupted by KeyboardInterrupt.* mends"):
            call()
    bag.save_checkpoint(str(tmp_path / "marked"))
    with pytest.raises(CheckpointError, match="recover=True"):
        bag.load_checkpoint(str(tmp_path / "marked"))
    bag.load_checkpoint(str(tmp_path / "marked"), recover=True)
    # no row is another's: each is as it was before, or as it came to cold storage last
    initial = bits(make())
    for found, last, first in zip(bits(bag), before, initial, strict=True):
        assert ((found.cpu() == last.cpu()) | (found.cpu() == first.cpu())).all()
    plain.save_checkpoint(str(tmp_path / "good"))
    bag.load_checkpoint(str(tmp_path / "good"))
    for module in (bag, plain):
        module(torch.arange(3)[None]).sum().backward()
    assert_same_bits(bits(bag), bits(plain))
    bag.close()


def test_batch_of_more_ids_than_a_plan_numbers_is_refused(monkeypatch):
    monkeypatch.setattr("tieredemb.cache.device.planner.MOST_IDS", 4)
    bag = make()
    before = bits(bag)
    with pytest.raises(InvalidInputError, match=r"a batch of 5 ids .* at most 4"):
        bag(torch.arange(5)[None])
    first, second = bag(torch.arange(4)[None]), bag(torch.arange(4)[None])
    with pytest.raises(InvalidInputError, match=r"a batch of 1 ids .* with 8 in flight"):
        bag(torch.arange(1)[None])
    assert bag.stats().batches == 2
    del first, second
    bag(torch.arange(4)[None]).sum().backward()
    assert not all(equal(a, b) for a, b in zip(bits(bag), before, strict=True))


# --- at once ----------------------------------------------------------------------------------------------------------


def test_bad_input_is_told_at_once_where_asked_for():
    tables = [te.TableConfig(name="weight", num_embeddings=ROWS, embedding_dim=WIDTH)]
    keywords = {"capacity": 5, "optimizer": te.SGD(lr=1.0), "check_ids": "always"}
    ids = torch.tensor([1, ROWS])
    for module, batch in (
        (te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", **keywords), (ids, torch.tensor([0]))),
        (te.TieredEmbedding(ROWS, WIDTH, **keywords), (ids,)),
        (te.TieredEmbeddingBagCollection(tables, **keywords), (ids, torch.tensor([0, 2]))),
    ):
        before = bits(module)
        with pytest.raises(IdOutOfRangeError, match=f"id {ROWS} at position 1 "):
            module(*batch)
        assert module.stats().lookups == 0
        assert_same_bits(bits(module), before)


def test_ids_of_another_device_are_refused():
    bag = make()
    for arguments in (
        (torch.arange(4, device="cpu"), torch.tensor([0])),
        (torch.arange(4), torch.tensor([0], device="cpu")),
        (torch.arange(4), torch.tensor([0]), torch.ones(4, device="cpu")),
    ):
        with pytest.raises(InvalidInputError, match="on cpu"):
            bag(*arguments)


@pytest.mark.parametrize("keywords", [{"check_ids": "sometimes"}, {"placement": "somewhere"}])
def test_settings_that_are_none_are_refused(keywords):
    (name,) = keywords
    with pytest.raises(ConfigError, match=name):
        make(**keywords)


def test_int32_ids_give_the_bits_of_int64():
    runs = []
    for dtype in (torch.int64, torch.int32):
        bag = make(optimizer=te.Adagrad(lr=0.1))
        for step in range(3):
            bag(randint(0, ROWS, (20,), seed=step).to(dtype), torch.arange(0, 20, 4).to(dtype)).sum().backward()
        runs.append(bits(bag))
        bag(torch.tensor([-1], dtype=dtype), torch.tensor([0], dtype=dtype))
        assert isinstance(told(bag), IdOutOfRangeError)
    assert_same_bits(*runs)


# --- a full GPU -------------------------------------------------------------------------------------------------------


def test_capacity_beyond_the_gpu_says_what_fits_and_leaves_nothing_behind(tmp_path):
    path = str(tmp_path / "rows")
    gc.collect()
    before = torch.cuda.memory_allocated()
    with pytest.raises(te.errors.DeviceMemoryError) as raised:
        te.TieredEmbeddingBag(2_000_000_000, 128, capacity="900GiB", storage=te.File(path), mode="sum")
    assert isinstance(raised.value, TieredEmbError)
    assert isinstance(raised.value, MemoryError)
    sizes = re.findall(r"\d[\d.,_]*\s*(?:[KMGT]i?B|bytes)", str(raised.value))
    assert len(sizes) >= 2, str(raised.value)  # what was asked for, and what there is
    assert "capacity" in str(raised.value)
    del raised
    gc.collect()
    assert torch.cuda.memory_allocated() <= before  # less, where what other tests have left behind goes meanwhile
    for rows in tmp_path.glob("rows*"):
        rows.unlink()
    small = te.TieredEmbeddingBag(2_000_000_000, 128, capacity="1MiB", storage=te.File(path), mode="sum")
    assert small(torch.tensor([[1_999_999_999]])).isfinite().all()
    small.close()
