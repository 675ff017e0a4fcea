"""A table of a given size, tried: allocated in a tier, random rows written and read back, and a judgement.

What does not fit is refused before anything is allocated. A tier is to be trusted with the size if every row was read
back as it was written, at no less than half the rate of a table of 1 GiB: memory that is moved or swapped behind the
program's back is many times slower.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tieredemb.doctor.bandwidth import Rates, measure_on_gpu, rates_finding
from tieredemb.doctor.checks import available_memory, check_cupy
from tieredemb.doctor.finding import GIB, Finding, missing, ok
from tieredemb.errors import ConfigError
from tieredemb.progress import Advance, progress
from tieredemb.storage.base import ColdRows, RowLayout, Storage

MOST = 0.9  # of what is free: other programs need the rest
TRUSTED = 0.5  # of a small table's rate
_SMALL_BYTES = GIB
_ROUNDS, _ROUND_BYTES, _ROUND_ROWS = 5, 64 << 20, 1 << 18
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried. `size_bytes`: weights and scores. `path`: a file to make and remove again, None for memory.
    `beyond_gpu`: whether managed memory may exceed what the GPU has free. Raises `ConfigError` for what does not fit;
    allocates nothing."""

    size_bytes: int
    width: int
    path: Path | None = None
    beyond_gpu: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"--size {self.size_bytes} bytes holds no row of {self.row_bytes} bytes; give more")
        if self.path is not None:
            self._check_file(self.path)
            return
        self._check_fits(available_memory(), "of memory are available", "--path FILE tries a file")
        if self.is_unified and not self.beyond_gpu:
            free, total = torch.cuda.mem_get_info()
            if self.size_bytes > free:
                raise ConfigError(
                    f"--size asks for {_gib(self.size_bytes)} of managed memory, and the GPU has {_gib(free)} of "
                    f"{_gib(total)} free; beyond that UnifiedMemory() is unproven, and a trial may take long or stop "
                    "the GPU. --beyond-gpu tries it all the same, --path FILE a file, a smaller --size what is proven"
                )

    def _check_file(self, path: Path) -> None:
        if path.exists() or not path.absolute().parent.is_dir():
            raise ConfigError(
                f"--path {str(path)!r} is to be a new file in an existing directory; the trial removes it"
            )
        free = shutil.disk_usage(path.absolute().parent).free
        self._check_fits(free, f"are free on the disk of {str(path)!r}", "a path on another disk")

    def _check_fits(self, free: int | None, where: str, instead: str) -> None:
        if free is not None and self.size_bytes > MOST * free:
            raise ConfigError(
                f"--size asks for {_gib(self.size_bytes)}, and {_gib(free)} {where}, of which a trial takes at most "
                f"{MOST:.0%}; give a --size of at most {int(MOST * free / GIB * 10) / 10:g}GiB, or {instead}"
            )

    @property
    def is_unified(self) -> bool:
        """Whether managed memory is tried, as a module on a GPU would take it."""
        return self.path is None and torch.cuda.is_available()

    @property
    def row_bytes(self) -> int:
        return RowLayout(rows=1, width=self.width).weight_bytes + RowLayout(rows=1, width=self.width).state_bytes

    @property
    def rows(self) -> int:
        return self.size_bytes // self.row_bytes

    @property
    def storage(self) -> Storage:
        from tieredemb.storage.file.tier import File
        from tieredemb.storage.host import HostMemory
        from tieredemb.storage.unified import UnifiedMemory

        if self.path is not None:
            return File(self.path)
        return UnifiedMemory() if self.is_unified else HostMemory()


