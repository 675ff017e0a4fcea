"""What the GPU reaches: its own memory, and random rows of cold tables behind PCIe. Says which tier to use, and why.

Medians of device events over fresh random rows, moved by kernels as the library moves them. It takes some seconds and,
for that time, a table in the host's memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tieredemb.doctor.checks import available_memory, check_cupy
from tieredemb.doctor.finding import GIB, Finding, missing, ok, unknown
from tieredemb.errors import TieredEmbError
from tieredemb.storage.base import ColdRows, RowLayout

MAX_WIDTH = 4096  # a row of 16 KiB: wider ones read no faster
_ROUNDS, _WARM_UP = 10, 2
_ROUND_BYTES, _ROUND_ROWS = 256 << 20, 1 << 20  # a round moves at most: far beyond the GPU's caches, 5 ms of PCIe 5
_COPY_BYTES = GIB
_BLOCKS, _THREADS = 8, 1024  # saturate PCIe
_ALIKE = 0.1  # rates that differ by less are the same


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a tier reached. `rows` random rows of `row_bytes` in a table of `table_bytes` took so many milliseconds."""

    rows: int
    row_bytes: int
    table_bytes: int
    read_ms: float
    write_ms: float

    @property
    def read_gb_s(self) -> float:
        return self.rows * self.row_bytes / self.read_ms / 1e6

    @property
    def write_gb_s(self) -> float:
        return self.rows * self.row_bytes / self.write_ms / 1e6


