"""The example's training: as good as plain torch, the same bits at any capacity and tier, and after any kill."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
from devices import require_gpu, run_profiled
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))  # the examples are no part of the installed package

import tieredemb
from examples.dlrm import __main__ as command
from examples.dlrm import checkpoint, profile, report, trainer
from examples.dlrm.__main__ import main
from examples.dlrm.config import DTYPES, CacheConfig, CheckpointConfig, ModelConfig, TrainConfig
from examples.dlrm.criteo import CriteoFile, Log, LogError
from examples.dlrm.model import Batch
from examples.dlrm.synthetic import GeneratedLog
from examples.dlrm.trainer import Trainer
from tieredemb.errors import CheckpointError, ConfigError, MissingDependencyError, UnsupportedError
from tieredemb.kernels import compiler

REPOSITORY = Path(__file__).parents[2]

# Small tables, so that 1 % of their rows (5,200 of 520,000) is less than the log's 35,000 rows in use.
REAL = TrainConfig(model=ModelConfig(rows_per_table=20_000))
SMALL = TrainConfig(model=ModelConfig(rows_per_table=2_000, bottom=(16,), top=(16,)), batch_size=64)
SMALL_ROWS = 16_000  # 12,800 to train: 200 batches
SMALL_OPTIONS = ["--rows", "16000", "--rows-per-table", "2000", "--bottom", "16", "--top", "16", "--batch-size", "64"]
SHORT = GeneratedLog(rows=2_000)  # what a run on every device takes


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Bits of the dense layers depend on the number of threads; one is also the fastest at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Outcome:
    """All numbers of a run."""

    losses: list[float]
    tables: dict[str, Tensor]
    dense: dict[str, Tensor]
    labels: Tensor
    probabilities: Tensor
    stats: tieredemb.CacheStats

    def assert_same_bits(self, other: Outcome) -> None:
        assert self.losses == other.losses
        assert torch.equal(self.probabilities, other.probabilities)
        for name, weight in self.dense.items():
            assert torch.equal(weight, other.dense[name]), name
        for name, weight in self.tables.items():
            assert torch.equal(weight, other.tables[name]), name


def outcome(config: TrainConfig, log: Log, saving: CheckpointConfig | None = None) -> Outcome:
    # as users run it: the device is the configured one alone, and none is torch's default
    usual = contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with usual, Trainer(config, log, saving) as trainer:
        trainer.run()
        labels, probabilities = trainer.predict()
        return Outcome(
            losses=[point.loss for point in trainer.progress.points],
            tables={name: weight.clone() for name, weight in trainer.table_weights().items()},
            dense={name: weight.clone() for name, weight in trainer.dense_layers.state_dict().items()},
            labels=labels,
            probabilities=probabilities,
            stats=trainer.progress.stats,
        )


def with_cache(config: TrainConfig, **changes: object) -> TrainConfig:
    return replace(config, cache=replace(config.cache, **changes))  # type: ignore[arg-type]


# --- the real log -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_log(data_dir: Path) -> CriteoFile:
    return CriteoFile(data_dir / "criteo" / "train_10000.tsv.xz")


@pytest.fixture(scope="module")
def real_run(real_log: CriteoFile) -> Outcome:
    torch.set_num_threads(1)
    return outcome(REAL, real_log)


def test_training_learns_the_real_log(real_run: Outcome) -> None:
    scores = report.score(real_run.labels, real_run.probabilities)
    assert len(real_run.labels) == 2_000
    assert scores.auc >= 0.70
    base = real_run.labels.mean()
    assert scores.log_loss < -(base * base.log() + (1 - base) * (1 - base).log()) - 0.03


def test_training_equals_plain_torch(real_run: Outcome, real_log: CriteoFile) -> None:
    plain = outcome(replace(REAL, reference=True), real_log)
    ours, theirs = (report.score(run.labels, run.probabilities) for run in (real_run, plain))
    assert ours.auc == pytest.approx(theirs.auc, abs=0.002)
    assert ours.log_loss == pytest.approx(theirs.log_loss, abs=0.002)
    # the first interval is the first batch: nothing but the rounding of sums may differ yet
    assert real_run.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert real_run.losses == pytest.approx(plain.losses, abs=0.02)


@pytest.mark.parametrize("variant", ["capacity 100 %", "file", "pmem", "LRU, 50 rows"])
def test_training_has_the_same_bits_on_the_real_log(
    real_run: Outcome, real_log: CriteoFile, tmp_path: Path, variant: str
) -> None:
    changed = {
        "capacity 100 %": lambda: with_cache(REAL, capacity=1.0),
        "file": lambda: with_cache(REAL, storage=tieredemb.File(tmp_path / "rows")),
        "pmem": lambda: with_cache(REAL, storage=tieredemb.Pmem(tmp_path)),
        "LRU, 50 rows": lambda: with_cache(REAL, capacity=50, policy=tieredemb.LRU()),
    }[variant]()
    try:
        other = outcome(changed, real_log)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    real_run.assert_same_bits(other)
    assert real_run.stats.evictions > 10_000, "the base run must evict, or this test compares nothing"
    assert (other.stats.evictions == 0) == (variant == "capacity 100 %")


# --- generated logs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_log() -> GeneratedLog:
    return GeneratedLog(rows=SMALL_ROWS)


@pytest.fixture(scope="module")
def small_run(small_log: GeneratedLog) -> Outcome:
    torch.set_num_threads(1)
    return outcome(SMALL, small_log)


def test_generated_log_can_be_learned() -> None:
    run = outcome(replace(SMALL, batch_size=256), GeneratedLog(rows=60_000))
    assert report.score(run.labels, run.probabilities).auc > 0.65


@pytest.mark.parametrize("variant", ["capacity 100 %", "file", "LRU, 50 rows", "prefetch"])
def test_training_has_the_same_bits_on_every_device(device: str, tmp_path: Path, variant: str) -> None:
    base = replace(SMALL, device=device)
    run = outcome(base, SHORT)
    changes: dict[str, dict[str, object]] = {
        "capacity 100 %": {"capacity": 1.0},
        "file": {"storage": tieredemb.File(tmp_path / "rows")},
        "LRU, 50 rows": {"capacity": 50, "policy": tieredemb.LRU()},
        "prefetch": {"prefetch": 3},
    }
    other = outcome(with_cache(base, **changes[variant]), SHORT)
    run.assert_same_bits(other)
    assert run.stats.evictions > 1_000, "the base run must evict, or this test compares nothing"


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_on_a_device_equals_plain_torch_there(place: str) -> None:
    """Without a default device, under which torch's sparse Adagrad mixes devices."""
    if place == "cuda":
        require_gpu()
    ours, plain = (outcome(replace(SMALL, device=place, reference=reference), SHORT) for reference in (False, True))
    assert ours.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert ours.losses == pytest.approx(plain.losses, abs=0.02)


