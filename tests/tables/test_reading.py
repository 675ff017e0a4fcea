"""Reading does not slow down with the steps taken: what rows replay to be read they keep, and go on with the same
bits."""

from __future__ import annotations

import pytest
import torch
from devices import assert_same_bits
from pairs import parametrize_pairs

import tieredemb as te

ROWS, WIDTH = 60, 5
OPTIM = torch.optim
DECAYED = {
    "SGD": (OPTIM.SGD, {}),
    "SGD momentum": (OPTIM.SGD, {"momentum": 0.9}),
    "Adagrad": (OPTIM.Adagrad, {}),
    "Adam": (OPTIM.Adam, {}),
    "AdamW": (OPTIM.AdamW, {}),
    "Adamax": (OPTIM.Adamax, {}),
    "NAdam": (OPTIM.NAdam, {}),
    "NAdam decoupled": (OPTIM.NAdam, {"decoupled_weight_decay": True}),
    "RMSprop": (OPTIM.RMSprop, {}),
    "RMSprop all": (OPTIM.RMSprop, {"momentum": 0.9, "centered": True}),
}


def made(device, kind, options, *, dtype=torch.float32, capacity=7, storage=None):
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.02, weight_decay=0.01, **options)
    bag = te.TieredEmbeddingBag(
        ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=optimizer, device=device, dtype=dtype, seed=3,
        **({} if storage is None else {"storage": storage}),
    )  # fmt: skip
    return bag, optimizer


def step(bag, optimizer, number):
    random = torch.Generator("cpu").manual_seed(number)
    ids = torch.randint(ROWS // 2, (4, 2), generator=random, device="cpu")  # others are never used
    grad = torch.randn(4, WIDTH, generator=random, device="cpu").to(bag.weight.device)
    optimizer.zero_grad()
    bag(ids.to(bag.weight.device)).backward(grad.to(bag.weight.dtype))
    optimizer.step()


def evaluated(bag):
    with torch.no_grad():
        return bag(torch.arange(ROWS, device=bag.weight.device)[:, None])


READS = {
    "weight": lambda bag, optimizer: bag.weight.detach().clone(),
    "state_dict": lambda bag, optimizer: bag.state_dict()["weight"],
    "scores": lambda bag, optimizer: te.scores(bag, torch.eye(WIDTH, device=bag.weight.device, dtype=bag.weight.dtype)),
    "optimizer": lambda bag, optimizer: optimizer.state_dict(),
    "lookups": lambda bag, optimizer: evaluated(bag),
    "rows": lambda bag, optimizer: bag.weight[3:9].detach().clone(),
}


def state_of(optimizer):
    entries = optimizer.state_dict()["state"].values()
    return [value for entry in entries for name, value in entry.items() if torch.is_tensor(value) and name != "step"]


@parametrize_pairs(kind=list(DECAYED), read=list(READS), dtype=[torch.float32, torch.bfloat16], capacity=[1, 7, 1.0])
def test_rows_that_were_read_go_on_with_the_same_bits(device, kind, read, dtype, capacity):
    """Also where the decay is taken away in between, and comes back."""
    found = []
    for reads in (False, True):
        bag, optimizer = made(device, *DECAYED[kind], dtype=dtype, capacity=capacity)
        for number in range(24):
            optimizer.param_groups[0]["weight_decay"] = 0.0 if 8 <= number < 16 else 0.01
            step(bag, optimizer, number)
            if reads and number % 5 == 4:
                READS[read](bag, optimizer)
        found.append([evaluated(bag), bag.state_dict()["weight"], *state_of(optimizer)])
    assert_same_bits(*found)


@pytest.mark.parametrize("kind", DECAYED)
@pytest.mark.parametrize("storage", ["host", "file"])
def test_a_second_read_replays_nothing(device, kind, storage, tmp_path):
    tier = te.File(str(tmp_path / "rows")) if storage == "file" else te.HostMemory()
    bag, optimizer = made(device, *DECAYED[kind], storage=tier)
    for number in range(20):
        step(bag, optimizer, number)
    first = bag.state_dict()["weight"]
    replayed = bag.stats().steps_replayed
    for read in READS.values():
        read(bag, optimizer)
    assert bag.stats().steps_replayed == replayed
    assert replayed <= ROWS * 20
    assert_same_bits(bag.state_dict()["weight"], first)
    step(bag, optimizer, 20)
    evaluated(bag)
    assert bag.stats().steps_replayed <= replayed + ROWS
    bag.close()


def test_rows_that_were_read_are_kept_by_a_file(device, tmp_path):
    kind, options = DECAYED["Adagrad"]
    bag, optimizer = made(device, kind, options, storage=te.File(str(tmp_path / "rows")))
    for number in range(20):
        step(bag, optimizer, number)
    read = bag.state_dict()["weight"]
    bag.close()
    bag, optimizer = made(device, kind, options, storage=te.File(str(tmp_path / "rows")))
    assert_same_bits(bag.state_dict()["weight"], read)
    assert bag.stats().steps_replayed == 0
    bag.close()
