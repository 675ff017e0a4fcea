"""Initial values on the GPU: the bits of the CPU twin, wherever they are written. Skips without a GPU;
TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tieredemb.config import Normal, Uniform
from tieredemb.errors import UnsupportedError
from tieredemb.storage.base import CARRIERS
from tieredemb.storage.initial import InitialRows, InitialTable

GPU = torch.device("cuda")
FLOAT, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
WIDTHS = [1, 3, 4, 12, 64, 130]
HUGE = 2**33
TABLES = [  # keys 0 … 999, 1,000 … 4,999, of every fifth row of a table, 5,000 … beyond 2³³
    InitialTable(start=0, number=5, init=Normal(mean=0.25, std=1.5), padding_idx=7),
    InitialTable(start=1000, number=0, init=Uniform(low=-0.3, high=0.7), padding_idx=None, first_id=3, id_step=5),
    InitialTable(start=5000, number=2, init=Normal(), padding_idx=HUGE + 1),
]
SEED, STATE_VALUE = 2**63 + 2**31 + 12345, 0.1


def rows_on(device, tables=TABLES):
    return InitialRows(tables, seed=SEED, state_value=STATE_VALUE, device=torch.device(device))


def expected(keys, width, dtype, state_width=0):
    """Weights as the carrier's bits and states as words, by the CPU twin."""
    weight = np.zeros((len(keys), width), CARRIERS[dtype])
    state = np.zeros((len(keys), state_width), np.uint32)
    rows_on("cpu").generate(np.asarray(keys, np.int64), np.arange(len(keys)), weight, state, state_width)
    return weight, state


