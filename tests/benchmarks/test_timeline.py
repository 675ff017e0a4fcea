"""The timeline of a step: which activities of a trace belong to it, what they are part of, and how they are drawn."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import run_profiled

sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks are no part of the installed package

from benchmarks import timeline
from benchmarks.cuda_timing import StepTimes
from benchmarks.timeline_plot import COLORS, runs, stream_rows
from benchmarks.timeline_plot import timeline as draw
from benchmarks.timeline_trace import GROUPS, Activity, Step, group_of, median_step, short_name, steps_of
from tieredemb.kernels.source import PACKAGE
from tieredemb.kernels.tracing import KERNELS, marked

FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3> >"
SORT = "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<Policy, int, long>(int*, int*)"
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_TNT"
REPLAYED = (  # name, stream, start, duration in µs: a step of 2,000
    ("bags_pool", 7, 10.0, 90.0),
    (GEMM, 7, 105.0, 700.0),
    (ADD, 7, 810.0, 20.0),
    ("step_begin", 7, 1500.0, 3.0),
    ("segments_update", 7, 1505.0, 250.0),
    ("plan_begin", 20, 12.0, 8.0),
    ("victims_select", 20, 25.0, 60.0),
    ("rows_swap", 20, 90.0, 1200.0),
    (SORT, 21, 95.0, 80.0),
)


def event(category: str, name: str, start: float, us: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": us, "pid": 1, "tid": 1, "args": args}


def trace(lengths: Sequence[float]) -> dict[str, Any]:
    """Of steps that take `lengths` on the GPU, as `export_chrome_trace` writes it: the host is ahead, copies a batch in
    and launches one graph a step."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
    begin = 10_000.0
    for step, length in enumerate(lengths):
        host, copy, launch = 100.0 * step, 10 * step + 1, 10 * step + 2
        events += [
            event("user_annotation", f"ProfilerStep#{step + 5}", host, 99.0),
            event("gpu_user_annotation", f"ProfilerStep#{step + 5}", begin, length),
            event("cpu_op", "aten::copy_", host + 5, 10.0),
            event("cuda_runtime", "cudaMemcpyAsync", host + 6, 5.0, correlation=copy),
            event("cuda_runtime", "cudaGraphLaunch", host + 20, 30.0, correlation=launch),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", begin, 4.0, stream=7, correlation=copy),
        ]
        events += [
            event("kernel", name, begin + start, us, stream=stream, correlation=launch, device=0)
            for name, stream, start, us in REPLAYED
        ]
        begin += length
    return {"traceEvents": events}


@pytest.fixture
def steps() -> list[Step]:
    return steps_of(trace([2500.0, 2000.0, 2100.0, 1900.0, 3000.0]))


# --- steps ------------------------------------------------------------------------------------------------------------


def test_steps_last_until_the_next_begins_on_the_gpu(steps: list[Step]) -> None:
    assert [step.us for step in steps] == [2000.0, 2100.0, 1900.0], "without the first and the last"
    assert median_step(steps).us == 2000.0


def test_steps_have_what_they_launched_and_nothing_else(steps: list[Step]) -> None:
    for step in steps:
        assert len(step.activities) == len(REPLAYED) + 1
        copy, *_ = step.activities
        assert copy == Activity("Memcpy DtoD (Device -> Device)", "copy", 7, 0.0, 4.0)
        swap = next(each for each in step.activities if each.name == "rows_swap")
        assert (swap.stream, swap.start_us, swap.us, swap.group) == (20, 90.0, 1200.0, "swap")


def test_steps_leave_out_what_was_launched_between_them() -> None:
    whole = trace([2000.0] * 4)
    between = event("cuda_runtime", "cudaLaunchKernel", 199.5, 0.2, correlation=19)
    after = event("kernel", "late", 14_100.0, 5.0, stream=7, correlation=19)
    whole["traceEvents"] += [between, after]
    assert all(each.name != "late" for step in steps_of(whole) for each in step.activities)


