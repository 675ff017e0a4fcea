"""The doctor: what it finds, what it advises for what is missing, and that nothing makes it fail."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tieredemb
from tieredemb.__main__ import main
from tieredemb.doctor import bandwidth, checks, examine, render
from tieredemb.doctor.bandwidth import Rates, advice, check_bandwidth, rates_finding
from tieredemb.doctor.finding import Check, Finding, ok
from tieredemb.doctor.try_size import Trial, verdict
from tieredemb.errors import ConfigError, StorageError

PACKAGES = {"tieredemb", "python", "torch", "numpy", "numba", "cupy"}
NAMES = PACKAGES | {"numba cache", "cpu", "memory", "huge pages", "disk", "memkind"}

UNMEASURED = ("--table", "0B")  # where there is a GPU


def _only(check: Check) -> Finding:
    (finding,) = check()
    return finding


def test_doctor_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", *UNMEASURED]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings.keys() >= NAMES
    assert findings["tieredemb"]["detail"] == tieredemb.__version__
    assert findings["numpy"]["values"] == {"version": np.__version__}
    assert findings["torch"]["values"]["version"].split("+")[0] == torch.__version__.split("+")[0]
    assert findings["python"]["detail"] == sys.version.split()[0]
    assert findings["cpu"]["values"]["cores"] == os.cpu_count()
    assert findings["cpu"]["values"]["usable_cores"] <= os.cpu_count()
    memory = findings["memory"]["values"]
    assert 0 < memory["available_bytes"] <= memory["total_bytes"]
    assert {finding["status"] for finding in findings.values()} <= {"ok", "missing"}
    for finding in findings.values():
        assert bool(finding["install"]) == (finding["status"] == "missing"), finding


def test_doctor_prints_a_line_a_finding_and_the_install_below(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding(name="python", status="ok", detail="3.11"),
        Finding(name="memkind", status="missing", detail="does not load", install="apt-get install libmemkind0"),
    ]
    assert render(findings).splitlines() == [
        "ok       python   3.11",
        "missing  memkind  does not load",
        "                  → apt-get install libmemkind0",
    ]
    assert main(["doctor", *UNMEASURED]) == 0
    assert re.search(rf"^ok +numpy +{re.escape(np.__version__)}$", capsys.readouterr().out, re.MULTILINE)


def test_doctor_survives_a_check_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: int("none"))
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: {}["odd"])
    assert main(["doctor", *UNMEASURED]) == 0
    printed = capsys.readouterr().out
    assert re.search("^unknown +memory +ValueError: invalid literal", printed, re.MULTILINE)
    assert re.search("^unknown +disk +KeyError: 'odd'$", printed, re.MULTILINE)
    assert re.search("^ok +cpu ", printed, re.MULTILINE)


def test_doctor_survives_a_machine_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_first_match", lambda path, pattern: None)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    found = {finding.name: finding for finding in examine()}
    assert found["memory"].values["available_bytes"] is None
    assert found["cpu"].values["usable_cores"] == os.cpu_count()
    assert found["huge pages"].status == "missing"
    assert "unknown" not in {finding.status for finding in found.values()}


def test_doctor_names_the_install_of_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    installs = {finding.name: finding.install for finding in checks.check_packages() if finding.status == "missing"}
    assert installs["numba"] == "pip install tieredemb"
    assert installs["matplotlib"] == "pip install 'tieredemb[plots]'"
    assert installs["zstandard"] == "pip install 'tieredemb[bench]'"


def test_doctor_says_whether_memkind_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_library", lambda name: None)
    finding = _only(checks.check_memkind)
    assert (finding.status, finding.install) == ("missing", "apt-get install libmemkind0")
    monkeypatch.setattr(checks, "_library", lambda name: object())
    assert _only(checks.check_memkind).values == {"library": "libmemkind.so.0"}


@pytest.mark.parametrize(
    ("setting", "status"),
    [("always [madvise] never", "ok"), ("[always] madvise never", "ok"), ("always [never]", "missing")],
)
def test_doctor_reads_the_huge_page_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, status: str
) -> None:
    monkeypatch.setattr(checks, "THP", tmp_path / "enabled")
    (tmp_path / "enabled").write_text(setting)
    finding = _only(checks.check_huge_pages)
    assert finding.status == status
    assert finding.values["setting"] in ("madvise", "always", "never")
    assert ("echo madvise" in finding.install) == (status == "missing")


def test_doctor_finds_where_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    assert _only(checks.check_numba_cache).values == {"directory": str(tmp_path / "tieredemb" / "kernels")}
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "made" / "later"))
    directory = tmp_path / "made" / "later" / "tieredemb" / "kernels"
    assert _only(checks.check_numba_cache).values == {"directory": str(directory)}
    assert not [*tmp_path.iterdir()]


def test_doctor_calls_a_cache_that_others_can_write_to_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    chosen.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(chosen))
    finding = _only(checks.check_numba_cache)
    assert finding.status == "missing"
    assert f"{chosen} is not used: other users can write to {chosen} (mode 0777)" in finding.detail
    assert finding.values == {"directory": str(tmp_path / "tieredemb" / "kernels")}
    assert "mkdir -m 700" in finding.install
    monkeypatch.setenv("XDG_CACHE_HOME", str(chosen))
    monkeypatch.setattr("tempfile.tempdir", str(chosen))
    finding = _only(checks.check_numba_cache)
    assert finding.status == "missing"
    assert "every process compiles its kernels anew" in finding.detail


# --- GPU: libcuda and torch are stood in for, as most machines that run these tests have neither ----------------------


class _Driver:
    """libcuda with a version; `failing` as where the device nodes are missing."""

    def __init__(self, version: int, *, failing: bool = False) -> None:
        self.version, self.failing = version, failing

    def cuDriverGetVersion(self, pointer: object) -> int:  # noqa: N802
        pointer._obj.value = 0 if self.failing else self.version  # type: ignore[attr-defined]
        return 3 if self.failing else 0


@pytest.mark.parametrize("driver", [None, _Driver(13_000, failing=True), _Driver(0)])
def test_doctor_without_a_driver_advises_one(monkeypatch: pytest.MonkeyPatch, driver: _Driver | None) -> None:
    monkeypatch.setattr(checks, "_library", lambda name: driver)
    finding = _only(checks.check_driver)
    assert finding.status == "missing"
    assert "nvidia-driver" in finding.install


def test_doctor_reports_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_library", lambda name: _Driver(12_090))
    monkeypatch.setattr(checks, "DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (builder)\nGCC 12\n"
    )
    finding = _only(checks.check_driver)
    assert finding.detail == "575.57.08, CUDA up to 12.9"
    assert finding.values == {"release": "575.57.08", "cuda_version": 12_090}


def test_doctor_lists_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="H200", total_memory=2**37, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    found = checks.check_gpus()
    assert [finding.name for finding in found] == ["gpu 0", "gpu 1"]
    assert found[0].detail == "H200, 128.0 GiB, compute capability 9.0"
    assert found[0].values["memory_bytes"] == 2**37


@pytest.mark.parametrize(("version", "build"), [(12_080, "cu126"), (13_000, "cu130"), (None, "cu130")])
def test_doctor_advises_a_torch_that_fits_the_driver(
    monkeypatch: pytest.MonkeyPatch, version: int | None, build: str
) -> None:
    monkeypatch.setattr(checks, "_driver_cuda", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert _only(checks.check_gpus).install.endswith(f"https://download.pytorch.org/whl/{build}")


def test_doctor_says_when_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = _only(checks.check_gpus)
    assert finding.status == "missing"
    assert "CUDA_VISIBLE_DEVICES" in finding.install


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "extra"),
    [
        (None, 12_080, "cuda12"),
        (None, 13_010, "cuda13"),
        (None, None, "cuda13"),
        ("12.6", 13_010, "cuda12"),
        ("13.0", 13_010, "cuda13"),
    ],
)
def test_doctor_advises_the_cupy_that_fits_torch_or_the_driver(
    monkeypatch: pytest.MonkeyPatch, torch_cuda: str | None, driver: int | None, extra: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(checks, "_driver_cuda", lambda: driver)
    monkeypatch.setattr(checks, "_version", lambda package: None)
    assert f"tieredemb[{extra}]" in _only(checks.check_cupy).install
    monkeypatch.setattr(checks, "_version", lambda package: "14.0" if package == "cupy-cuda12x" else None)
    assert _only(checks.check_cupy).values == {"package": "cupy-cuda12x", "version": "14.0"}


# --- bandwidth --------------------------------------------------------------------------------------------------------


def _rates(gb_s: float, *, rows: int = 1 << 20, row_bytes: int = 512) -> Rates:
    milliseconds = rows * row_bytes / gb_s / 1e6
    return Rates(rows=rows, row_bytes=row_bytes, table_bytes=4 << 30, read_ms=milliseconds, write_ms=2 * milliseconds)


def test_doctor_without_a_gpu_measures_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_bandwidth(128, 4 << 30) == []


def test_doctor_measures_nothing_in_a_table_of_no_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_bandwidth(128, 0) == []
    monkeypatch.undo()
    assert main(["doctor", "--table", "0B", "--json"]) == 0
    assert "bandwidth" not in capsys.readouterr().out


def test_doctor_does_not_measure_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checks, "_version", lambda package: None)
    finding = _only(lambda: check_bandwidth(128, 1 << 20))
    assert (finding.name, finding.status) == ("gpu bandwidth", "missing")
    assert "tieredemb[cuda" in finding.install


def test_doctor_cuts_its_table_and_goes_on_where_one_tier_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = []

    def measured(layout: object, device: torch.device) -> Rates:
        layouts.append(layout)
        return _rates(50.0)

    def failing(layout: object, device: torch.device) -> Rates:
        raise StorageError("cannot be pinned")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 20, 16 << 20))
    monkeypatch.setattr(checks, "_version", lambda package: "14.0")
    monkeypatch.setattr(bandwidth, "_copy_finding", lambda device, free: ok("gpu memory", ""))
    monkeypatch.setattr(bandwidth, "_measure_unified", measured)
    monkeypatch.setattr(bandwidth, "_measure_pinned", failing)
    found = {finding.name: finding for finding in check_bandwidth(64, 4 << 30)}
    assert list(found) == ["gpu memory", "unified memory", "pinned memory", "gpu tier"]
    assert layouts[0].weight_bytes == 2 << 20
    assert (found["pinned memory"].status, found["pinned memory"].detail) == (
        "unknown",
        "StorageError: cannot be pinned",
    )
    assert found["gpu tier"].values == {"storage": "UnifiedMemory()"}


def test_doctor_says_rates_in_bytes_and_rows() -> None:
    finding = rates_finding("unified memory", _rates(51.2))
    assert finding.detail == (
        "random rows of 512 B in 4.0 GiB: read 51.2 GB/s (100 M rows/s), written 25.6 GB/s (50 M rows/s)"
    )
    assert finding.values["read_rows_s"] == pytest.approx(1e8)
    assert finding.values["table_bytes"] == 4 << 30


@pytest.mark.parametrize(
    ("unified", "pinned", "tier", "said"),
    [
        (50.0, 16.0, "UnifiedMemory()", "reads 3.1 × as fast as pinned memory"),
        (50.0, 51.0, "UnifiedMemory()", "as fast as pinned memory at this size and stays so"),
        (20.0, 50.0, "HostMemory()", "reads 2.5 × as fast at this size; a larger --table may differ"),
        (None, 50.0, "HostMemory()", "cannot use managed memory at once"),
        (50.0, None, "UnifiedMemory()", "could not be pinned"),
    ],
)
def test_doctor_advises_the_tier_that_reads_faster(
    unified: float | None, pinned: float | None, tier: str, said: str
) -> None:
    (finding,) = advice(*(None if gb_s is None else _rates(gb_s) for gb_s in (unified, pinned)))
    assert finding.values == {"storage": tier}
    assert finding.detail.startswith(f"storage={tier}: ")
    assert said in finding.detail


def test_doctor_advises_no_tier_that_it_could_not_measure() -> None:
    assert advice(None, None) == []


@pytest.mark.parametrize("options", [["--width", "0"], ["--width", "5000"], ["--table", "4"]])
def test_doctor_refuses_options_that_it_cannot_measure(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *options]) == 2
    assert options[1] in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_doctor_measures_the_gpu() -> None:
    found = {finding.name: finding for finding in check_bandwidth(128, 64 << 20)}
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["gpu memory"].values["copy_gb_s"] > 100
    for name in ("unified memory", "pinned memory"):
        assert found[name].values["read_gb_s"] > 1
        assert found[name].values["write_gb_s"] > 1
    assert found["gpu tier"].values["storage"] in ("UnifiedMemory()", "HostMemory()")


# --- a size, tried ----------------------------------------------------------------------------------------------------


def _tried(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    assert main(["doctor", "--json", *options]) == 0
    return {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("width", ["1", "100"])
def test_doctor_tries_a_size_in_the_memory_of_the_host(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = _tried(capsys, "--size", "8MB", "--width", width)
    assert found["unified memory"]["detail"] == "not tried: torch sees no GPU"
    values = found["tried HostMemory"]["values"]
    rows = 8_000_000 // (4 * int(width) + 4)
    assert (values["row_bytes"], values["table_bytes"]) == (4 * int(width), rows * 4 * int(width))
    assert min(values["read_gb_s"], values["write_gb_s"]) > 0
    assert found["trust"]["values"]["trusted"]


def test_doctor_tries_a_size_in_a_file_and_removes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _tried(capsys, "--size", "8MB", "--path", str(tmp_path / "trial.rows"))
    assert found["tried File"]["values"]["write_gb_s"] > 0
    assert found["trust"]["values"]["trusted"]
    assert "page cache" in found["trust"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_refuses_a_size_beyond_the_memory_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--size", "900TB"]) == 2
    refused = capsys.readouterr()
    assert refused.out == ""
    assert re.search(
        r"838,190.3 GiB, and [\d.,]+ GiB of memory are available.*at most [\d.]+GiB, or --path", refused.err
    )


def test_doctor_refuses_a_size_beyond_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--size", "900TB", "--path", str(tmp_path / "trial.rows")]) == 2
    assert "GiB are free on the disk of" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_doctor_overwrites_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "user.rows"
    kept.write_bytes(b"kept")
    assert main(["doctor", "--size", "8MB", "--path", str(kept)]) == 2
    assert "is to be a new file" in capsys.readouterr().err
    assert kept.read_bytes() == b"kept"


@pytest.mark.parametrize("options", [["--path", "x.rows"], ["--beyond-gpu"], ["--size", "3B"], ["--size", "much"]])
def test_doctor_refuses_a_trial_of_no_size(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *options]) == 2
    assert "size" in capsys.readouterr().err


def test_doctor_takes_a_containers_limit_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CGROUP", tmp_path)
    for name, text in (("max", "1000000"), ("current", "400000"), ("stat", "anon 1\ninactive_file 50000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert checks.available_memory() == 650_000


def test_doctor_tries_no_more_managed_memory_than_the_gpu_has_free_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 24))
    with pytest.raises(ConfigError, match=r"2.0 MiB of managed memory, and the GPU has 1.0 MiB of 16.0 MiB free"):
        Trial(size_bytes=2 << 20, width=32)
    assert Trial(size_bytes=2 << 20, width=32, beyond_gpu=True).is_unified
    assert Trial(size_bytes=1 << 20, width=32).is_unified


@pytest.mark.parametrize(
    ("gb_s", "is_same", "trusted", "said"),
    [
        (20.0, True, True, "is to be trusted here: all rows were read back as they were written, at 0.50 times"),
        (18.0, True, False, "at 0.45 times the rate of 1 GiB: too slow to be trusted"),
        (40.0, False, False, "rows were not read back as they were written"),
    ],
)
def test_doctor_trusts_rows_that_come_back_and_not_too_slowly(
    gb_s: float, is_same: bool, trusted: bool, said: str
) -> None:
    finding = verdict("UnifiedMemory", _rates(gb_s), _rates(40.0), is_same)
    assert (finding.values["trusted"], finding.status) == (trusted, "ok" if trusted else "missing")
    assert said in finding.detail
    assert bool(finding.install) is not trusted


@pytest.mark.usefixtures("gpu")
def test_doctor_tries_a_size_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = _tried(capsys, "--size", "64MiB")
    assert found["tried UnifiedMemory"]["values"]["read_gb_s"] > 1
    assert found["trust"]["values"]["trusted"]
