"""The `doctor` command: what this machine offers to the library, and what to install for what it lacks.

Each check returns `Finding`s and may fail without harm: an odd machine yields a finding of status "unknown",
never a traceback. Nothing is allocated and no kernel is compiled, so it takes as long as importing torch.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "missing", "unknown"]
Value = int | float | str | bool | None
GIB = 2**30
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
DRIVER = Path("/proc/driver/nvidia/version")
WITH_GPU = "with an NVIDIA GPU: "


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about the machine. `install`: the command (or the advice) that mends a status "missing", else
    "". `values`: the same fact for programs, sizes in bytes."""

    name: str
    status: Status
    detail: str
    install: str = ""
    values: dict[str, Value] = field(default_factory=dict)


Check = Callable[[], list[Finding]]


def _ok(name: str, detail: str, **values: Value) -> Finding:
    return Finding(name=name, status="ok", detail=detail, values=values)


def _missing(name: str, detail: str, install: str, **values: Value) -> Finding:
    return Finding(name=name, status="missing", detail=detail, install=install, values=values)


# --- software -----------------------------------------------------------------------------------------------


def check_packages() -> list[Finding]:
    """Python, the required packages, and what the extras bring. Reads metadata, imports nothing."""
    version = platform.python_version()
    found = [_ok("python", version, version=version)]
    found += [_package(package, "pip install tieredemb") for package in ("torch", "numpy", "numba")]
    extras = {"plots": ("matplotlib",), "bench": ("tabulate", "tqdm", "zstandard")}
    for extra, packages in extras.items():
        found += [_package(package, f"pip install 'tieredemb[{extra}]'") for package in packages]
    return found


def _package(package: str, install: str) -> Finding:
    version = _version(package)
    return _ok(package, version, version=version) if version else _missing(package, "not installed", install)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_numba_cache() -> list[Finding]:
    """Where compiled kernels are kept between processes, in numba's own order of preference."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    package = Path(__file__).parent
    candidates = [Path(chosen)] if chosen else [package, Path.home() / ".cache" / "numba"]
    for directory in candidates:
        if _writable(directory):
            place = "in __pycache__ under " if directory == package else ""
            return [_ok("numba cache", f"{place}{directory}", directory=str(directory))]
    detail = f"{' and '.join(map(str, candidates))} cannot be written: every process compiles its kernels anew"
    return [_missing("numba cache", detail, "export NUMBA_CACHE_DIR=DIRECTORY, one that can be written")]


def _writable(directory: Path) -> bool:
    """Whether `directory`, or the nearest parent that exists, can be written to."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.is_dir() and os.access(directory, os.W_OK)


def check_memkind() -> list[Finding]:
    """The library of the PMEM tier."""
    for name in dict.fromkeys(["libmemkind.so.0", ctypes.util.find_library("memkind")]):
        if name and _library(name):
            return [_ok("memkind", name, library=name)]
    detail = "libmemkind.so.0 does not load; only the PMEM tier needs it"
    return [_missing("memkind", detail, "apt-get install libmemkind0")]


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


# --- machine ------------------------------------------------------------------------------------------------


def check_cpu() -> list[Finding]:
    """The cores this process may use, of those the machine has."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    model = _first_match(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$") or platform.machine()
    detail = f"{usable} of {total} cores usable, {model}"
    return [_ok("cpu", detail, cores=total, usable_cores=usable, model=model)]


def check_memory() -> list[Finding]:
    """Physical memory, and what can be taken of it now."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kib = _first_match(Path("/proc/meminfo"), r"^MemAvailable:\s*(\d+) kB$")
    available = int(kib) * 1024 if kib else None
    free = f", {available / GIB:.1f} GiB available" if available is not None else ""
    return [_ok("memory", f"{total / GIB:.1f} GiB{free}", total_bytes=total, available_bytes=available)]


def check_huge_pages() -> list[Finding]:
    """Whether the host tier gets 2 MiB pages: it asks for them by madvise."""
    setting = _first_match(THP, r"\[(\w+)\]")
    if setting in ("always", "madvise"):
        return [_ok("huge pages", setting, setting=setting)]
    detail = f"{setting or 'no transparent huge pages'}: a random row in host memory costs one more page walk"
    install = f"echo madvise | sudo tee {THP}" if setting else "a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
    return [_missing("huge pages", detail, install, setting=setting)]


