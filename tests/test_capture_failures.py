"""Captures that fail: all works afterwards."""

from __future__ import annotations

import gc

import pytest
import torch
from devices import assert_same_bits

from tieredemb.kernels.captures import Capture


def test_graphs_captured_before_draw_from_the_default_generator_after_a_capture_that_failed(gpu):
    """A generator put in its place would not be theirs."""
    runs = []
    for fails in (False, True):
        graph, out = torch.cuda.CUDAGraph(), torch.zeros(8)
        with torch.cuda.graph(graph):
            out.copy_(torch.rand(8))
        torch.manual_seed(7)
        seen = []
        for number in range(4):
            if fails and number == 2:
                with pytest.raises(RuntimeError), Capture(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
                    torch.rand(3).sum().item()
            graph.replay()
            seen += [out.clone(), torch.rand(8)]
        runs.append(seen)
    assert_same_bits(*runs)


def test_what_follows_a_capture_that_failed_comes_behind_its_recovery(gpu, monkeypatch):
    """Which sets what the graphs that were captured before draw their random numbers from."""
    release, stream = Capture._release_pool, torch.cuda.Stream()
    monkeypatch.setattr(Capture, "_release_pool", lambda each: (release(each), torch.cuda._sleep(10**8)))  # 50 ms
    with pytest.raises(RuntimeError), Capture(torch.cuda.CUDAGraph(), stream):
        torch.rand(3).sum().item()
    torch.cuda.current_stream().synchronize()
    assert stream.query()


def test_memory_of_captures_that_failed_is_given_back(gpu):
    def fail():
        with pytest.raises(RuntimeError), Capture(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
            torch.zeros(1 << 26).sum().item()  # 256 MiB

    reserved = []
    for _ in range(3):
        fail()
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[0] < 1 << 26
