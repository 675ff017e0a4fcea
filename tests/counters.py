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
        assert self.count >= (least if device == "cuda" else 0), f"{self.count} replays"


class Plans:
    """Counts the forwards that found their plan."""

    def __init__(self, module, monkeypatch):
        self.found = self.forwards = 0
        take, begin = module.engine.planned.take, module.engine.begin

        def counted(tables, given):
            call = take(tables, given)
            self.found += call is not None
            return call

        def begun(*args, **keywords):
            self.forwards += 1
            return begin(*args, **keywords)

        monkeypatch.setattr(module.engine.planned, "take", counted)
        monkeypatch.setattr(module.engine, "begin", begun)

    @property
    def missed(self):
        return self.forwards - self.found