@pytest.mark.parametrize("graph", [False, True])
def test_training_step_does_not_wait_for_the_gpu(gpu: None, graph: bool) -> None:
    config = replace(SMALL, device="cuda", graph=graph)
    with torch.device("cpu"), Trainer(config, SHORT) as training, trainer._deterministic():
        batches = list(training._batches(0, 640, 64))
        for batch in batches[:6]:  # compiles the kernels, captures the graph
            training._step(batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches[6:]:
                training._step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --- steps as CUDA graphs ---------------------------------------------------------------------------------------------

UNEVEN = replace(SMALL, batch_size=60, epochs=2)  # of 1,600 rows: 26 batches an epoch, and one of 40 samples


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("capacity", [50, 0.01, 1.0])
def test_graphs_have_the_bits_of_steps(device: str, capacity: float, prefetch: int) -> None:
    base = with_cache(replace(UNEVEN, device=device), capacity=capacity)
    graphs = with_cache(replace(base, graph=True), prefetch=prefetch)
    outcome(base, SHORT).assert_same_bits(outcome(graphs, SHORT))


Train = Callable[[Batch], Tensor]


def test_graphs_are_of_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay takes one shape: what remains of an epoch trains too, beside it."""
    sizes = []

    def graph_step(function: Train) -> Train:
        def step(batch: Batch) -> Tensor:
            sizes.append(len(batch.labels))
            return function(batch)

        return step

    monkeypatch.setattr(trainer, "graph_step", graph_step)
    graphs = outcome(replace(UNEVEN, graph=True), SHORT)
    assert sizes == 2 * 26 * [60]
    outcome(UNEVEN, SHORT).assert_same_bits(graphs)


def test_progress_counts_the_samples_of_smaller_batches_too() -> None:
    with Trainer(UNEVEN, SHORT) as training:
        training.run()
        progress = training.progress
        assert (progress.step, progress.samples, progress.points[-1].samples) == (2 * 27, 3_200, 3_200)


def test_checkpoint_of_graphs_has_the_number_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay leaves what is on the host as it is, the counters of torch's Adagrad among it."""

    def graph_step(function: Train) -> Train:
        def step(batch: Batch) -> Tensor:
            loss = function(batch)
            for state in function.__self__.optimizers[0].state.values():  # type: ignore[attr-defined]
                state["step"] -= 1
            return loss

        return step

    monkeypatch.setattr(trainer, "graph_step", graph_step)
    outcome(replace(SMALL, graph=True), SHORT, CheckpointConfig(directory=tmp_path))
    (dense,) = tmp_path.glob("dense-*.pt")
    states = torch.load(dense, weights_only=True)["optimizer"]["state"].values()
    assert [state["step"].item() for state in states] == len(states) * [25]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": tieredemb.File("rows")}, "rows of the file tier pass through the host.*drop --graph"),
        ({"storage": tieredemb.Pmem("pmem"), "capacity": 5}, "rows of the pmem tier pass through the host"),
        ({"storage": tieredemb.Pmem("pmem"), "capacity": "8GiB"}, "rows of the pmem tier pass through the host"),
        ({"reference": True}, "drop --graph or --reference"),
    ],
)
def test_graphs_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    own = {"reference": changes["reference"]} if "reference" in changes else {"cache": CacheConfig(**changes)}  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=message):
        replace(SMALL, graph=True, device="cuda", **own)  # type: ignore[arg-type]
    assert not replace(SMALL, graph=True, **own).captures  # type: ignore[arg-type]


