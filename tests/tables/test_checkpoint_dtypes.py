"""Checkpoints of rows in another dtype: weights are rounded to nearest, all else stays."""

from __future__ import annotations

import pytest
import torch
from devices import assert_same_bits

import tieredemb as te
from tieredemb.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def module(dtype, optimizer=None, **keywords):
    tables = [te.TableConfig(name=name, num_embeddings=30, embedding_dim=6) for name in "ab"]
    return te.TieredEmbeddingBagCollection(
        tables, capacity=7, dtype=dtype, optimizer=optimizer or te.Adagrad(lr=0.1), seed=3, **keywords
    )


def train(model, steps, first=0):
    for step in range(first, first + steps):
        random = torch.Generator("cpu").manual_seed(step)
        ids = torch.randint(30, (12,), generator=random, device="cpu").to(model.tables.config.device)
        model(ids, torch.arange(0, 13, 2)).float().square().sum().backward()


@pytest.mark.parametrize("loaded", DTYPES)
@pytest.mark.parametrize("saved", DTYPES)
def test_weights_are_rounded_to_nearest_and_state_stays(device, tmp_path, saved, loaded):
    one, other = module(saved), module(loaded)
    for model in (one, other):
        for table in range(2):  # written, or they would be generated in either dtype
            model.tables.set_weights({table: torch.linspace(-2, 2, 180, device="cpu").view(30, 6)})
    train(one, 5)
    one.save_checkpoint(tmp_path / "saved", extra={"epoch": 2})
    assert other.load_checkpoint(tmp_path / "saved") == {"epoch": 2}
    before, after = one.state_dict(), other.state_dict()
    assert_same_bits([each.to(loaded) for each in before.values()], list(after.values()))
    states = []
    for model in (one, other):
        for group in model.tables.groups:
            rows = group.cache.cold.state[:, :-1]
            states.append(torch.from_numpy(rows.copy().view("int32")))
    assert_same_bits(states[0], states[1])
    assert [group.steps for group in other.tables.groups] == [group.steps for group in one.tables.groups]
    train(other, 2)


@pytest.mark.parametrize("optimizer", [te.Adagrad(lr=0.1), te.Adam(lr=0.01, weight_decay=0.1)], ids=["sparse", "dense"])
def test_training_at_random_goes_on_from_a_checkpoint_with_the_same_bits(device, tmp_path, optimizer):
    whole, first, second = (module(torch.bfloat16, optimizer, rounding="stochastic") for _ in range(3))
    train(whole, 9)
    train(first, 5)
    first.save_checkpoint(tmp_path / "saved")
    second.load_checkpoint(tmp_path / "saved")
    train(second, 4, first=5)
    assert_same_bits(list(whole.state_dict().values()), list(second.state_dict().values()))


def test_another_width_is_another_model_still(device, tmp_path):
    module(torch.float32).save_checkpoint(tmp_path / "saved")
    other = te.TieredEmbeddingBagCollection(
        [te.TableConfig(name=name, num_embeddings=31, embedding_dim=6) for name in "ab"],
        dtype=torch.bfloat16, optimizer=te.Adagrad(lr=0.1), seed=3,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"num_embeddings is 30 in the checkpoint and 31 in this model"):
        other.load_checkpoint(tmp_path / "saved")
