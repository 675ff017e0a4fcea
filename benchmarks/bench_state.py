"""Tables moved as a whole: opened, set, copied, saved and loaded, each beside what torch needs for as many bytes.

Sized for two cores; `--state-gib 25` is for a host with a GPU, where tables are in unified memory. Checkpoints and
torch's files go to `--state-directory`, a tmpfs by default, so that no disk is measured.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import pytest
import torch

import tieredemb
from benchmarks.conftest import Save
from benchmarks.machine import cores
from benchmarks.record import Record, at_least, at_most, measured
from benchmarks.timing import SETTLE_SECONDS, Interleaved, Quantiles
from tieredemb.config import OptimizerConfig

WIDTH = 64
MANY_CORES = 16  # from there on bars are in GB/s, below they are ratios to torch
OPEN_SECONDS = 2.0
GB = 1e9
COPY, CLONE, SAVE, LOAD = "copy_", "clone", "torch.save + fsync", "torch.load + load_state_dict"


class Work(NamedTuple):
    """What tieredemb does: its `peer`, the most of whose time it may take on few cores (None: no bar), and the least
    GB/s on many."""

    peer: str
    ratio: float | None
    least: float


OPEN, SET, AGAIN, STATE_DICT = "open", "load_state_dict", "load_state_dict again", "state_dict"
SAVED, LOADED = "save_checkpoint", "load_checkpoint"
WORKS = {
    SET: Work(CLONE, 2.5, 12),
    AGAIN: Work(COPY, None, 12),
    STATE_DICT: Work(CLONE, None, 10),
    SAVED: Work(SAVE, 1.0, 4),
    LOADED: Work(LOAD, 1.0, 4),
}


def bench_state(keep: Save, quick: bool, pytestconfig: pytest.Config) -> None:
    size_bytes = int(pytestconfig.getoption("--state-gib") * 2**30) if not quick else 16 << 20
    directory = Path(pytestconfig.getoption("--state-directory")) / f"bench_state-{os.getpid()}"
    rounds = 5 if not quick else 2
    directory.mkdir()
    try:
        records = [
            record
            for optimizer in (tieredemb.SGD(lr=0.1), tieredemb.Adagrad(lr=0.1))
            for record in _records(_Tables(optimizer, size_bytes, directory), rounds)
        ]
    finally:
        shutil.rmtree(directory)
    keep(
        "state",
        f"Tables of {size_bytes / 2**30:.3g} GiB, weights and optimizer state together, × {WIDTH} fp32, of which a "
        f"hundredth is hot, in {_storage()}. A round opens new tables, and torch does as much beside each call, by all "
        f"cores where it can; who comes first changes from round to round, and files go before others are written. "
        f"One round of warm-up, then {rounds}. Files: on {pytestconfig.getoption('--state-directory')}. Ratio: median "
        f"over the rounds of time / torch's in the same round.",
        records,
    )


def _storage() -> str:
    return "UnifiedMemory" if torch.cuda.is_available() else "HostMemory"


class _Tables:
    """A table of so many bytes, what torch keeps of it, and the seconds of what was done with them."""

    def __init__(self, optimizer: OptimizerConfig, size_bytes: int, directory: Path) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        row_bytes = 4 * (WIDTH + sum(each.width(WIDTH) for each in optimizer.tensors))
        self.rows = size_bytes // row_bytes
        self.bytes_of = dict.fromkeys((OPEN, SAVED, LOADED), self.rows * row_bytes)
        self.checkpoint, self.file = directory / "checkpoint", directory / "torch.pt"
        self.weight = torch.rand(self.rows, WIDTH)
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[[], object]) -> Any:
        sleep(SETTLE_SECONDS)
        start = perf_counter()
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.setdefault(name, []).append(perf_counter() - start)
        return result

    def round(self, number: int) -> None:
        module = self.timed(OPEN, self._open)
        self._set(number, module)
        copied = self.timed(STATE_DICT, module.state_dict)
        torch.testing.assert_close(copied["weight"], self.weight, rtol=0, atol=0)
        del copied
        self._save_both(number, module)
        self._both(
            number,
            lambda: self.timed(LOADED, lambda: module.load_checkpoint(self.checkpoint)),
            lambda: self.timed(LOAD, lambda: self._load(module)),
        )
        torch.testing.assert_close(module.state_dict()["weight"], self.weight, rtol=0, atol=0)
        self._remove()
        module.close()

    def _set(self, number: int, module: tieredemb.TieredEmbeddingBag) -> None:
        state, target = {"weight": self.weight}, torch.zeros_like(self.weight)
        self._both(
            number,
            lambda: self.timed(SET, lambda: module.load_state_dict(state)),
            lambda: self.timed(CLONE, self.weight.clone),
        )
        self._both(
            number,
            lambda: self.timed(AGAIN, lambda: module.load_state_dict(state)),
            lambda: self.timed(COPY, lambda: target.copy_(self.weight)),
        )

    def _save_both(self, number: int, module: tieredemb.TieredEmbeddingBag) -> None:
        """Each is timed where the files of the other went a moment ago, and then both are there."""
        state = {"module": {"weight": self.weight}, "optimizer": module.fused_optimizer.state_dict()}
        self._both(
            number,
            lambda: self.timed(SAVED, lambda: module.save_checkpoint(self.checkpoint)),
            lambda: self.timed(SAVE, lambda: self._save(state)),
            before=self._remove,
        )
        self._remove()
        module.save_checkpoint(self.checkpoint)
        self._save(state)

    def _both(self, number: int, *calls: Callable[[], object], before: Callable[[], object] = lambda: None) -> None:
        for call in calls if number % 2 else reversed(calls):
            before()
            call()

    def _open(self) -> tieredemb.TieredEmbeddingBag:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return tieredemb.TieredEmbeddingBag(self.rows, WIDTH, capacity=0.01, optimizer=self.optimizer, device=device)

    def _save(self, state: dict[str, Any]) -> None:
        with open(self.file, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def _load(self, module: tieredemb.TieredEmbeddingBag) -> None:
        state = torch.load(self.file)
        module.load_state_dict(state["module"])
        module.fused_optimizer.load_state_dict(state["optimizer"])

    def _remove(self) -> None:
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        self.file.unlink(missing_ok=True)


def _records(tables: _Tables, rounds: int) -> list[Record]:
    tables.round(0)
    tables.seconds.clear()
    for number in range(rounds):
        tables.round(number)
    times, weight_bytes = Interleaved(tables.seconds), tables.weight.nbytes

    def record(name: str, provider: str, **more: Any) -> Record:
        moved = tables.bytes_of.get(name, weight_bytes if name not in (SAVE, LOAD) else tables.bytes_of[SAVED])
        speeds = Quantiles.of([moved / GB / seconds for seconds in tables.seconds[name]])
        return measured(name, provider, tables.name, "GB/s", speeds, **more)

    opened = times.quantiles(OPEN)
    bar = at_most(opened.median, OPEN_SECONDS, " s") if cores() >= MANY_CORES else {}
    found = [measured(OPEN, "tieredemb", tables.name, "s", opened, **bar)]
    found += [record(name, "torch") for name in (COPY, CLONE, SAVE, LOAD)]
    for name, work in WORKS.items():
        ratio = times.ratio(name, work.peer)
        bar = {} if work.ratio is None else at_most(ratio, work.ratio)
        mine = record(name, "tieredemb")
        if cores() >= MANY_CORES:
            bar = at_least(mine.median, work.least, " GB/s")
        found.append(record(name, "tieredemb", ratio=ratio, ratio_label=f"× the time of {work.peer}", **bar))
    return found