def test_graphs_over_a_file_whose_rows_are_all_resident_are_allowed() -> None:
    everything = CacheConfig(storage=tieredemb.File("rows"), capacity=1.0)
    assert replace(SMALL, graph=True, device="cuda", cache=everything).captures


# --- what a run tells and keeps ---------------------------------------------------------------------------------------


def test_prediction_trains_nothing(device: str, small_log: GeneratedLog) -> None:
    with Trainer(replace(SMALL, device=device), small_log) as trainer:
        before = {name: weight.clone() for name, weight in trainer.table_weights().items()}
        first, second = trainer.predict(), trainer.predict()
        assert torch.equal(first[1], second[1])
        assert all(torch.equal(weight, before[name]) for name, weight in trainer.table_weights().items())


@pytest.mark.parametrize(("options", "plan"), [([], r"plan +\d"), (["--prefetch", "1"], "in a thread of its own")])
def test_profile_says_where_a_step_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], plan: str
) -> None:
    path = tmp_path / "trace.json"
    main(["train", *SMALL_OPTIONS, "--device", "cpu", "--quiet", "--profile", str(path), *options])
    told = capsys.readouterr().out
    for name in (
        "profile of 20 steps",
        "whole step",
        plan,
        r"lookup +\d",
        r"update of the rows +\d",
        "trace written to",
    ):
        assert re.search(name, told), name
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"tieredemb.lookup", "tieredemb.update", "ProfilerStep#16"} <= names


