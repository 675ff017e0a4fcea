"""Initial rows on the CPU: what is known of them without generating any."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tieredemb.config import Normal
from tieredemb.storage.initial import InitialRows, InitialTable


@pytest.mark.parametrize("has_last_step", [False, True])
@pytest.mark.parametrize("words", [0, 1, 5])
@pytest.mark.parametrize("value", [0.0, 0.25])
def test_the_state_of_every_row_begins_alike(words, value, has_last_step):
    table = InitialTable(start=0, number=3, init=Normal(), padding_idx=None)
    initial = InitialRows([table], seed=7, state_value=value, device=torch.device("cpu"), has_last_step=has_last_step)
    weight, state = np.empty((2, 4), np.float32), np.full((2, words), 9, np.uint32)
    initial.generate(np.array([0, 41]), np.arange(2), weight, state, words)
    assert initial.state(words).dtype == np.uint32
    assert initial.state(words).tolist() == state[0].tolist() == state[1].tolist()