def test_steps_have_kernels_whose_launch_the_trace_leaves_out() -> None:
    whole = trace([2000.0] * 4)
    whole["traceEvents"].append(event("kernel", "missed_resolve", 12_150.0, 5.0, stream=20, correlation=13))
    first, second = steps_of(whole)
    assert [each.name for each in first.activities].count("missed_resolve") == 1
    assert all(each.name != "missed_resolve" for each in second.activities)


def test_traces_of_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="2 steps of the trace have run something on a GPU, a timeline needs 3"):
        steps_of(trace([2000.0, 2000.0]))
    without_gpu = [each for each in trace([1.0] * 4)["traceEvents"] if each.get("cat") not in ("kernel", "gpu_memcpy")]
    with pytest.raises(ValueError, match="0 steps"):
        steps_of({"traceEvents": without_gpu})


def test_group_times_are_sums(steps: list[Step]) -> None:
    times = {"plan": 68.0, "swap": 1200.0, "sort": 80.0, "lookup": 90.0, "update": 253.0, "dense": 720.0, "copy": 4.0}
    assert steps[0].group_us == times
    assert list(steps[0].group_us) == [group for group in GROUPS if group in times], "in the order of the legend"


# --- groups -----------------------------------------------------------------------------------------------------------


def test_every_kernel_of_the_library_has_a_part() -> None:
    names = {
        name
        for path in PACKAGE.rglob("*.cu*")
        if path.parent.name != "doctor"
        for name in re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", path.read_text())
    }
    known = {name for names in KERNELS.values() for name in names}
    assert len(names) > 20
    assert names == known, "give a new kernel its part in tieredemb/kernels/tracing.py"


@pytest.mark.parametrize(
    ("name", "category", "group"),
    [
        ("rows_generate", "kernel", "swap"),
        ("long_segments_update", "kernel", "update"),
        (SORT, "kernel", "sort"),
        ("void at::native::bitonicSortKVInPlace<2, -1, 16, 16, int, long>(int)", "kernel", "sort"),
        ("void at::native::(anonymous namespace)::searchsorted_cuda_kernel<int>(int*)", "kernel", "dense"),
        (FILL, "kernel", "other"),
        (ADD, "kernel", "dense"),
        (GEMM, "kernel", "dense"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "kernel", "dense"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(Params)", "kernel", "dense"),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", "copy"),
        ("Memset (Device)", "gpu_memset", "other"),
        ("somebody_elses_kernel", "kernel", "other"),
    ],
)
def test_groups_of_kernels(name: str, category: str, group: str) -> None:
    assert group_of(name, category) == group


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("rows_swap", "rows_swap"),
        (SORT, "DeviceRadixSortOnesweepKernel"),
        (ADD, "vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int, (bool)1>(int*)", "CatArrayBatchedCopy"),
        (GEMM, GEMM),
        ("<lambda>", "<lambda>"),
    ],
)
def test_names_are_shortened(name: str, short: str) -> None:
    assert short_name(name) == short


def test_ranges_are_marked_under_emit_nvtx(gpu: None) -> None:
    assert not isinstance(marked("plan"), torch.profiler.record_function)
    with torch.autograd.profiler.emit_nvtx():
        assert isinstance(marked("plan"), torch.profiler.record_function)


# --- the picture ------------------------------------------------------------------------------------------------------


def test_picture_has_a_row_a_stream_and_a_legend_of_groups(steps: list[Step]) -> None:
    figure = draw(steps[0], "a workload")
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["stream 7", "stream 20", "stream 21"]
    assert axis.get_xlim() == (0, 2.0)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert "swap of rows, 1.20 ms" in texts
    assert len(texts) == 7
    assert figure.get_suptitle() == "A training step on the GPU: 2.00 ms"
    assert [text.get_text() for text in axis.texts] == ["dense", "update", "swap"], "where there is room"


def test_picture_draws_every_activity_where_it_ran(steps: list[Step]) -> None:
    (axis,) = draw(steps[0], "a workload").axes
    drawn = [
        (path.get_extents().x0 * 1e3, path.get_extents().width * 1e3)
        for bars in axis.collections
        for path in bars.get_paths()
    ]
    expected = [(each.start_us, each.us) for each in steps[0].activities]
    np.testing.assert_allclose(sorted(drawn), sorted(expected))
    assert set(COLORS) == set(GROUPS)


