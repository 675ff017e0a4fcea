"""What the host does with a history on a device; kernels write it, so that here the device is the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tieredemb as te
from tieredemb.errors import BackwardError
from tieredemb.kernels.constants import HISTORY_REFUSED, HISTORY_REPLAYED
from tieredemb.lookup.device_history import DeviceHistory
from tieredemb.lookup.histories import Histories
from tieredemb.lookup.optimizer import hyperparameters, new_history

OPTIMIZER = te.AdamW(lr=0.01)
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def history_of(steps):
    history = new_history(OPTIMIZER)
    for step in range(1, steps + 1):
        taken = hyperparameters(OPTIMIZER, OPTIONS, np.array([step]), 1.0)
        history.append(step, taken.rate[0], taken.missed, taken.terms)
    return history


def same(one, other):
    parts = [(Histories([each]).to_bytes(), each.base, each.steps, each.first) for each in (one, other)]
    return parts[0] == parts[1]


def test_a_history_comes_back_from_a_device_as_it_went():
    history, found = history_of(700), new_history(OPTIMIZER)
    on_device = DeviceHistory(history, torch.tensor([700, 700], device="cpu"))
    on_device.download(found)
    assert same(found, history)
    taken = hyperparameters(OPTIMIZER, OPTIONS, np.array([701]), 1.0)
    for each in (history, found):
        each.append(701, taken.rate[0], taken.missed, taken.terms)
    assert same(found, history)


def test_replayed_steps_are_counted_on_when_a_history_is_replaced():
    on_device = DeviceHistory(history_of(5), torch.tensor([5], device="cpu"))
    on_device._words[HISTORY_REPLAYED] += 3
    on_device.adopt(history_of(2))
    on_device._words[HISTORY_REPLAYED] += 4
    assert on_device.replayed() == 7


def test_steps_that_were_refused_are_told_once():
    on_device = DeviceHistory(history_of(5), torch.tensor([5], device="cpu"))
    on_device.check()
    on_device._words[HISTORY_REFUSED] += 2
    with pytest.raises(BackwardError, match=r"2 step\(s\) of a CUDA graph were refused.*upload"):
        on_device.check()
    on_device.check()