def test_profile_of_replays_goes_by_the_names_of_kernels() -> None:
    def event(key: str, device: str, us: float, *, annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            key=key,
            device_type=getattr(torch.autograd.DeviceType, device),
            is_user_annotation=annotation,
            cpu_time_total=us if device == "CPU" else 0.0,
            device_time_total=0.0,
            self_device_time_total=us if device == "CUDA" else 0.0,
        )

    events = [
        event("ProfilerStep*", "CPU", 600.0, annotation=True),
        event("ProfilerStep*", "CUDA", 9e9, annotation=True),
        event("aten::copy_", "CPU", 50.0),
        event("keys_find", "CUDA", 2000.0),
        event("missed_resolve", "CUDA", 4000.0),
        event("rows_swap", "CUDA", 10_000.0),
        event("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(int*)", "CUDA", 1000.0),
        event("bags_pool", "CUDA", 3000.0),
        event("segments_update", "CUDA", 5000.0),
        event("nvjet_tst_128x256", "CUDA", 20_000.0),
        event("Memcpy DtoD (Device -> Device)", "CUDA", 1000.0),
    ]
    times = profile.kernel_times(events, 2)  # type: ignore[arg-type]
    assert times.pop("whole step") == pytest.approx((0.3, 23.0))
    assert {name: gpu for name, (_, gpu) in times.items()} == pytest.approx(
        {
            "plan": 3.0,
            "moving rows": 5.0,
            "sort of occurrences": 0.5,
            "lookup": 1.5,
            "update of the rows": 2.5,
            "dense layers, the rest": 10.5,
        }
    )


def test_profile_of_replays_on_a_gpu(gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ["--device", "cuda", "--quiet", "--profile", str(path), "--graph", "--prefetch", "1"]
    told = run_profiled("examples.dlrm", "train", *SMALL_OPTIONS, *options)
    for name in profile.PARTS:
        assert re.search(rf"^{name} +(\d+\.\d+)$", told, re.MULTILINE), name
        assert float(re.search(rf"^{name} +(\d+\.\d+)$", told, re.MULTILINE)[1]) > 0, name  # type: ignore[index]
    assert "in a thread of its own" not in told


def test_profile_of_a_run_that_is_too_short_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "train",
            *SMALL_OPTIONS,
            "--rows",
            "200",
            "--device",
            "cpu",
            "--quiet",
            "--profile",
            str(tmp_path / "trace.json"),
        ]
    )
    assert "no profile: the run has fewer than 16 steps" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_training_sees_no_held_out_row(small_log: GeneratedLog) -> None:
    class Recorder(GeneratedLog):
        def _blocks(self, start: int, stop: int):  # type: ignore[no-untyped-def]
            ranges.append((start, stop))
            return super()._blocks(start, stop)

    ranges: list[tuple[int, int]] = []
    with Trainer(replace(SMALL, epochs=2), Recorder(rows=1_000)) as trainer:
        trainer.run()
        assert ranges == [(0, 800), (0, 800)]
        trainer.predict()
        assert ranges[2:] == [(800, 1_000)]


def kill_when(directory: Path, batches: int, *options: str) -> None:
    """Trains in a process of its own and kills it once it saved a checkpoint of at least `batches` batches."""
    command = ["train", "--quiet", "--threads", "1", "--device", "cpu", *SMALL_OPTIONS]
    saving = ["--checkpoint", str(directory), "--checkpoint-every", "10", *options]
    with forks.Script(forks.run_module("examples.dlrm"), *command, *saving, cwd=REPOSITORY) as process:
        while process.poll() is None and _saved_batches(directory) < batches:
            time.sleep(0.002)
    assert process.returncode == -signal.SIGKILL, "it must die by our hand, not end by itself"


def _saved_batches(directory: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in directory.glob("dense-*.pt")), default=0)


def test_training_survives_kills(tmp_path: Path, small_run: Outcome, small_log: GeneratedLog) -> None:
    directory = tmp_path / "run"
    kill_when(directory, 30)
    kill_when(directory, 90, "--resume", "--tier", "file", "--tier-path", str(tmp_path / "rows"), "--prefetch", "2")
    assert 90 <= _saved_batches(directory) < 200
    resumed = outcome(SMALL, small_log, CheckpointConfig(directory=directory, every=37, resume=True))
    small_run.assert_same_bits(resumed)
    assert len(list(directory.glob("dense-*"))) == 1, "dense files that no checkpoint names must be deleted"


