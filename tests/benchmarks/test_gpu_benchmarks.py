"""The benchmarks that need a GPU, tried out on the CPU with tiny sizes: they run, and keep what they measured."""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from dataclasses import replace
from itertools import count

import forks
import pytest
import torch

import tieredemb as te
from benchmarks import cuda_loops, cuda_opening, cuda_shapes, tables
from benchmarks.cuda_inference import Ids, Size
from benchmarks.cuda_loops import BEFORE, EAGER, Loop, Loops
from benchmarks.cuda_modes import FETCHED, FETCHED_GRAPH
from benchmarks.cuda_rounding import area_under_curve
from benchmarks.cuda_runs import TURNS, Way, a_batch, batches_in_turns, run_fetched, run_in_turns
from benchmarks.cuda_shapes import LIMITS
from benchmarks.cuda_sharding import (
    CAPTURED,
    COPIED,
    EXCHANGES,
    MIXED,
    PLAIN,
    RESIDENT,
    SHARDED,
    Done,
    Exchange,
    Requests,
)
from benchmarks.cuda_sharding import plan_of as plan_of_sharding
from benchmarks.cuda_sharding import records_of as records_of_sharding
from benchmarks.cuda_tables import set_weights, table_configs, tiered_tables
from benchmarks.cuda_tiers import moved
from benchmarks.cuda_timing import StepTimes
from benchmarks.cuda_workload import batches, every_row, quick_workloads
from benchmarks.record import Record, load
from benchmarks.shapes import Limits, Shape, as_one, draw
from benchmarks.shapes import batches as shapes_batches
from benchmarks.timing import Quantiles
from tieredemb.cache.stats import CacheStats
from tieredemb.sharding.layout import Layout

CPU = torch.device("cpu")
QUICK = ("--quick", "--device", "cpu")
LOOPED = (*(f"{name}, " for name in quick_workloads()), "")  # workloads, and shapes
OF_LOOPS = ("prefetch / eager", "eager / eager before", "steps replayed")


CHILD = "import sys\nfrom benchmarks.children import main\nmain(*sys.argv[1:])"
FORKED_RANKS = """
import multiprocessing, sys, types
from benchmarks import cuda_sharding
fork = multiprocessing.get_context("fork")  # of a process that has all imports, and one thread
cuda_sharding.multiprocessing = types.SimpleNamespace(get_context=lambda how: fork)
cuda_sharding.main(sys.argv[1:])
"""


def run(name, *args):
    """Its processes are forks."""
    if name == "sharding":
        done = forks.run(FORKED_RANKS, *QUICK, *args)
        assert done.returncode == 0, done.stderr
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_opening, "child", forked_child)
        importlib.import_module(f"benchmarks.cuda_{name}").main([*QUICK, *args])


def forked_child(*args, **environment):
    done = forks.run(CHILD, *args, base=forks.TORCH, env=os.environ | environment)
    return json.loads(done.stdout)


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    ("name", "ops"),
    [
        (
            "dlrm",
            {
                "DLRM step": 13,
                **dict.fromkeys(("DLRM step, prefetch / eager", "DLRM step, prefetch / host time of its parts"), 3),
                **dict.fromkeys(("host time of the dense layers", "host time of the tables"), 3),
                "HBM of the tables": 4,
            },
        ),
        ("inference", {"lookup, all hits": 3, "lookup, 5 % misses": 2}),
        ("tiers", {"W-1.2": 4, "W-1.2, building 0.0 GiB, weights set": 2}),
        ("optimizers", {"W-1.2": 8, "forward": 3, "catch up": 6}),
        ("converted", {"step": 15, "step, prefetch / eager": 2}),
        ("whole", {"step": 12}),
        ("rounding", {"test AUC": 5}),
        (
            "sharding",
            {"step": 24, "sharded by default / small tables whole": 2, "misses of a rank / one GPU's": 4},
        ),
        ("shapes", {"step": 4, "HBM of the cache": 2}),
        (
            "loops",
            {
                **{f"{work}step of a loop": 8 if not work else 4 for work in LOOPED},
                **{f"{work}{op}": 2 if not work else 1 for work in LOOPED for op in OF_LOOPS},
            },
        ),
        ("opening", {"open 0.0 GiB": 2, "fill as many bytes": 1, "first step beyond import torch": 2}),
        (
            "host",
            {
                **{"an empty autograd.Function": 2, "a further one": 2},
                **dict.fromkeys(("next batch", "forward", "backward", "step()", "in all"), 12),
            },
        ),
    ],
)
def test_benchmark_keeps_its_records_for_the_docs(name, ops, tmp_path, capsys):
    args = ("--directory", str(tmp_path)) if name == "tiers" else ()
    run(name, "--results", str(tmp_path / "results"), *args)
    records = load(tmp_path / "results", f"cuda-{name}")["records"]
    assert {op: sum(record.op == op for record in records) for op in ops} == ops
    assert sum(ops.values()) == len(records)
    text = tables.rewrite(f"<!-- benchmarks:cuda-{name} -->\n<!-- /benchmarks -->", tmp_path / "results")
    assert all(f"| {op}, " in text for op in ops)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]  # the file of the file tier is gone
    out = capsys.readouterr().out
    assert ("in the end the bits of HostMemory" in out) == (name == "tiers")
    assert out.count("the bits of all resident") == (4 if name == "dlrm" else 0)
    assert "not that of all resident" not in out


