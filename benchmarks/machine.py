"""What a figure depends on: the machine, the versions, the commit."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cores() -> int:
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, str | int]:
    """CPU model, cores, last-level cache, memory and the huge-page mode, on which random access depends."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "l3": _read(Path("/sys/devices/system/cpu/cpu0/cache/index3/size")),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "huge_pages": _chosen(_read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))),
        "system": f"{platform.system()} {platform.machine()}",
    } | _gpu()


def _gpu() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "driver": _driver()}


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def machine_key() -> str:
    """Identity of a machine among the results."""
    here = machine()
    gpu = f", {here['gpu']}" if "gpu" in here else ""
    return f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB{gpu}"


def versions() -> dict[str, str]:
    import tieredemb

    packages = {name: metadata.version(name) for name in ("torch", "numpy", "numba")}
    for name, package in (("cupy", "cupy-cuda13x"), ("cupy", "cupy-cuda12x"), ("fbgemm", "fbgemm-gpu")):
        with contextlib.suppress(metadata.PackageNotFoundError):  # the GPU path's compiler, and its peer
            packages[name] = metadata.version(package)
    return {"python": platform.python_version(), **packages, "tieredemb": tieredemb.__version__}


def commit() -> str:
    """Short hash of HEAD, with "-dirty" where library or benchmarks differ from it (results and pages aside). Where
    the sources were copied without their history, what BENCHMARK_COMMIT says."""
    given = os.environ.get("BENCHMARK_COMMIT")
    if given:
        return given
    code = ["tieredemb", "benchmarks/*.py"]
    head = _git("rev-parse", "--short=10", "HEAD")
    if head == "unknown":
        return head
    return f"{head}-dirty" if _git("status", "--porcelain", "--", *code) else head


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _chosen(options: str) -> str:
    """`madvise` of "always [madvise] never"."""
    return options.partition("[")[2].partition("]")[0] or options