class CrashError(Exception):
    """Stands for a kill at a chosen line."""


@pytest.mark.parametrize("moment", ["before the tables", "after the tables"])
def test_kill_between_the_files_pairs_nothing_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_run: Outcome, small_log: GeneratedLog, moment: str
) -> None:
    save_tables = tieredemb.TieredEmbeddingBagCollection.save_checkpoint
    saves = 0

    def crashing(self: tieredemb.TieredEmbeddingBagCollection, *args: object, **kwargs: object) -> None:
        nonlocal saves
        saves += 1
        if saves < 3 or moment == "after the tables":
            save_tables(self, *args, **kwargs)  # type: ignore[arg-type]
        if saves == 3:
            raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(tieredemb.TieredEmbeddingBagCollection, "save_checkpoint", crashing)
        with pytest.raises(CrashError):
            outcome(SMALL, small_log, CheckpointConfig(directory=tmp_path, every=20))
    assert len(list(tmp_path.glob("dense-*.pt"))) == 2, "old and new dense file: the tables say which one counts"
    with Trainer(SMALL, small_log, CheckpointConfig(directory=tmp_path, resume=True)) as trainer:
        assert trainer.progress.step == (40 if moment == "before the tables" else 60)
    resumed = outcome(SMALL, small_log, CheckpointConfig(directory=tmp_path, resume=True))
    small_run.assert_same_bits(resumed)


@pytest.mark.parametrize("graph", [False, True])
def test_finished_run_resumes_into_more_epochs(device: str, tmp_path: Path, graph: bool) -> None:
    twice = outcome(replace(SMALL, device=device, epochs=2), SHORT)
    once = with_cache(replace(SMALL, device=device, graph=graph), prefetch=int(graph))
    outcome(once, SHORT, CheckpointConfig(directory=tmp_path, every=10))
    extended = outcome(
        with_cache(replace(once, epochs=2), capacity=0.5), SHORT, CheckpointConfig(directory=tmp_path, resume=True)
    )
    twice.assert_same_bits(extended)


