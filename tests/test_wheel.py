"""The wheel, built and installed outside the tree: package data that was forgotten shows only there."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "tieredemb"
PACKAGED = {".py", ".typed", ".cu", ".cuh"}

USE = """
import sys, torch, tieredemb
from pathlib import Path
assert Path(tieredemb.__file__).is_relative_to(sys.prefix), tieredemb.__file__
assert Path(tieredemb.__file__).with_name("py.typed").exists()
bag = tieredemb.TieredEmbeddingBag(1000, 8, mode="sum", capacity=10, optimizer=tieredemb.SGD(lr=1.0))
ids, offsets = torch.tensor([1, 2, 2, 999]), torch.tensor([0, 1])
before = bag(ids, offsets)
before.sum().backward()
print(torch.equal(bag(ids[:1], offsets[:1]), before[:1].detach() - 1.0))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of what the repository holds: a build in place would leave its files there."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tree)
    for name in ("tieredemb", "tests", "examples", "benchmarks"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tree / "dist", tree],
                   check=True, capture_output=True, text=True, timeout=200)  # fmt: skip
    (built,) = (tree / "dist").glob("*.whl")
    return built


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    files = [path for path in PACKAGE.rglob("*") if path.suffix in PACKAGED]
    expected = {path.relative_to(REPOSITORY).as_posix() for path in files}
    assert "tieredemb/py.typed" in expected
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_wheel_looks_up_and_trains_from_another_directory(wheel, tmp_path):
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True, capture_output=True, timeout=100)
    # torch and the others are taken from here; a path in a .pth brings no editable install along
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NUMBA_CACHE"))}
    used = subprocess.run([python, "-c", USE], cwd=elsewhere, env=environment, capture_output=True, text=True,
                          timeout=250)  # fmt: skip
    assert used.returncode == 0, used.stderr
    assert used.stdout.split() == ["True"]
