"""What the doctor looks at: packages, the machine, the GPU.

Nothing is allocated and no kernel is compiled here, so all checks take as long as importing torch.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from tieredemb.doctor.finding import GIB, Finding, missing, ok
from tieredemb.kernels.cache_directory import find_place

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CGROUP = Path("/sys/fs/cgroup")
DRIVER = Path("/proc/driver/nvidia/version")
WITH_GPU = "with an NVIDIA GPU: "


# --- software -----------------------------------------------------------------------------------------------


def check_packages() -> list[Finding]:
    """This package, Python, the required packages, and what the extras install. Reads metadata, imports nothing."""
    ours, version = sys.modules["tieredemb"].__version__, platform.python_version()
    found = [ok("tieredemb", ours, version=ours), ok("python", version, version=version)]
    found += [_package(package, "pip install tieredemb") for package in ("torch", "numpy", "numba")]
    extras = {"plots": ("matplotlib",), "bench": ("tqdm", "zstandard")}
    for extra, packages in extras.items():
        found += [_package(package, f"pip install 'tieredemb[{extra}]'") for package in packages]
    return found


def _package(package: str, install: str) -> Finding:
    version = _version(package)
    return ok(package, version, version=version) if version else missing(package, "not installed", install)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_numba_cache() -> list[Finding]:
    """Where compiled kernels are kept between processes."""
    chosen = os.environ.get("NUMBA_CACHE_DIR", "")
    place = find_place(chosen)
    advice = "export NUMBA_CACHE_DIR=DIRECTORY, one of your own (mkdir -m 700 DIRECTORY)"
    if place.path is None:
        detail = f"{place.reasons}: every process compiles its kernels anew"
        return [missing("numba cache", detail, advice)]
    if chosen and (fault := place.refused.get(os.path.abspath(chosen))):
        detail = f"NUMBA_CACHE_DIR={chosen} is not used: {fault}; kernels are kept in {place.path}"
        return [missing("numba cache", detail, f"{advice}, or unset NUMBA_CACHE_DIR", directory=place.path)]
    detail = f"{place.path} ({place.reasons})" if place.refused else place.path
    return [ok("numba cache", detail, directory=place.path)]


def check_memkind() -> list[Finding]:
    """The library of the PMEM tier."""
    for name in dict.fromkeys(["libmemkind.so.0", ctypes.util.find_library("memkind")]):
        if name and _library(name):
            return [ok("memkind", name, library=name)]
    detail = "libmemkind.so.0 does not load; only the PMEM tier needs it"
    return [missing("memkind", detail, "apt-get install libmemkind0")]


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
    return [ok("cpu", detail, cores=total, usable_cores=usable, model=model)]


def check_memory() -> list[Finding]:
    """Physical memory, and what can be taken of it now."""
    total, available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), available_memory()
    free = f", {available / GIB:.1f} GiB available" if available is not None else ""
    return [ok("memory", f"{total / GIB:.1f} GiB{free}", total_bytes=total, available_bytes=available)]


def available_memory() -> int | None:
    """Bytes that can be taken without swapping, or beyond a container's limit, if the kernel reports these."""
    kib = _first_match(Path("/proc/meminfo"), r"^MemAvailable:\s*(\d+) kB$")
    known = [int(kib) * 1024] if kib else []
    limit, used = (_first_match(CGROUP / name, r"^(\d+)$") for name in ("memory.max", "memory.current"))
    if limit and used:  # a container's; the cache of files, which it counts as used, can be freed
        cached = _first_match(CGROUP / "memory.stat", r"^inactive_file (\d+)$")
        known.append(max(0, int(limit) - int(used) + int(cached or 0)))
    return min(known, default=None)


def check_huge_pages() -> list[Finding]:
    """Whether the host tier gets 2 MiB pages: it asks for them by madvise."""
    setting = _first_match(THP, r"\[(\w+)\]")
    if setting in ("always", "madvise"):
        return [ok("huge pages", setting, setting=setting)]
    detail = f"{setting or 'no transparent huge pages'}: a random row in host memory costs one more page walk"
    install = f"echo madvise | sudo tee {THP}" if setting else "a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
    return [missing("huge pages", detail, install, setting=setting)]


def check_disk() -> list[Finding]:
    """Free space where the process runs, for the file tier and checkpoints."""
    directory = Path.cwd()
    total, _, free = shutil.disk_usage(directory)
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB at {directory}"
    return [ok("disk", detail, free_bytes=free, total_bytes=total, directory=str(directory))]


# --- GPU ----------------------------------------------------------------------------------------------------


def check_driver() -> list[Finding]:
    """NVIDIA's driver, and the newest CUDA that it runs. Asks libcuda; creates no context."""
    cuda = _driver_cuda()
    if cuda is None:
        detail = "libcuda.so.1 does not load: no NVIDIA driver; the library runs on the CPU"
        return [missing("gpu driver", detail, f"{WITH_GPU}apt-get install nvidia-driver-580 (or newer)")]
    release = _first_match(DRIVER, r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s") or "release unknown"
    detail = f"{release}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    return [ok("gpu driver", detail, release=release, cuda_version=cuda)]


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
        return [missing("gpu", detail, f"{WITH_GPU}pip install torch --index-url {index}")]
    if not torch.cuda.is_available():
        detail = "torch sees no GPU; the library runs on the CPU"
        return [missing("gpu", detail, f"{WITH_GPU}install its driver, and check CUDA_VISIBLE_DEVICES")]
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> Finding:
    import torch

    device = torch.cuda.get_device_properties(index)
    capability = f"{device.major}.{device.minor}"
    return ok(
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
            return [ok("cupy", f"{package} {version}", package=package, version=version)]
    import torch

    cuda = (torch.version.cuda or str(_cuda_major())).split(".")[0]  # torch's runs beside it, whatever the driver knows
    install = f"{WITH_GPU}pip install 'tieredemb[cuda{cuda}]'"
    return [missing("cupy", "not installed; only a GPU needs it", install)]


def _first_match(path: Path, pattern: str) -> str | None:
    """Group 1 of the first match in the file at `path`, or None, also when there is no such file."""
    try:
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None