def check_bandwidth(width: int, table_bytes: int) -> list[Finding]:
    """Measures torch's current GPU with tables of `width` float32 a row and `table_bytes`, cut to a quarter of what the
    GPU and the host have free. Finds nothing where there is no GPU or nothing to measure."""
    if table_bytes == 0 or not torch.cuda.is_available():
        return []
    (cupy,) = check_cupy()
    if cupy.status != "ok":
        return [missing("gpu bandwidth", "not measured: its kernels need CuPy", cupy.install)]
    device = torch.device("cuda", torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info(device)
    table_bytes = min(table_bytes, free // 4, (available_memory() or free) // 4)
    layout = RowLayout(rows=max(1, table_bytes // (4 * width)), width=width)
    found = [_copy_finding(device, free)]
    rates: dict[str, Rates] = {}
    for name, measure in (("unified memory", _measure_unified), ("pinned memory", _measure_pinned)):
        try:
            measured = measure(layout, device)
        except TieredEmbError as error:
            found.append(unknown(name, error))
            continue
        if measured is not None:
            rates[name] = measured
            found.append(rates_finding(name, measured))
    return [*found, *advice(rates.get("unified memory"), rates.get("pinned memory"))]


# --- measuring --------------------------------------------------------------------------------------------------------


def _median_ms(run: Callable[[int], object]) -> float:
    """Median milliseconds of `run(round)`, by device events."""
    samples = []
    for number in range(_WARM_UP + _ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(number)
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop))
    return float(statistics.median(samples[_WARM_UP:]))


def _copy_finding(device: torch.device, free_bytes: int) -> Finding:
    source = torch.zeros(min(_COPY_BYTES, free_bytes // 8), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds = _median_ms(lambda number: target.copy_(source))
    gb_s = 2 * source.nbytes / milliseconds / 1e6
    return ok("gpu memory", f"copy {gb_s:,.0f} GB/s, read and written", copy_gb_s=gb_s)


def _measure_unified(layout: RowLayout, device: torch.device) -> Rates | None:
    """None where the GPU cannot have it."""
    from tieredemb.storage.cuda_driver import has_concurrent_managed_access
    from tieredemb.storage.unified import UnifiedMemory

    if not has_concurrent_managed_access(device):
        return None
    return _measure(UnifiedMemory().open(layout, name="", identity={}), device)


def _measure_pinned(layout: RowLayout, device: torch.device) -> Rates:
    from tieredemb.storage.host import HostMemory

    return _measure(HostMemory().open(layout, name="", identity={}), device)


def _measure(cold: ColdRows, device: torch.device) -> Rates:
    """Reads and writes random rows of `cold` and closes it."""
    try:
        rates, _ = measure_on_gpu(cold, device)
    finally:
        cold.close()
    return rates


def measure_on_gpu(cold: ColdRows, device: torch.device) -> tuple[Rates, bool]:
    """The rates of random rows, and whether rows were read back as they were written."""
    from tieredemb.kernels.compiler import Kernel, options

    rows, width = cold.layout.rows, cold.layout.width
    flags = options(torch.float32, width)
    gather = Kernel("doctor/probe.cu", "rows_gather", flags)
    scatter = Kernel("doctor/probe.cu", "rows_scatter", flags)
    cold.wait_until_committed()
    cold.attach(device)
    address = cold.weight.ctypes.data
    n = max(1, min(rows, _ROUND_ROWS, _ROUND_BYTES // (4 * width)))
    keys = torch.randint(rows, (_WARM_UP + _ROUNDS, n), device=device)
    buffer = torch.zeros(n, width, device=device)
    read_ms = _median_ms(lambda number: gather(_BLOCKS, _THREADS, keys[number], n, address, buffer))
    write_ms = _median_ms(lambda number: scatter(_BLOCKS, _THREADS, keys[number], n, address, buffer))
    rates = Rates(rows=n, row_bytes=4 * width, table_bytes=cold.layout.weight_bytes, read_ms=read_ms, write_ms=write_ms)
    distinct: torch.Tensor = keys.unique()[:n]
    content = (distinct[:, None] * 31 + torch.arange(width, device=device)).remainder(1 << 24).float()
    scatter(_BLOCKS, _THREADS, distinct, len(distinct), address, content)
    gather(_BLOCKS, _THREADS, distinct, len(distinct), address, buffer)
    return rates, bool((buffer[: len(distinct)] == content).all())


# --- saying it --------------------------------------------------------------------------------------------------------


def rates_finding(name: str, rates: Rates) -> Finding:
    """The rates of a tier, in GB/s and rows a second."""
    read, written = rates.rows / rates.read_ms / 1e3, rates.rows / rates.write_ms / 1e3
    size = rates.table_bytes / GIB
    detail = (
        f"random rows of {rates.row_bytes} B in {size:.1f} GiB: read {rates.read_gb_s:.1f} GB/s ({read:.0f} M rows/s), "
        f"written {rates.write_gb_s:.1f} GB/s ({written:.0f} M rows/s)"
    )
    return ok(
        name,
        detail,
        row_bytes=rates.row_bytes,
        table_bytes=rates.table_bytes,
        read_gb_s=rates.read_gb_s,
        write_gb_s=rates.write_gb_s,
        read_rows_s=read * 1e6,
        write_rows_s=written * 1e6,
    )


def advice(unified: Rates | None, pinned: Rates | None) -> list[Finding]:
    """Which storage fits the rates; None stands for a tier that could not be measured."""
    if unified is None and pinned is None:
        return []
    bound = "random rows of pinned memory are bound by address translation in tables of many GiB"
    if unified is None:
        tier, why = "HostMemory()", "host and kernels cannot use managed memory at once here"
    elif pinned is None:
        tier, why = "UnifiedMemory()", "host memory could not be pinned here"
    else:
        ratio = unified.read_gb_s / pinned.read_gb_s
        tier, why = "UnifiedMemory()", f"reads {ratio:.1f} × as fast as pinned memory, as {bound}"
        if ratio < 1 - _ALIKE:
            tier = "HostMemory()"
            why = f"reads {1 / ratio:.1f} × as fast at this size; a larger --table may differ, as {bound}"
        elif ratio < 1 + _ALIKE:
            why = f"reads as fast as pinned memory at this size and stays so, while {bound}"
    return [ok("gpu tier", f"storage={tier}: {why}. File(path) holds tables larger than memory", storage=tier)]