def check_disk() -> list[Finding]:
    """Free space where the process runs, for the file tier and checkpoints."""
    directory = Path.cwd()
    total, _, free = shutil.disk_usage(directory)
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB at {directory}"
    return [_ok("disk", detail, free_bytes=free, total_bytes=total, directory=str(directory))]


# --- GPU ----------------------------------------------------------------------------------------------------


def check_driver() -> list[Finding]:
    """NVIDIA's driver, and the newest CUDA that it runs. Asks libcuda; creates no context."""
    cuda = _driver_cuda()
    if cuda is None:
        detail = "libcuda.so.1 does not load: no NVIDIA driver; the library runs on the CPU"
        return [_missing("gpu driver", detail, f"{WITH_GPU}apt-get install nvidia-driver-580 (or newer)")]
    release = _first_match(DRIVER, r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s") or "release unknown"
    detail = f"{release}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    return [_ok("gpu driver", detail, release=release, cuda_version=cuda)]


def _driver_cuda() -> int | None:
    """The driver's CUDA version as 1000 × major + 10 × minor, or None without a working driver."""
    library = _library("libcuda.so.1")
    version = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value or None


def _cuda_major() -> int:
    """CUDA's major version to install for: the driver's, the newest that we build for without one."""
    return 12 if (_driver_cuda() or 13_000) < 13_000 else 13


def check_gpus() -> list[Finding]:
    """The devices that torch can use."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        index = "https://download.pytorch.org/whl/" + ("cu130" if _cuda_major() == 13 else "cu126")
        detail = f"torch {torch.__version__} is built for the CPU only"
        return [_missing("gpu", detail, f"{WITH_GPU}pip install torch --index-url {index}")]
    if not torch.cuda.is_available():
        detail = "torch sees no GPU; the library runs on the CPU"
        return [_missing("gpu", detail, f"{WITH_GPU}install its driver, and check CUDA_VISIBLE_DEVICES")]
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> Finding:
    import torch

    device = torch.cuda.get_device_properties(index)
    capability = f"{device.major}.{device.minor}"
    return _ok(
        f"gpu {index}",
        f"{device.name}, {device.total_memory / GIB:.1f} GiB, compute capability {capability}",
        model=device.name,
        memory_bytes=device.total_memory,
        compute_capability=capability,
        multiprocessors=device.multi_processor_count,
    )


def check_cupy() -> list[Finding]:
    """CuPy compiles and launches the GPU kernels; its package is named after the CUDA version."""
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        version = _version(package)
        if version:
            return [_ok("cupy", f"{package} {version}", package=package, version=version)]
    install = f"{WITH_GPU}pip install 'tieredemb[cuda{_cuda_major()}]'"
    return [_missing("cupy", "not installed; only a GPU needs it", install)]


# --- the report ---------------------------------------------------------------------------------------------

CHECKS: tuple[Check, ...] = (
    check_packages,
    check_numba_cache,
    check_cpu,
    check_memory,
    check_huge_pages,
    check_disk,
    check_memkind,
    check_driver,
    check_gpus,
    check_cupy,
)


def examine(checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """All findings, in order. A check that fails becomes a finding of status "unknown"."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check()
        except Exception as error:  # a diagnosis must survive whatever is broken here
            name = check.__name__.removeprefix("check_").replace("_", " ")
            found.append(Finding(name=name, status="unknown", detail=f"{type(error).__name__}: {error}"))
    return found


def _first_match(path: Path, pattern: str) -> str | None:
    """Group 1 of the first match in the file at `path`, or None, also when there is no such file."""
    try:
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None


def render(findings: Sequence[Finding]) -> str:
    """A line a finding, its install command below it."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.name:<{width}}  {finding.detail}".rstrip())
        if finding.install:
            lines.append(f"{'':<8} {'':<{width}}  → {finding.install}")
    return "\n".join(lines)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the `doctor` command and its options."""
    parser = commands.add_parser("doctor", help="what this machine offers, and what to install")
    parser.add_argument("--json", action="store_true", help="print a JSON list of findings")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings. Always 0: a missing part is a fact, not a failure."""
    findings = examine()
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if arguments.json else render(findings))
    return 0
