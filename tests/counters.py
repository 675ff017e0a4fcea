"""What tests count of a run: replays of graphs, and forwards that found their plan."""

from __future__ import annotations

import torch


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
        assert self.count >= (least if device == "cuda" else 0)


class Plans:
    """Counts the forwards that found their plan."""

    def __init__(self, module, monkeypatch):
        self.found = self.missed = 0
        take = module.engine.planned.take

        def counted(given):
            call = take(given)
            self.found += call is not None
            self.missed += call is None
            return call

        monkeypatch.setattr(module.engine.planned, "take", counted)