def bits(tensor):
    """A device tensor's bits, as numpy bytes."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def device_rows(n, width, state_width, dtype):
    weight = torch.full((n, width), 123, dtype=dtype, device=GPU)
    return weight, torch.full((n, state_width), 123.0, device=GPU)


def missed(keys, slots, untouched, *, extra=5):
    """Device arrays of a plan, longer than its count; beyond it they hold keys that must not be generated."""
    count = torch.tensor([len(keys)], dtype=torch.int32, device=GPU)
    tail = [0] * extra
    return (
        count,
        len(keys) + extra,
        torch.tensor([*keys, *tail], dtype=torch.int64, device=GPU),
        torch.tensor([*slots, *tail], dtype=torch.int32, device=GPU),
        torch.tensor([*untouched, *(1 for _ in tail)], dtype=torch.uint8, device=GPU),
    )


# --- on the GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT16])
@pytest.mark.parametrize("width", WIDTHS)
def test_range_has_the_bits_of_the_cpu(width, dtype):
    initial, n, state_width = rows_on(GPU), 6000, 3
    for first_key in (0, HUGE + 4990):
        weight, state = device_rows(n + 9, width, state_width, dtype)
        initial.on_device().generate_range(first_key, 4, n, weight, state, state_width)
        right, words = expected(np.arange(first_key, first_key + n), width, dtype, state_width)
        assert bits(weight[4 : n + 4]) == right.tobytes()
        assert bits(state[4 : n + 4]) == words.tobytes()
        outside = torch.cat([torch.arange(4), torch.arange(n + 4, n + 9)]).to(GPU)
        assert (weight[outside] == 123).all()
        assert (state[outside] == 123).all()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT16])
@pytest.mark.parametrize("width", WIDTHS)
def test_missed_rows_have_the_bits_of_the_cpu_in_their_slots(width, dtype):
    initial, state_width, capacity = rows_on(GPU), 2, 900
    random = np.random.default_rng(0)
    keys = np.concatenate([[7, HUGE + 5001, HUGE + 77], random.permutation(9000)[:500]])
    slots, untouched = random.permutation(capacity)[: len(keys)], random.integers(0, 2, len(keys))
    untouched[:3] = 1
    weight, state = device_rows(capacity, width, state_width, dtype)
    initial.on_device().generate_missed(*missed(keys, slots, untouched), weight, state, 0, 0, state_width)
    wanted = untouched == 1
    right, words = expected(keys[wanted], width, dtype, state_width)
    into = torch.from_numpy(slots[wanted]).to(GPU)
    assert bits(weight[into]) == right.tobytes()
    assert bits(state[into]) == words.tobytes()
    others = torch.ones(capacity, dtype=torch.bool, device=GPU)
    others[into] = False
    assert (weight[others] == 123).all()
    assert (state[others] == 123).all()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("by_key", [True, False])
def test_missed_rows_without_a_slot_go_to_their_cold_rows_and_spare_the_score(width, dtype, by_key):
    initial, state_width, rows = rows_on(GPU), 2, 8000
    keys, slots = np.array([7, 42, 1000, 4999, 5000, 7999]), [-1, 3, -5, -(2**31), 0, -1]
    if not by_key:
        slots = [-2, 3, -2 - 41, -2 - 7999, 0, -2 - 6]
    weight, state = device_rows(10, width, state_width, dtype)
    cold_weight, cold_state = device_rows(rows, width, state_width + 1, dtype)
    addresses = cold_weight.data_ptr(), cold_state.data_ptr()
    given = missed(keys, slots, [1] * len(keys))
    initial.on_device().generate_missed(*given, weight, state, *addresses, state_width, by_key=by_key)
    right, words = expected(keys, width, dtype, state_width)
    hot = np.array(slots) >= 0
    places = keys if by_key else -2 - np.array(slots)
    away, into = torch.from_numpy(places[~hot]).to(GPU), torch.tensor([slots[1], slots[4]], device=GPU)
    assert bits(weight[into]) == right[hot].tobytes()
    assert bits(state[into]) == words[hot].tobytes()
    assert bits(cold_weight[away]) == right[~hot].tobytes()
    assert bits(cold_state[away, :state_width]) == words[~hot].tobytes()
    assert (cold_state[:, state_width] == 123).all()
    others = torch.ones(rows, dtype=torch.bool, device=GPU)
    others[away] = False
    assert (cold_weight[others] == 123).all()
    assert (cold_state[others] == 123).all()


@pytest.mark.usefixtures("gpu")
def test_normal_values_have_the_bits_of_the_cpu_far_into_the_tails():
    initial, n, width = rows_on(GPU, TABLES), 400_000, 64
    weight, state = device_rows(n, width, 0, FLOAT)
    initial.on_device().generate_range(5000, 0, n, weight, state, 0)
    right, _ = expected(np.arange(5000, 5000 + n), width, FLOAT)
    assert np.abs(right).max() > 5  # a tail probability of 3 in 10⁷
    assert bits(weight) == right.tobytes()


@pytest.mark.usefixtures("gpu")
def test_parts_of_a_table_are_generated_as_its_rows_are():
    whole = InitialTable(start=0, number=4, init=Normal(), padding_idx=2**34 + 4)
    weight, state = device_rows(100, 12, 0, FLOAT)
    rows_on(GPU, [whole]).on_device().generate_range(2**34, 0, 100, weight, state, 0)
    for first in range(3):
        begin = -(-(2**34 - first) // 3)
        padding = 2**34 + 4 - first
        part = replace(whole, first_id=first, id_step=3, padding_idx=None if padding % 3 else padding // 3)
        mine, state = device_rows(33, 12, 0, FLOAT)
        rows_on(GPU, [part]).on_device().generate_range(begin, 0, 33, mine, state, 0)
        assert bits(mine) == bits(weight[first + 3 * begin - 2**34 :: 3][:33])


@pytest.mark.usefixtures("gpu")
def test_missed_rows_of_count_zero_write_nothing():
    weight, state = device_rows(4, 12, 1, FLOAT)
    rows_on(GPU).on_device().generate_missed(*missed([], [], []), weight, state, 0, 0, 1)
    rows_on(GPU).on_device().generate_range(0, 0, 0, weight, state, 1)
    assert (weight == 123).all()
    assert (state == 123).all()


@pytest.mark.usefixtures("gpu")
def test_rows_of_a_graph_follow_its_count():
    initial, width = rows_on(GPU), 12
    weight, state = device_rows(10, width, 1, FLOAT)
    plan = missed([3, 9, 2000], [0, 1, 2], [1, 1, 1])
    initial.on_device().generate_missed(*plan, weight, state, 0, 0, 1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        initial.on_device().generate_missed(*plan, weight, state, 0, 0, 1)
    weight.fill_(123)
    plan[0].fill_(2)
    plan[2][1] = 11
    graph.replay()
    assert bits(weight[:2]) == expected([3, 11], width, FLOAT)[0].tobytes()
    assert (weight[2:] == 123).all()


@pytest.mark.usefixtures("gpu")
def test_rows_for_a_gpu_are_generated_on_the_host_too():
    keys, weight, state = np.array([1, 1500]), np.zeros((2, 12), np.float32), np.zeros((2, 1), np.uint32)
    rows_on(GPU).generate(keys, np.arange(2), weight, state, 1)
    right, words = expected(keys, 12, FLOAT, 1)
    assert weight.tobytes() == right.tobytes()
    assert state.tobytes() == words.tobytes()


# --- without one ------------------------------------------------------------------------------------------------------


def test_rows_built_for_the_cpu_refuse_the_device():
    with pytest.raises(UnsupportedError, match="build them with the cache's device"):
        rows_on("cpu").on_device().generate_range(0, 0, 1, torch.zeros(1, 4), torch.zeros(1, 0), 0)
