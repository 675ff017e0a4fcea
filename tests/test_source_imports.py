"""The reader of imports, and the selection of what needs a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
from source_imports import import_closure, imports_of, modules_of


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "pkg"
    (root / "sub").mkdir(parents=True)
    for name in ("__init__", "sub/__init__", "config", "device"):
        (root / f"{name}.py").write_text("")
    (root / "sub" / "op_cpu.py").write_text("from pkg.device import fma\n")
    (root / "sub" / "other_cpu.py").write_text("import numpy\n")
    return root


def test_imports_of_type_checking_functions_and_importlib(package):
    (package / "sub" / "op.py").write_text(
        "import importlib\n"
        "from typing import TYPE_CHECKING\n"
        "from . import other_cpu\n"
        "from ..config import X\n"
        "if TYPE_CHECKING:\n"
        "    from pkg.device import fma\n"
        "def late():\n"
        "    import numba.core\n"
        "    return importlib.import_module('cupy')\n"
    )
    modules = modules_of(package)
    found = [target for _, target in imports_of("pkg.sub.op", modules["pkg.sub.op"])]
    assert found == [
        "importlib",
        "typing.TYPE_CHECKING",
        "pkg.sub.other_cpu",
        "pkg.config.X",
        "pkg.device.fma",
        "numba.core",
        "cupy",
    ]


def test_import_closure_follows_imports_of_the_package_only(package):
    (package / "device.py").write_text("import numba\nfrom pkg import config\n")
    modules = modules_of(package)
    assert import_closure("pkg.sub.op_cpu", modules) == {"pkg.sub.op_cpu", "pkg.device", "pkg.config"}


def test_what_needs_a_gpu_is_marked(request):
    """A run on a GPU leaves none out: a test that is skipped for want of one fails without the mark (`conftest`)."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    files = ["pipeline/test_graph_step.py", "modules/test_cuda_errors.py"]
    run = subprocess.run(
        [*command, *(str(request.path.parent / file) for file in files)], capture_output=True, text=True, check=False
    )
    assert "::test_what_no_graph_can_hold_is_refused" in run.stdout  # asks for a GPU by a fixture
    assert "::test_int32_ids_give_the_bits_of_int64" in run.stdout  # as all of its module
    assert "[cuda" in run.stdout  # runs on every device
    assert "[cpu" not in run.stdout
