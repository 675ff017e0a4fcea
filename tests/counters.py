"""What tests count of a run: replays of graphs, forwards that found their plan, and rows that came into a cache."""

from __future__ import annotations

import torch

from tieredemb.cache.stats import CacheStats

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
