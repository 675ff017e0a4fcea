"""The sdist and the wheel that is built from it, installed outside the tree: files that were forgotten show only there.
`make dist` keeps them."""

from __future__ import annotations

import email
import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import tieredemb

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "tieredemb"
PACKAGED = {".py", ".typed", ".cu", ".cuh"}
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md")
NAME = f"tieredemb-{tieredemb.__version__}"

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
def built(tmp_path_factory, request):
    """Where sdist and wheel are: built from a copy of what the repository holds, as a build in place would leave its
    files there, and take up what an older one has left."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copy(REPOSITORY / name, tree)
    for name in ("tieredemb", "tests", "examples", "benchmarks"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    into = request.config.getoption("--built-into") or tree / "dist"
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", into.absolute(), tree],
                   check=True, capture_output=True, text=True, timeout=200)  # fmt: skip
    return into


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


def files_of_the_package():
    found = {path.relative_to(REPOSITORY).as_posix() for path in PACKAGE.rglob("*") if path.suffix in PACKAGED}
    assert "tieredemb/py.typed" in found
    return found


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == files_of_the_package()


def test_wheel_has_the_version_of_the_package(wheel):
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(f"{NAME}.dist-info/METADATA"))
    assert metadata["Version"] == tieredemb.__version__


def test_sdist_holds_the_package_and_what_describes_it(built):
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        held = {member.name.removeprefix(f"{NAME}/") for member in sdist if member.isfile()}
    made = {name for name in held if name.startswith("tieredemb.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert held - made == files_of_the_package() | set(SOURCES)


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
