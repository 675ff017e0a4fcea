"""The example in several processes: what one process trains, within rounding of the dense layers, and after a kill."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2]))  # the examples are no part of the installed package

from sharding.ranks import calls_of
from sharding.worlds import World, need_gpus_for, on_cpu

from examples.dlrm import trainer as training
from examples.dlrm.__main__ import main
from examples.dlrm.config import CheckpointConfig, ModelConfig, TrainConfig
from examples.dlrm.processes import Processes
from examples.dlrm.synthetic import GeneratedLog
from examples.dlrm.trainer import Trainer
from tieredemb import SGD

REPOSITORY = Path(__file__).parents[2]
# SGD: the first step of Adagrad makes rounding errors of gradients that are nearly zero as large as any step
SMALL = TrainConfig(
    model=ModelConfig(rows_per_table=300, bottom=(16,), top=(16,)), batch_size=48, optimizer=SGD(lr=0.02), dense_lr=1e-3
)
LOG = GeneratedLog(rows=1_240)  # 20 batches of 48 and one of 1 to train: some processes have no row of it
TRAINED = 961
SMALL_OPTIONS = ("--rows", "1240", "--rows-per-table", "300", "--quiet")
FEW_POINTS = 5  # an epoch: a step that comes right behind the reading of counters is not captured
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # some steps of fp32 sums in another order


def config_of(prefetch=0):
    config = replace(SMALL, test_share=1 - TRAINED / len(LOG))
    return replace(config, cache=replace(config.cache, prefetch=prefetch))


def trains(rank, size, config, saving=None, stop=None):
    """All numbers of a run, with the tables on rank 0; None of one that ends after `stop` steps."""
    torch.set_num_threads(1)
    steps = []
    with Trainer(config, LOG, saving, Processes(rank, size)) as trainer:
        assert trainer.train_rows == TRAINED

        def step():
            steps.append(None)
            if len(steps) == stop:
                raise InterruptedError

        try:
            trainer.run(on_step=step)
        except InterruptedError:
            return None
        labels, probabilities = trainer.predict()
        weights = trainer.collection.state_dict()
        return {
            "losses": torch.tensor([point.loss for point in trainer.progress.points], dtype=torch.float64),
            "tables": {name: weight for name, weight in weights.items() if weight is not None},
            "dense": dict(trainer.dense_layers.state_dict()),
            "labels": labels.sort().values,
            "probabilities": probabilities.sort().values,
            "lookups": torch.tensor(trainer.progress.stats.lookups),
        }


def check_close(found, expected):
    assert torch.equal(found["labels"], expected["labels"])
    assert torch.equal(found["lookups"], expected["lookups"])
    for name in ("losses", "probabilities"):
        torch.testing.assert_close(found[name], expected[name], **CLOSE)
    for kind in ("tables", "dense"):
        assert found[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            torch.testing.assert_close(found[kind][name], value, **CLOSE)


def check_same(found, expected):
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert all(torch.equal(found[name][key], each) for key, each in value.items()), name


@pytest.fixture(scope="module")
def trained(worlds):
    """What each of `size` processes has of a run, which is made once."""
    return functools.cache(lambda size, prefetch=0: worlds(size).run(trains, config_of(prefetch)))


@functools.cache
def trained_alone():
    return trains(0, 1, config_of())


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_train_what_one_does(trained, size, prefetch):
    expected = trained_alone()
    assert len(expected["losses"]) == 21
    answers = trained(size, prefetch)
    check_close(answers[0], expected)
    for other in answers[1:]:
        for name in ("losses", "labels", "probabilities", "lookups", "dense"):
            check_same({name: other[name]}, {name: answers[0][name]})


@pytest.mark.parametrize(("first", "later"), [(2, 1), (2, 2), (2, 3), (3, 3)])
def test_a_run_that_ended_goes_on_in_any_number_of_processes(worlds, trained, tmp_path, first, later):
    whole = trained(first)[0]
    saving = CheckpointConfig(directory=tmp_path / "run", every=8)
    assert worlds(first).run(trains, config_of(), saving, 11) == [None] * first
    found = worlds(later).run(trains, config_of(), replace(saving, resume=True))[0]
    (check_same if later == first else check_close)(found, whole)


@pytest.fixture(scope="module")
def gpus():
    """Two processes with a GPU each."""
    need_gpus_for(2)
    started = World(2, "cuda")
    yield started
    started.close()


def trains_on_a_gpu(rank, size, config):
    """As `trains`, where what is made without a device lies on the CPU; and how many steps were replays."""
    torch.set_default_device("cpu")
    before, training.POINTS = training.POINTS, FEW_POINTS
    with calls_of(torch.cuda.CUDAGraph, "replay") as replays:
        found = trains(rank, size, config)
    torch.set_default_device("cuda")
    training.POINTS = before
    return found, len(replays)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["steps", "graphs"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_several_gpus_train_what_one_does(gpus, prefetch, graph, monkeypatch):
    monkeypatch.setattr(training, "POINTS", FEW_POINTS)
    config = replace(config_of(prefetch), device="cuda", batch_size=24, epochs=2)  # a capture takes some 16 steps
    expected = on_cpu(trains(0, 1, config))
    (first, replays), (second, others) = gpus.run(trains_on_a_gpu, replace(config, graph=graph))
    if graph and prefetch:  # plans that are given up before the capture, and the next epoch, are counted too
        assert first["lookups"] >= expected["lookups"]
        expected["lookups"] = first["lookups"]
    check_close(first, expected)
    for name in ("losses", "labels", "probabilities", "lookups", "dense"):
        check_same({name: second[name]}, {name: first[name]})
    assert replays == others
    assert (replays > 3) == graph


def test_torchrun_starts_it_and_one_process_talks():
    command = ["--nproc-per-node", "2", "-m", "examples.dlrm", "train", *SMALL_OPTIONS]
    done = forks.torchrun(*command, "--prefetch", "1", "--device", "cpu", cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "on the CPU in 2 processes" in done.stdout
    assert done.stdout.count("\ntest AUC") == done.stdout.count("\nhit rate") == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two processes need a GPU each")
def test_torchrun_gives_each_process_a_gpu():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "examples.dlrm", "train", *SMALL_OPTIONS, "--prefetch", "1", "--graph"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search("on NVIDIA .* in 2 processes, .* a CUDA graph a step", done.stdout)
    assert done.stdout.count("\ntest AUC") == 1


def trains_the_reference(rank, size):
    """The exit status of the command, and what it says, in a process that torchrun would have started like this."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        for name, value in (("TORCHELASTIC_RUN_ID", 1), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)):
            patch.setenv(name, str(value))
        patch.setattr(dist, "init_process_group", lambda backend: None)  # as the world has done
        patch.setattr(dist, "destroy_process_group", lambda: None)
        return main(["train", *SMALL_OPTIONS, "--reference", "--device", "cpu"]), said.getvalue()


def test_what_several_processes_cannot_do_is_said(worlds):
    for status, said in worlds(2).run(trains_the_reference):
        assert status == 1
        assert said == "error: the reference trains in one process; start it without torchrun\n"
