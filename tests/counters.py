"""What tests count of a run: replays of graphs, forwards that found their plan, rows that came into a cache, and the
Python calls of steps."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import sys
import threading
import time

import torch

import tieredemb
from tieredemb.cache.stats import CacheStats

PACKAGE = os.path.dirname(tieredemb.__file__) + os.sep
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # calls in Python 3.11, and none from 3.12 on
QUIET_SECONDS = 0.02  # without a call: another thread has done what a step gave it
WARM_UP, COUNTED = 6, 9  # steps
SCORE_BYTES = 4  # all that is written of a row that leaves clean


def arrivals(keys, filled, touched, evictions, written, row_bytes):
    """What a cache counts of a batch's rows. `keys`: looked up · `filled`: those of them that came · `touched`: all
    that cold storage knows · `evictions`: rows that left for them · `written`: how many of these were dirty."""
    return CacheStats(
        unique=len(set(keys)),
        rows_filled=len(filled),
        bytes_filled=len(filled & touched) * row_bytes,
        evictions=evictions,
        rows_written_back=written,
        bytes_written_back=written * row_bytes + (evictions - written) * SCORE_BYTES,
    )


class Replays:
    """Counts the replays of CUDA graphs."""

    def __init__(self, monkeypatch):
        self.count = 0
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph):
            self.count += 1
            replay(graph)

        if torch.cuda.is_available():
            monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)

    def check(self, device, least):
        assert self.count >= (least if device == "cuda" else 0), f"{self.count} replays"


class Plans:
    """Counts the forwards that found their plan."""

    def __init__(self, module, monkeypatch):
        self.found = self.forwards = 0
        take = module.engine.planned.take

        def counted(tables, given):
            call = take(tables, given)
            self.found += call is not None
            return call

        def forward(*_):
            self.forwards += 1

        monkeypatch.setattr(module.engine.planned, "take", counted)
        module.register_forward_pre_hook(forward)

    @property
    def missed(self):
        return self.forwards - self.found


class Calls:
    """The files of the package whose functions are called inside, in order: by this thread, and by those that start
    inside. Nothing is collected as garbage meanwhile, whose finalizers would count too."""

    def __init__(self):
        self.files = []

    def __enter__(self):
        gc.collect()
        gc.disable()
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()

    def _hear(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            self.files.append(code.co_filename)

    def wait_until_quiet(self):
        """Until no thread has called anything for a moment."""
        before = -1
        while before != len(self.files):
            before = len(self.files)
            time.sleep(QUIET_SECONDS)

    @property
    def crossings(self):
        return sum(one != other for one, other in itertools.pairwise(self.files))


def calls_of_a_step(path):
    """Python calls of one warm step of a `Path` of benchmarks/warm_steps.py, and in how many files they are. Each is
    the median of several steps: where the machine is busy, a thread may do something for one step in the next."""
    with path.entered("cpu") as step:
        step()  # what is imported and compiled for the first one takes far longer where its calls are counted
    counts = []
    with Calls() as calls, path.entered("cpu") as step, torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARM_UP + COUNTED):
            before = len(calls.files)
            step()
            calls.wait_until_quiet()
            of_step = calls.files[before:]
            counts.append((len(of_step), len(set(of_step))))
    return tuple(map(statistics.median, zip(*counts[WARM_UP:], strict=True)))