def test_names_are_written_over_what_follows_one_another(steps: list[Step]) -> None:
    (_, activities), *_ = stream_rows(steps[0].activities)
    assert runs(activities) == [
        ("copy", 0.0, 4.0),
        ("lookup", 10.0, 100.0),
        ("dense", 105.0, 830.0),
        ("update", 1500.0, 1755.0),
    ]
    assert len(runs([Activity("k", "dense", 7, start, 10.0) for start in (0.0, 31.0)])) == 2
    between = Activity("fill", "other", 7, 11.0, 2.0)
    assert runs([*(Activity("k", "plan", 7, start, 10.0) for start in (0.0, 14.0)), between]) == [("plan", 0.0, 24.0)]


def test_rows_split_a_stream_whose_kernels_overlap() -> None:
    ran = [Activity("a", "dense", 7, 0.0, 10.0), Activity("b", "dense", 7, 5.0, 10.0), Activity("c", "plan", 7, 9.5, 2)]
    assert [(label, [each.name for each in own]) for label, own in stream_rows(ran)] == [
        ("stream 7", ["a", "c"]),
        ("stream 7, beside", ["b"]),
    ]


def test_rows_join_streams_that_take_turns_where_there_are_many() -> None:
    few = [Activity("k", "dense", stream, 10.0 * stream, 9.0) for stream in range(6)]
    assert len(stream_rows(few)) == 6
    many = [Activity("k", "dense", stream, 10.0 * stream, 9.0) for stream in range(7)]
    many.append(Activity("beside", "swap", 30, 0.0, 70.0))
    assert [(label, len(own)) for label, own in stream_rows(many)] == [("streams 0, 1 …", 7), ("stream 30", 1)]


# --- the command ------------------------------------------------------------------------------------------------------


def test_results_are_kept_and_drawn(steps: list[Step], tmp_path: Path) -> None:
    times = StepTimes(mean_ms=1.9, host_ms=0.2, step_ms=torch.full((50,), 1.9).numpy())
    records = timeline.records_of(times, steps)
    timeline.keep(tmp_path, "a workload", records, median_step(steps))
    document = json.loads((tmp_path / "timeline.json").read_text())
    (run,) = document["runs"].values()
    assert {"commit", "machine", "versions", "date"} <= set(run)
    figures = {record["op"]: (record["median"], record["provider"]) for record in run["records"]}
    assert figures["step"] == (1.9, "tieredemb")
    assert figures["step under the profiler"] == (2.0, "tieredemb")
    assert figures["swap"] == (1.2, "tieredemb")
    assert figures["dense"] == (0.72, "torch")
    assert len(run["step"]["activities"]) == len(REPLAYED) + 1
    picture = tmp_path / "pictures" / "timeline.png"
    timeline.main(["--plot", str(picture), "--results", str(tmp_path)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_without_results_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no timeline\.json in .*: run python -m benchmarks\.timeline"):
        timeline.main(["--plot", str(tmp_path / "a.png"), "--results", str(tmp_path)])


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_steps_run_on_the_cpu(one_thread: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the graph step, the prefetch loop and the profiler of a GPU's run; only kernels are lacking."""
    kept = tmp_path / "trace.json"
    timeline.main(["--quick", "--device", "cpu", "--trace", str(kept), "--results", str(tmp_path)])
    assert "a timeline is of a GPU" in capsys.readouterr().err
    names = [each["name"] for each in json.loads(kept.read_text())["traceEvents"] if "name" in each]
    assert sum(name.startswith("ProfilerStep#") for name in names) == timeline.PROFILED
    assert not (tmp_path / "timeline.json").exists()


def test_quick_timeline_of_a_gpu(gpu: None, tmp_path: Path) -> None:
    run_profiled("benchmarks.timeline", "--quick", "--results", str(tmp_path))
    run = json.loads((tmp_path / "timeline.json").read_text())["runs"].popitem()[1]
    names = {each["name"] for each in run["step"]["activities"]}
    # once each: else the step is not delimited rightly
    assert {"keys_find", "missed_place", "rows_swap", "bags_pool", "segments_update"} <= names
    assert [each["name"] for each in run["step"]["activities"]].count("bags_pool") == 1