def test_checkpoint_is_refused_where_it_does_not_fit(tmp_path: Path) -> None:
    log = GeneratedLog(rows=1_000)
    saving = CheckpointConfig(directory=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*run; start the run without --resume"):
        Trainer(SMALL, log, replace(saving, resume=True))
    outcome(SMALL, log, saving)
    with pytest.raises(CheckpointError, match="holds a checkpoint already; pass --resume"):
        Trainer(SMALL, log, saving)
    with pytest.raises(CheckpointError, match=r"another run .*batch_size: 64 there, 32 now"):
        Trainer(replace(SMALL, batch_size=32), log, replace(saving, resume=True))
    rows = replace(SMALL.model, dtype="bf16", rounding="stochastic")
    with pytest.raises(CheckpointError, match="dtype"):
        Trainer(replace(SMALL, model=rows), log, replace(saving, resume=True))
    with pytest.raises(CheckpointError, match=r"another run .*log: "):
        Trainer(SMALL, GeneratedLog(rows=1_000, seed=1), replace(saving, resume=True))
    with pytest.raises(UnsupportedError, match="the reference model keeps no checkpoints"):
        Trainer(replace(SMALL, reference=True), log, saving)


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    log = GeneratedLog(rows=1_000)
    outcome(SMALL, log, CheckpointConfig(directory=tmp_path))
    (dense,) = tmp_path.glob("dense-*.pt")
    content = bytearray(dense.read_bytes())
    content[len(content) // 2] ^= 1
    dense.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"dense-.*\.pt is damaged"):
        Trainer(SMALL, log, CheckpointConfig(directory=tmp_path, resume=True))
    dense.unlink()
    with pytest.raises(CheckpointError, match=r"dense-.*\.pt, which the checkpoint names, cannot be read"):
        Trainer(SMALL, log, CheckpointConfig(directory=tmp_path, resume=True))


def test_checkpoint_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    log = GeneratedLog(rows=1_000)
    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        outcome(SMALL, log, CheckpointConfig(directory=tmp_path, every=5))
    assert list(tmp_path.glob("*.pt")) == []
    assert not checkpoint.exists(tmp_path)


def test_log_too_short_to_split_is_refused() -> None:
    with pytest.raises(LogError, match="leaves 1 rows to train and 0 to test"):
        Trainer(SMALL, GeneratedLog(rows=1))


# --- the command line -------------------------------------------------------------------------------------------------


def test_command_trains_reports_and_plots(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "log.tsv.gz", tmp_path / "plots" / "run.png"
    assert main(["generate", "--rows", "3000", "--out", str(data)]) == 0
    small = ["--rows-per-table", "2000", "--capacity", "5%", "--threads", "1", "--device", device]
    tier, place = ("host", "the CPU") if device == "cpu" else ("unified", torch.cuda.get_device_name())
    assert main(["train", "--data", str(data), *small, "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    for name in ("train loss", "test AUC", "test log loss"):
        assert name in shown.out
    assert f"2,400 rows to train, 600 to test; on {place}, tier {tier}, capacity 5 % of the rows" in shown.out
    assert re.search(rf"samples/s +[\d,]+ on {re.escape(place)}", shown.out)
    assert "samples/s, loss" in shown.err
    assert "hit rate" in shown.err
    assert picture.read_bytes().startswith(b"\x89PNG")


def _printed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert main(["train", *SMALL_OPTIONS, "--device", "cpu", "--threads", "1", "--rows", "4000", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_command_ends_with_memory_hit_rate_and_the_distance_from_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--quiet", "--compare", "2000", "--plot", str(tmp_path / "run.png")]
    memory, hits, apart = _printed(capsys, *options)[-3:]
    assert re.fullmatch(
        r"memory +[\d.]+ KiB of cache for [\d.]+ MiB of tables with optimizer state \(.* %\), in host", memory
    )
    assert re.fullmatch(r"hit rate +[1-9][\d.]* % of lookups, [1-9][\d.]* % in the last tenth", hits)
    found = re.search(r"the first ([\d,]+) samples (0\.\d+), of plain torch (0\.\d+); .* by (0\.\d+) at most", apart)
    assert found is not None
    assert 1000 < int(found[1].replace(",", "")) <= 2000
    assert float(found[2]) == pytest.approx(float(found[3]), abs=2e-4)
    assert float(found[4]) < 1e-3


def test_command_prints_allocations_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = _printed(capsys, "--quiet", "--compare", "0")
    verbose = _printed(capsys, "--quiet", "--compare", "0", "--verbose")
    assert not any("plan_scratch" in line or line.startswith("moved") for line in quiet)
    assert sum("plan_scratch" in line for line in verbose) == 1
    assert sum(line.startswith("moved ") for line in verbose) == 2
    assert not any("plain torch" in line for line in quiet + verbose)


@pytest.mark.parametrize("options", [["--optimizer", "row-wise-adagrad"], ["--dtype", "bf16"]])
def test_command_says_why_it_compares_with_a_stored_figure(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    last = _printed(capsys, "--quiet", *options)[-1]
    assert re.search(
        r"not measured here \(.+\); on the first 10,000 rows of Criteo's log .* 0.7377, of plain torch 0.7378", last
    )


def test_bar_is_there_before_the_log_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", str(tmp_path / "no.tsv")]) == 1
    shown = capsys.readouterr().err
    assert shown.index("preparing log and tables") < shown.index("error: ")


def test_rate_leaves_out_the_interval_that_compiles() -> None:
    """A first interval of seconds, as where kernels are compiled, does not count."""
    with Trainer(SMALL, GeneratedLog(rows=4_000)) as run:
        slow = iter([3.0])
        run.run(on_step=lambda: time.sleep(next(slow, 0.0)))
        assert run.samples_per_second > 2 * run.progress.samples / run.progress.seconds


def test_command_says_that_the_cpu_has_no_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", *SMALL_OPTIONS, "--rows", "400", "--device", "cpu", "--threads", "1", "--quiet"]
    told = []
    for options in ([], ["--graph", "--prefetch", "1"]):
        assert main([*command, *options]) == 0
        told.append(capsys.readouterr().out)
    plain, graph = told
    line = "--graph: on the CPU there is nothing to capture, and steps run as without it"
    assert (plain.count(line), graph.count(line)) == (0, 1)
    assert re.findall(r"^t.*(?:loss|AUC).*$", graph, re.MULTILINE) == re.findall(
        r"^t.*(?:loss|AUC).*$", plain, re.MULTILINE
    )
    assert "test AUC" in graph


ERRORS = {
    "train --data absent.tsv": "there is no file absent.tsv",
    "train --resume": "--resume needs --checkpoint",
    "train --rows 100 --tier file": "--tier file needs --tier-path: a file to create",
    "train --rows 100 --capacity 0.5x": "capacity must be rows",
    "train --rows 100 --test-share 1": "test_share must lie between 0 and 1",
    "train --rows 100 --reference --optimizer rowwise-adagrad": "torch has no RowWiseAdagrad",
    "train --rows 0": "at least 1 row",
    "generate --out absent/log.tsv": "absent/log.tsv",
    "fit absent.txt": "absent.txt",
}


@pytest.mark.parametrize("command", ERRORS)
def test_command_explains_errors_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), *(["--quiet"] if command.startswith("train") else [])]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert ERRORS[command] in last


@pytest.mark.parametrize(("module", "package"), [("tqdm", "tqdm"), ("sklearn", "scikit-learn")])
def test_command_names_a_missing_library(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["train", "--rows", "100"]) == 1
    assert f"pip install {package}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_command_refuses_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--rows", "100", "--device", "cuda"]) == 1
    assert re.search(r"error: device 'cuda' was given, but torch .* finds no GPU", capsys.readouterr().err)


def test_command_says_why_it_leaves_a_gpu_unused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.cupy.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["train", *SMALL_OPTIONS, "--rows", "300", "--threads", "1", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "training on the CPU: the GPU path needs CuPy" in shown.err
    assert "pip install 'tieredemb[cuda" in shown.err
    assert "on the CPU, tier host" in shown.out


def test_processes_without_a_gpu_each_are_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(command, "check_device", lambda device: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert command._device("auto") == command._device("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert command._device("auto") == "cpu"
    assert "training on the CPU: 3 processes need a GPU each, and here are 2" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"3 processes need a GPU each.*--nproc-per-node.*--device cpu"):
        command._device("cuda")


def test_configs_refuse_nonsense() -> None:
    for wrong in (
        lambda: ModelConfig(rows_per_table=1),
        lambda: ModelConfig(embedding_dim=0),
        lambda: ModelConfig(top=(0,)),
        lambda: TrainConfig(batch_size=0),
        lambda: TrainConfig(dense_lr=float("nan")),
        lambda: CheckpointConfig(directory=Path(), every=0),
    ):
        with pytest.raises(ConfigError):
            wrong()
    assert CacheConfig().capacity == 0.01


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rows_of_16_bits_resume_with_the_same_bits(dtype: str, tmp_path: Path) -> None:
    rows = replace(SMALL.model, dtype=dtype, rounding="stochastic")
    config, log = replace(SMALL, model=rows), GeneratedLog(rows=1_000)
    outcome(config, log, CheckpointConfig(directory=tmp_path))
    longer = replace(config, epochs=config.epochs + 1)
    resumed = outcome(longer, log, CheckpointConfig(directory=tmp_path, resume=True))
    outcome(longer, log).assert_same_bits(resumed)
    assert {each.dtype for each in resumed.tables.values()} == {DTYPES[dtype]}