def test_area_under_curve_is_that_of_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    random = torch.Generator().manual_seed(0)
    labels = (torch.rand(500, generator=random) < 0.3).double()
    scores = (torch.rand(500, generator=random) * 20).round().double()  # with ties
    assert area_under_curve(labels, scores) == pytest.approx(metrics.roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.parametrize("name", ["dlrm", "inference", "tiers", "optimizers", "converted", "rounding", "sharding"])
def test_wrong_options_are_refused(name, capsys):
    module = importlib.import_module(f"benchmarks.cuda_{name}")
    with pytest.raises(SystemExit):
        module.plan_of(["--device", "cpu"])
    assert "--quick --device cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        module.plan_of([*QUICK, "--rows", "0"])
    assert "--rows must be at least 1, got 0" in capsys.readouterr().err
    assert module.plan_of(QUICK)[1] is None  # nothing is kept


def test_shapes_have_tables_and_batches_as_drawn():
    shape = draw(7, Limits(tables=(5,), widths=((8, 16),), largest=2.0, bags=(1, 4), batches=(64,), shares=(0.5,),
                           most_ids=300, most_bytes=4000))  # fmt: skip
    assert draw(7, LIMITS) == draw(7, LIMITS) != draw(8, LIMITS)
    assert shape.mean_ids <= 300
    assert 4 * sum(rows * width for rows, width in zip(shape.sizes, shape.widths, strict=True)) <= 4000
    for batch in shapes_batches(shape, 3, CPU):
        assert len(batch) == 5
        for rows, bag, (ids, offsets) in zip(shape.sizes, shape.bags, batch, strict=True):
            assert 0 <= ids.min() <= ids.max() < rows
            assert offsets.tolist() == sorted(offsets.tolist())
            assert (offsets[0], offsets[-1], len(offsets)) == (0, len(ids), shape.batch + 1)
            assert set(offsets.diff().tolist()) <= ({1} if bag == 1 else set(range(2 * bag)))


def test_shapes_lay_the_tables_of_a_batch_behind_one_another():
    some = [(torch.tensor([3, 1]), torch.tensor([0, 2, 2])), (torch.tensor([5]), torch.tensor([0, 0, 1]))]
    ids, offsets = as_one(some)
    assert ids.tolist() == [3, 1, 5]
    assert offsets.tolist() == [0, 2, 2, 2, 3]


# --- their parts ------------------------------------------------------------------------------------------------------


def test_missed_ids_are_named_once():
    size = Size(tables=2, rows=4000, batch=32, hot=64, calls=1)
    ids = Ids(size, CPU)
    hot = torch.cat([batch.view(2, -1) for batch in ids.every_hot()], 1)
    assert hot.shape == (2, 64)
    drawn = torch.stack(ids.draw(20)).view(20, 2, 32)
    missing = torch.cat([torch.stack(ids.draw(20, misses=0.5)).view(20, 2, 32) for _ in range(2)])
    for table in range(2):
        resident = hot[table].unique()
        assert len(resident) == 64
        assert torch.isin(drawn[:, table], resident).all()
        cold = missing[:, table][~torch.isin(missing[:, table], resident)]
        assert 500 < len(cold) < 780  # of 1280
        assert len(cold.unique()) == len(cold)


def test_missed_ids_run_out():
    ids = Ids(Size(tables=2, rows=100, batch=32, hot=64, calls=1), CPU)
    with pytest.raises(SystemExit, match="100 rows a table are too few"):
        ids.draw(20, misses=0.5)


def test_fetched_steps_are_timed_between_warm_up_and_the_last():
    work = quick_workloads()["W-1.2"]
    module = tiered_tables(work, 600, te.SGD(lr=0.1), CPU)
    set_weights(module, work, CPU)
    offsets, seen = torch.arange(work.lookups + 1), []

    def step(ids):
        seen.append(int(ids[0]))
        module(ids, offsets).sum().backward()

    batches = [torch.full((work.lookups,), i) for i in range(9)]
    times, done = run_fetched(step, batches, module, module.stats, warm_up=3, depth=2, device=CPU)
    assert seen == list(range(9))
    assert len(times.step_ms) == 3
    assert abs(done.batches - 3) <= 2  # those planned ahead count when they are planned
    module.close()


def test_steps_whose_batches_were_planned_before_are_told_of():
    """As in turns of one step beside a thread that plans ahead."""
    assert a_batch(12, CacheStats(batches=4)) == 3
    assert a_batch(0, CacheStats()) == 0
    assert moved(CacheStats()) == "0 missed rows and 0 written back a batch"


def test_ways_take_turns_on_batches_of_their_own():
    seen, model = [], te.TieredEmbeddingBag(10, 4, device="cpu")
    ids = iter(range(1000))
    ways = {
        name: Way(step=lambda batch, name=name: seen.append((name, batch)), batches=ids, warm_up=warm_up, model=ahead)
        for name, warm_up, ahead in (("plain", 3, None), ("ahead", 4, model))
    }
    found = run_in_turns(ways, steps=2 * TURNS - 1, device=CPU)
    assert [batch for _, batch in seen] == list(range(len(seen)))
    assert len(seen) <= batches_in_turns([3, 4], 2 * TURNS - 1)
    warm_up, turns = seen[:7], [name for name, _ in seen[7:]]
    assert [name for name, _ in warm_up] == ["plain"] * 3 + ["ahead"] * 4
    assert turns == (["plain"] * 2 + ["ahead"] * (len(turns) // TURNS - 2)) * TURNS
    assert [len(times.step_ms) for times, _ in found.values()] == [2 * TURNS, 2 * TURNS]


def test_of_several_runs_the_usual_one_counts():
    runs = [
        StepTimes(mean_ms=mean, host_ms=mean / 2, step_ms=torch.full((4,), mean).numpy()) for mean in (1.0, 9.0, 2.0)
    ]
    whole = StepTimes.of_all(runs)
    assert (whole.mean_ms, whole.host_ms, len(whole.step_ms)) == (2.0, 1.0, 12)


def test_loops_take_their_batches_in_order_and_time_all_steps_but_the_first(monkeypatch):
    monkeypatch.setattr(cuda_loops, "perf_counter", lambda: len(seen) / 1e3)  # each step takes a millisecond
    offsets = torch.tensor([0, 2])
    module, seen = te.TieredEmbeddingBagCollection([te.TableConfig(name="t", num_embeddings=9, embedding_dim=4)]), []

    def step(ids):
        seen.append(int(ids[0]))
        module(ids, offsets)

    given = (torch.full((2,), number % 9) for number in count())
    loops = Loops(step, given, module, CPU)
    for way in (EAGER, FETCHED, FETCHED_GRAPH):
        loop = loops.run(way, 5, 2)
        assert loop.ms == pytest.approx(1)
        assert (loop.replayed, loop.ahead) == (0, None)  # neither on a CPU
    assert seen == [number % 9 for number in range(15)]
    module.close()


def test_loops_of_all_ways_make_pairs():
    module = te.TieredEmbeddingBagCollection([te.TableConfig(name="t", num_embeddings=9, embedding_dim=4)])
    loops = Loops(lambda ids: None, (torch.zeros(2) for _ in count()), module, CPU)
    plan = cuda_loops.plan_of([*QUICK, "--no-shapes"])[0]
    plan = replace(plan, pairs=3, graphs=2)
    found = loops.run_in_turns(plan, plan.pairs)
    assert {way: len(of_way) for way, of_way in found.items()} == {BEFORE: 1, EAGER: 3, FETCHED: 3, FETCHED_GRAPH: 2}
    found = loops.run_in_turns(plan, 0)
    assert {way: len(of_way) for way, of_way in found.items()} == {FETCHED_GRAPH: 2}
    module.close()


def test_loops_are_held_to_the_median_of_their_pairs():
    plan = replace(cuda_loops.plan_of(QUICK)[0], quick=False)
    eager, fetched = [1.0, 2.0, 4.0], [1.0, 1.8, 4.4]
    loops = {
        BEFORE: [Loop(ms=4.0, replayed=0.0, ahead=None)],
        EAGER: [Loop(ms=ms, replayed=0.0, ahead=None) for ms in eager],
        FETCHED: [Loop(ms=ms, replayed=0.0, ahead=ms < 2) for ms in fetched],
        FETCHED_GRAPH: [Loop(ms=1.0, replayed=share, ahead=None) for share in (0.9, 0.99, 0.94)],
    }
    by_op = {record.op: record for record in cuda_loops.records_of(plan, "W, ", "all", loops, 0.97, 0.95)}
    ratio, replayed = by_op["W, prefetch / eager"], by_op["W, steps replayed"]
    assert (ratio.median, ratio.bar, ratio.met) == (1.0, "≤ 0.97", False)
    assert ratio.note == "interval 0.777 … 1.279; 2 of 3 loops planned ahead in the end"
    assert by_op["W, eager / eager before"].median == 0.5
    assert (replayed.median, replayed.bar, replayed.met) == (0.94, "≥ 0.95", False)


def test_shapes_are_held_to_the_median_and_the_worst_beside_fbgemm():
    modes = (", prefetch", ", CUDA graph", ", CUDA graph, prefetch")
    found = [
        Record(
            op="step",
            provider="tieredemb",
            config=f"{n} % cached{mode}",
            median=1,
            p20=1,
            p80=1,
            rounds=1,
            ratio=n / 10,
        )
        for n in (1, 5, 9)
        for mode in modes
    ]
    by_config = {record.config: record for record in cuda_shapes.records_of_all(found, quick=False)}
    assert {config: (record.median, record.met) for config, record in by_config.items()} == {
        "median of 3 shapes": (0.5, False),
        "worst of 3 shapes": (0.9, False),
    }
    assert not cuda_shapes.records_of_all([replace(record, ratio=None) for record in found], quick=False)


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--pairs", "1"], "2 --pairs at least"), (["--steps", "50"], "50 --steps have none behind the --first 50")],
)
def test_loops_that_could_not_be_told_apart_are_refused(args, message, capsys):
    with pytest.raises(SystemExit):
        cuda_loops.plan_of([*QUICK, *args])
    assert message in capsys.readouterr().err


def test_tables_of_unequal_sizes_have_ids_of_their_own_rows():
    work = quick_workloads()["W-kaggle"]
    ids = batches(work, 20, CPU).view(20, work.tables, work.batch)
    for table, rows in enumerate(work.sizes):
        assert 0 <= ids[:, table].min() <= ids[:, table].max() < rows
    assert ids[:, 0].unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("sizes", [(5,), (4, 4), (3, 20, 1, 7)])
def test_every_row_is_named_once(sizes):
    seen = [[] for _ in sizes]
    for ids, offsets in every_row(sizes, 12, CPU):
        assert len(ids) <= 12
        assert offsets[-1] == len(ids)
        starts = offsets[:: (len(offsets) - 1) // len(sizes)].tolist()
        for rows, start, stop in zip(seen, starts, starts[1:], strict=False):
            rows += ids[start:stop].tolist()
    assert seen == [list(range(rows)) for rows in sizes]


def test_weights_of_unequal_tables_are_all_set():
    shape = Shape(seed=0, sizes=(3, 70_000, 20), widths=(8, 4, 8), bags=(1, 1, 1), batch=1, share=0.5)
    module = tiered_tables(shape, shape.share, te.SGD(lr=0.1), CPU)
    values = set_weights(module, shape, CPU)
    weights = module.state_dict()
    for t, (rows, width) in enumerate(zip(shape.sizes, shape.widths, strict=True)):
        expected = values[width][torch.arange(rows) % len(values[width])]
        assert torch.equal(weights[f"tables.t{t}.weight"], expected)
    module.close()


# --- tables of several ranks ------------------------------------------------------------------------------------------

RANKS = 3
SHARDING = {
    "t0": te.TableWise(rank=2), "t1": te.RowWise(), "t2": te.RowWise(), "t3": te.TableWise(rank=0), "t4": te.RowWise(),
}  # fmt: skip


@pytest.mark.parametrize("rank", range(RANKS))
def test_requests_are_what_a_rank_exchanges_with_others(rank):
    limits = Limits(tables=(5,), widths=((4, 8),), largest=1.5, bags=(1, 4), batches=(16,), shares=(1.0,),
                    most_ids=1000, most_bytes=10_000)  # fmt: skip
    shape = draw(2, limits)
    assert set(shape.widths) == {4, 8}
    assert set(shape.bags) == {1, 4}
    layout = Layout(table_configs(shape), RANKS, SHARDING)
    (batch,) = shapes_batches(shape, 1, CPU)
    sent, rows = Counter(), set()
    for t, (ids, _) in enumerate(batch):
        kind, width = SHARDING[f"t{t}"], 4 * shape.widths[t]
        is_row_wise = isinstance(kind, te.RowWise)
        for row in ids.tolist():
            owner = (row + t) % RANKS if is_row_wise else kind.rank
            if owner != rank:
                sent["ids"] += 8
                if is_row_wise:
                    sent["gradients"] += width
                    sent["rows"] += width * ((t, row) not in rows)
                    rows.add((t, row))
        if not is_row_wise and kind.rank != rank:  # pooled bags
            sent += {"rows": width * shape.batch, "gradients": width * shape.batch}
    requests = Requests(layout, shape, as_one(batch))
    assert requests.bytes_with_others(rank) == sent


def test_a_captured_step_has_bars_by_one_gpu_by_its_parts_and_by_tables_held_whole():
    """All on a rank of two that takes longer in everything; the bars are those of W-kaggle."""
    plan, _ = plan_of_sharding([*QUICK, "--workloads", "W-kaggle"])
    plan = replace(plan, quick=False, works=(replace(plan.works[0], modes=("", *CAPTURED)),))

    def done(ms):
        return Done(StepTimes(mean_ms=ms, host_ms=ms, step_ms=torch.full((4,), ms).numpy()), 0.5, 10.0)

    def told(scale):
        ms = {PLAIN: 1.0, SHARDED: 2.0, MIXED: 1.6, COPIED: 1.4}
        steps = {("W-kaggle", way, mode): done(scale * ms[way]) for way in ms for mode in ("", *CAPTURED)}
        exchange = Exchange(Quantiles(scale * 0.1, 0.0, 0.0, 1), 3.0)
        steps["W-kaggle", RESIDENT] = Quantiles(scale * 0.3, 0.0, 0.0, 1)
        steps["W-kaggle", EXCHANGES] = dict.fromkeys(("ids", "rows", "gradients"), exchange)
        return steps

    records = records_of_sharding(plan, plan.works[0], [told(1.0), told(2.0)])
    found = {(record.op, record.config): (record.ratio or record.median, record.bar, record.met) for record in records}
    mode = ", CUDA graph, prefetch"
    assert found["step", "W-kaggle, sharded"] == (2.0, "≤ 5×", True)
    assert found["step", f"W-kaggle, sharded{mode}"] == (2.0, "≤ 2×", True)
    assert found["step", f"W-kaggle, sharded, small tables whole{mode}"] == (1.6, "", None)
    assert found["sharded by default / small tables whole", f"W-kaggle{mode}"] == (1.25, "≤ 1.05×", False)
    parts = 0.5 + 2 * (3 * 0.1 + 0.3)
    assert found["captured step / the sum of its parts", f"W-kaggle{mode}"] == (
        pytest.approx(4.0 / parts, rel=1e-4), "≤ 1.25×", False,
    )  # fmt: skip
    assert sum(op == "alone" for op, _ in found) == 4
    of_more = records_of_sharding(replace(plan, ranks=4), plan.works[0], [told(1.0)])
    assert not any(record.bar for record in of_more)


def test_parts_of_the_sharded_benchmark_are_run_alone():
    plan, results = plan_of_sharding([*QUICK, "--workloads", "shapes", "--shapes", "1", "--modes", "prefetch"])
    assert ([work.modes for work in plan.works], results) == ([(", prefetch",)], None)
    plan, _ = plan_of_sharding([*QUICK, "--workloads", "DLRM", "W-kaggle"])
    assert [(work.name, work.ways) for work in plan.works] == [
        ("DLRM", (PLAIN, SHARDED)),
        ("W-kaggle", (PLAIN, SHARDED, MIXED, COPIED)),
    ]