def try_size(trial: Trial) -> list[Finding]:
    """Tries it, and reports the results. A GPU that cannot be used is a finding in addition to that of host memory."""
    found = []
    if not torch.cuda.is_available() and trial.path is None:
        found.append(
            missing("unified memory", "not tried: torch sees no GPU", "a GPU: see 'gpu driver' and 'gpu' above")
        )
    (cupy,) = check_cupy()
    if trial.is_unified and cupy.status != "ok":
        return [*found, missing("unified memory", "not tried: its kernels need CuPy", cupy.install)]
    small = None
    if trial.rows * trial.row_bytes > 2 * _SMALL_BYTES:
        small, _ = _try(trial, _SMALL_BYTES // trial.row_bytes)
    rates, is_same = _try(trial, trial.rows)
    name = type(trial.storage).__name__
    seen = rates_finding(f"tried {name}", rates)
    return [*found, seen, verdict(name, rates, small, is_same)]


def verdict(name: str, rates: Rates, small: Rates | None, is_same: bool) -> Finding:
    """Whether a tier of that name is to be trusted with the size. `small`: rates of a table of 1 GiB, if measured."""
    size = _gib(rates.table_bytes)
    instead = "storage=File(path) or a smaller table; HostMemory() where a GPU is used"
    if not is_same:
        detail = f"{name} of {size} is not to be trusted here: rows were not read back as they were written"
        return missing("trust", detail, instead, trusted=False)
    share = rates.read_gb_s / small.read_gb_s if small is not None else None
    compared = "" if share is None else f", at {share:.2f} times the rate of 1 GiB"
    if share is not None and share < TRUSTED:
        detail = f"{name} of {size} holds its rows{compared}: too slow to be trusted"
        return missing("trust", detail, instead, trusted=False, share=share)
    cached = "; its rows were in the page cache, a row that has left it is read from the disk" if name == "File" else ""
    detail = f"{name} of {size} is to be trusted here: all rows were read back as they were written{compared}{cached}"
    return ok("trust", detail, trusted=True, share=share)


def _try(trial: Trial, rows: int) -> tuple[Rates, bool]:
    """The rates of a table of so many rows, and whether these were read back as they were written."""
    layout = RowLayout(rows=rows, width=trial.width)
    with _opened(trial, layout) as cold:
        if trial.is_unified:
            return measure_on_gpu(cold, torch.device("cuda", torch.cuda.current_device()))
        with progress(f"{type(trial.storage).__name__}, {_gib(layout.weight_bytes)}", layout.weight_bytes) as advance:
            if trial.path is None:
                _commit(cold, advance)
            return _measure_on_host(cold)


@contextlib.contextmanager
def _opened(trial: Trial, layout: RowLayout) -> Iterator[ColdRows]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the size is unproven is why it is tried
        cold = trial.storage.open(layout, name="", identity={})
    try:
        yield cold
    finally:
        cold.close()
        if trial.path is not None:
            trial.path.unlink(missing_ok=True)


def _commit(cold: ColdRows, advance: Advance) -> None:
    """Writes every page of the weights, so that the machine has to provide it."""
    step = max(1, _PIECE_BYTES // cold.weight[:1].nbytes)
    for start in range(0, len(cold.weight), step):
        piece = cold.weight[start : start + step]
        piece[:] = 0
        advance(piece.nbytes)


def _measure_on_host(cold: ColdRows) -> tuple[Rates, bool]:
    """Measures with the calls that a cache makes. Each round has rows of its own; all are written before the first is
    read."""
    from tieredemb.cache.host.hot_rows import HotRows

    rows, width = cold.layout.rows, cold.layout.width
    most = max(1, min(rows, _ROUND_ROWS, _ROUND_BYTES // (4 * width)))
    draw = np.random.default_rng(0)
    rounds = [np.unique(draw.integers(0, rows, most)) for _ in range(_ROUNDS)]
    hot = HotRows(cold.layout, most)
    cold.begin_changes()
    written, read, is_same = [], [], True
    for keys in rounds:
        slots = np.arange(len(keys), dtype=np.int32)
        hot.weight[slots] = _content(keys, width)
        hot.dirty[slots], hot.score[slots] = 1, 1
        written.append(_ms_a_row(functools.partial(cold.write, keys, slots, hot), len(keys)))
    for keys in rounds:
        slots = np.arange(len(keys), dtype=np.int32)
        hot.weight[slots] = 0
        read.append(_ms_a_row(functools.partial(cold.read, keys, slots, hot), len(keys)))
        is_same = is_same and bool((hot.weight[slots] == _content(keys, width)).all())
    times = [statistics.median(each[1:]) * most for each in (read, written)]  # the first round compiles
    table = cold.layout.weight_bytes
    return Rates(rows=most, row_bytes=4 * width, table_bytes=table, read_ms=times[0], write_ms=times[1]), is_same


def _content(
    keys: np.ndarray[tuple[int], np.dtype[np.int64]], width: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """The values for row `keys[i]`: float32 (N, D), exact numbers that differ between rows and columns."""
    return ((keys[:, None] * 31 + np.arange(width)) % (1 << 24)).astype(np.float32)


def _ms_a_row(run: Callable[[], object], rows: int) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3 / rows


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:,.1f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 2**20:,.1f} MiB"
