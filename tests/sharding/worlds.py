"""Worlds of processes, which run functions for tests: started once, as a process takes seconds to start. They are on
gloo; where NCCL takes them (`has_gpus_for`), on NCCL, too, else those of a world on a GPU share it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

from forks import call

START = multiprocessing.get_context("spawn")
WAIT_S = {"cpu": 30, "cuda": 120}  # for each other; on a GPU the first ones wait for compilers
ANSWER_S = 4  # times as long a test waits for them: on a busy machine compilers take longer


def has_gpus_for(ranks):
    """Whether NCCL takes as many ranks here: where they have a GPU each, and from NCCL 2.30 on where a variable of its
    own lets several share one."""
    import torch

    is_shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return torch.cuda.device_count() >= (1 if is_shared else ranks)


def need_gpus_for(ranks):
    """Skips a test where NCCL does not take as many ranks."""
    import pytest
    import torch

    if not has_gpus_for(ranks):
        pytest.skip(f"{ranks} ranks need as many GPUs, here are {torch.cuda.device_count()}")


def on_cpu(value):
    """The same with its tensors in host memory, as a process on a GPU is not to open the memory of another."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {name: on_cpu(part) for name, part in value.items()}
    return type(value)(map(on_cpu, value)) if type(value) in (list, tuple) else value


def spawned(function, *args):
    """What `forks.call` returns, of a process that imports all by itself: CUDA takes no fork."""
    ours, theirs = START.Pipe()
    process = START.Process(target=function, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def serve(rank, size, meeting, device, pipe):
    """A process of a world: calls the functions that it is sent, until it receives no more."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "gloo"
    if device != "cpu":
        if has_gpus_for(size):
            torch.cuda.set_device(rank % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        torch.set_default_device(device)
        torch.zeros(1)
    where = f"file://{meeting}"  # a port that is free now may be another world's in a moment
    dist.init_process_group(backend, where, rank=rank, world_size=size, timeout=timedelta(seconds=WAIT_S[device]))
    pipe.send(("ready", None))
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            try:
                pipe.send(("returned", on_cpu(function(rank, size, *args))))
            except BaseException as error:
                pipe.send(("raised", (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class World:
    """`size` processes, each a rank, whose default device is `device` · `wait_s`: how long one
    may take to answer · `is_lost`: whether one has not, so that the next answers would be none, or those of calls
    before."""

    def __init__(self, size, device="cpu", wait_s=None):
        self.size, self.device = size, device
        self.wait_s, self.is_lost = wait_s or ANSWER_S * WAIT_S[device], True
        self._meeting = tempfile.TemporaryDirectory(prefix="tieredemb-world-")
        meeting = os.path.join(self._meeting.name, "store")
        self.pipes, self.processes = [], []
        for rank in range(size):
            process, pipe = (call if device == "cpu" else spawned)(serve, rank, size, meeting, device)
            self.pipes.append(pipe)
            self.processes.append(process)
        self._answers()

    def call(self, function, *args):
        """(kind, value) of each rank, of `function(rank, size, *args)`: "returned" and what, or "raised" and the
        error's name, text and traceback."""
        self.is_lost = True  # until all have answered
        for pipe in self.pipes:
            pipe.send((function, on_cpu(args)))
        return self._answers()

    def run(self, function, *args):
        """What it returns on each rank. An error of a rank is one of the test."""
        answers = self.call(function, *args)
        for rank, (kind, value) in enumerate(answers):
            assert kind == "returned", f"rank {rank} of {self.size}: {value[2]}"
        return [value for _, value in answers]

    def _answers(self):
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(self.wait_s), f"rank {rank} of {self.size} does not answer within {self.wait_s} s"
            try:
                answers.append(pipe.recv())
            except (EOFError, OSError):
                raise AssertionError(f"rank {rank} of {self.size} has ended") from None
        self.is_lost = False
        return answers

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0 if self.is_lost else 10)
            process.kill()
            process.join()
        self._meeting.cleanup()


def kept(device="cpu", wait_s=None):
    """What a fixture `worlds` yields, and ends: worlds by their size, each started when a test first asks for it, and
    anew after one that was lost, so that one test that hangs is one that fails."""
    started = {}

    def world(size):
        if size in started and started[size].is_lost:
            started.pop(size).close()
        if size not in started:
            started[size] = World(size, device, wait_s=wait_s)
        return started[size]

    yield world
    for each in started.values():
        each.close()
