"""The time that scores are made of, where several plans of a step are of one time. Through a module's calls, on every
device."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from devices import given_on_devices, randint
from hypothesis import strategies as st
from oracle import OracleCache

import tieredemb as te
from tieredemb.cache.base import PlanKind
from tieredemb.cache.policy import scoring
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.pipeline import plan_executors
from tieredemb.pipeline.lookups import LookupSpec

ROWS, PARTS = 64, 4
POLICIES = [te.LFU(half_life_batches=3), te.LFU(half_life_batches=math.inf), te.LRU()]
BATCHES = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, ROWS - 1), max_size=30)), min_size=1, max_size=15
)  # whether each ages, its ids


def make(capacity, policy=POLICIES[0], **keywords):
    placement = "resident" if isinstance(capacity, float) else "cached"
    return te.TieredEmbedding(ROWS, 4, capacity=capacity, policy=policy, placement=placement, **keywords)


def plan(module, ids, *, ages):
    """Plans a forward of `ids`, int64 (N,); returns the call, which is in flight."""
    return module.engine._call(module._batch(ids), module.call_context, PlanKind(ages=ages))


def look_up(module, *ids, ages):
    """Plans a forward that is over at once; returns what the counters counted."""
    before = module.stats()
    plan(module, torch.tensor(ids, dtype=torch.int64), ages=ages).release()
    return module.stats() - before


def parts_of(step):
    """The ids of a step, int64 (N,), and apart as several tables would have them."""
    ids = randint(0, ROWS, (14,), seed=step)
    return ids, [ids[ids % PARTS == part] for part in range(PARTS)]


def run_apart(module, step):
    """Plans a step in parts, of which the first ages scores."""
    for number, ids in enumerate(parts_of(step)[1]):
        plan(module, ids, ages=number == 0).release()


def time_and_scores(module):
    module.flush()
    cold = module.tables.groups[0].cache.cold
    return cold.metadata.batch, cold.state[:, -1].tolist()


@given_on_devices(BATCHES, st.integers(1, 20), st.sampled_from([0, 1, 7, 300, math.inf]), cpu=60, cuda=25)
def test_hits_are_those_of_the_oracle(device, batches, slots, half_life):
    policy = te.LRU() if half_life == 0 else te.LFU(half_life_batches=half_life)
    module = make(slots, policy)
    fixed_point = 8 / scoring(policy).unit if half_life in (1, 7, 300) else 0.0  # each use rounds to half a unit
    oracle = OracleCache(slots, half_life, precision=fixed_point)
    for ages, batch in batches:
        counted = look_up(module, *batch, ages=ages)
        assert (counted.hits, counted.lookups) == (oracle.plan(batch, ages=ages), len(batch))
        assert module.stats().batches == oracle.time
        if oracle.ambiguous or len(set(batch)) > slots:
            return  # of rows of equal score either may go; of a batch beyond the capacity any row may stay


@pytest.mark.parametrize("capacity", [5, ROWS, 1.0])  # rows: fewer than a step uses, all through a cache, all without
@pytest.mark.parametrize("policy", POLICIES, ids=["aged", "counts", "clock"])
def test_plans_of_one_time_score_as_one_plan_of_all_keys(device, policy, capacity):
    apart, together = make(capacity, policy), make(capacity, policy)
    for step in range(12):
        run_apart(apart, step)
        plan(together, parts_of(step)[0], ages=True).release()
    assert time_and_scores(apart) == time_and_scores(together)
    mine, other = apart.stats(), together.stats()
    assert (mine.batches, mine.lookups, mine.unique) == (12, other.lookups, other.unique)
    if capacity != 5:
        assert mine.hits == other.hits


def test_caches_of_all_widths_age_alike(device):
    tables = [te.TableConfig(name=f"t{width}", num_embeddings=ROWS, embedding_dim=width) for width in (4, 8)]
    module = te.TieredEmbeddingBagCollection(tables, capacity=0.5)
    ids, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 4])
    for ages in (True, False, False, True):
        batch = module._batch(ids, offsets)
        module.engine._call(batch, module.call_context, PlanKind(ages=ages)).release()
    assert [group.cache.stats().batches for group in module.tables.groups] == [2, 2]


def test_the_first_plan_is_of_the_first_time(device):
    module = make(5)
    assert look_up(module, 1, ages=False).batches == 1
    assert look_up(module, 2, ages=False).batches == 0
    time, scores = time_and_scores(module)
    assert time == 1
    assert scores[1] == scores[2] > MIN_SCORE


def test_rows_are_locked_by_the_plan_not_by_its_time(device):
    module = make(2)
    flying = plan(module, torch.tensor([1, 2]), ages=True)
    assert look_up(module, 3, ages=False).rows_overflow == 1
    assert look_up(module, 1, 2, ages=False).hits == 2
    flying.release()
    assert look_up(module, 4, 5, ages=False).evictions >= 2
    assert look_up(module, 4, 5, ages=False).hits == 2


@pytest.mark.parametrize("policy", [POLICIES[0], te.LRU()], ids=["aged", "clock"])
def test_of_rows_of_one_time_that_of_the_earlier_plan_leaves(device, policy):
    module = make(2, policy)
    for key, ages in ((1, True), (2, False), (3, False)):
        look_up(module, key, ages=ages)
    assert look_up(module, 2, 3, ages=False).hits == 2
    assert look_up(module, 1, ages=False).hits == 0


# --- what outlasts a cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["file", "checkpoint"])
@pytest.mark.parametrize("step", [0, 3])  # after the first time of all, and after a later one
def test_time_goes_on_where_rows_were_saved_amid_a_step(device, tmp_path, how, step):
    def storage():
        return te.File(str(tmp_path / "rows")) if how == "file" else te.HostMemory()

    kept, plain = make(5, storage=storage()), make(5)
    for each in range(6):
        for number, ids in enumerate(parts_of(each)[1]):
            plan(kept, ids, ages=number == 0).release()
            plan(plain, ids, ages=number == 0).release()
            if (each, number) != (step, 1):
                continue
            if how == "file":
                kept.close()
                kept = make(5, storage=storage())
            else:
                kept.save_checkpoint(tmp_path / "saved")
                kept = make(5)
                kept.load_checkpoint(tmp_path / "saved")
    assert time_and_scores(kept) == time_and_scores(plain)
    assert time_and_scores(kept)[0] == 6


def test_files_whose_plans_all_aged_go_on(device, tmp_path):
    """Those of libraries that had one number for plans and time."""
    path = str(tmp_path / "rows")
    module = make(5, te.LRU(), storage=te.File(path))
    for key in range(10):
        look_up(module, key, ages=True)
    module.close()
    module = make(5, te.LRU(), storage=te.File(path))
    look_up(module, 20, ages=False)
    look_up(module, 21, ages=True)
    time, scores = time_and_scores(module)
    assert time == 11
    assert scores[9] == scores[20] == scores[21] - 1


# --- plans that come before their forward -----------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
def test_plans_made_ahead_age_as_they_are_told(device, tmp_path, staged):
    ahead = make(40, **({"storage": te.File(str(tmp_path / "rows"))} if staged else {}))
    plain = make(40)
    with plan_executors._executor(*plan_executors.kind_of(ahead)) as executor:
        for step in range(8):
            parts = [part for part in parts_of(step)[1] if len(part)]
            for number, ids in enumerate(parts):
                its = LookupSpec(ahead, (ids,))
                with contextlib.nullcontext() if executor.on_thread else executor.planning([its]):
                    ahead.engine.plan_ahead(
                        executor, its.given, ahead._batch, ahead.call_context, PlanKind(ages=number == 0, ahead=True)
                    )
                plan(plain, ids, ages=number == 0).release()
            with torch.no_grad():
                for ids in parts:
                    ahead(ids)
            assert not ahead.engine.planned.waiting
    assert time_and_scores(ahead) == time_and_scores(plain)
    assert ahead.stats().batches == plain.stats().batches == 8


@pytest.mark.parametrize("capacity", [5, 40, 1.0])
def test_replays_age_as_the_captured_plans_do(gpu, capacity):
    eager, run = make(capacity), make(capacity)
    buffers = [torch.zeros(6, dtype=torch.int64) for _ in range(3)]

    def step(module):
        for number, ids in enumerate(buffers):
            plan(module, ids, ages=number == 0).release()

    def load(seed):
        for number, buffer in enumerate(buffers):
            buffer.copy_(randint(0, ROWS, (6,), seed=3 * seed + number))

    graph = torch.cuda.CUDAGraph()
    for seed in range(12):
        load(seed)
        step(eager)
        if seed == 3:
            with torch.cuda.graph(graph):
                step(run)
        if seed < 3:
            step(run)
        else:
            graph.replay()
    assert time_and_scores(run) == time_and_scores(eager)
    assert time_and_scores(run)[0] == run.stats().batches == 12
