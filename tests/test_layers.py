"""Imports go down only: errors, config, progress, shallow ← kernels ← hash, storage, lookup ← cache ← tables ← step ←
modules ← pipeline, sharding ← conversion, model ← tools.

The imports are read from the source, so those under `TYPE_CHECKING` and inside functions count too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from source_imports import circle_groups, imports_of, modules_of

PACKAGE = Path(__file__).parents[1] / "tieredemb"

BASE = {"errors", "config", "progress", "shallow"}
CACHE = BASE | {"kernels", "hash", "storage"}  # the cache knows no lookup
TABLES = CACHE | {"cache", "lookup"}
STEP = TABLES | {"tables"}
MODULES = STEP | {"step"}
PIPELINE = MODULES | {"modules"}
CONVERSION = PIPELINE | {"pipeline"}
SURFACES = CONVERSION | {"conversion", "sharding", "model"}
TOOLS = {"plots", "cache_hit", "doctor", "__main__"}
OPS = {"ops", "ops_cpu"}  # operators for users, loaded on demand: nothing here uses them
SURFACE = ""  # the package's own __init__: for users, so nothing inside imports it
MAY_IMPORT: dict[str, set[str]] = (
    dict.fromkeys(BASE, BASE)
    | {"kernels": BASE}
    | dict.fromkeys(("hash", "storage", "lookup"), BASE | {"kernels"})  # never each other
    | {"cache": CACHE}
    | {"tables": TABLES, "step": STEP | {"modules"}, "modules": MODULES}
    | dict.fromkeys(("pipeline", "sharding"), PIPELINE)
    | {"conversion": CONVERSION, "model": PIPELINE | {"sharding"}}
    | dict.fromkeys(OPS, SURFACES | OPS)
    | dict.fromkeys(TOOLS, SURFACES | TOOLS)
    | {SURFACE: SURFACES}
)
COMPILERS = {"numba", "llvmlite", "cupy", "cuda", "triton"}


def part_of(module: str) -> str:
    """`tieredemb.lookup.bags` → `lookup`: what the layers are made of."""
    return module.partition(".")[2].partition(".")[0]


def breaches(package: Path) -> list[str]:
    """Everything in `package` that imports against the direction, one line each."""
    modules = modules_of(package)
    found = []
    for name, path in modules.items():
        part = part_of(name)
        if part not in MAY_IMPORT:
            found.append(f"{name}: {part!r} has no layer; give it one in MAY_IMPORT and in docs/design.md")
            continue
        for line, target in imports_of(name, path):
            place = f"{path.relative_to(package.parent)}:{line}"
            if target.partition(".")[0] in COMPILERS and part != "kernels":
                found.append(f"{place} imports {target}: only tieredemb.kernels compiles")
            if target.partition(".")[0] != package.name:
                continue
            while target not in modules:
                target = target.rpartition(".")[0]
            other = part_of(target)
            if other != part and other not in MAY_IMPORT[part]:
                found.append(f"{place}: {part or 'the package'} must not import {other or 'the package itself'}")
    return found


def test_imports_go_down_only():
    assert breaches(PACKAGE) == []


def test_no_files_import_each_other_in_a_circle():
    """Where they would, even for a type alone: a third file that both import often does it."""
    assert circle_groups(modules_of(PACKAGE)) == []


@pytest.fixture
def tree(tmp_path):
    """A package of the same layout, without imports."""
    package = tmp_path / "tieredemb"
    for part in sorted(set(MAY_IMPORT) - {SURFACE}):
        (package / part).mkdir(parents=True)
        (package / part / "__init__.py").write_text("")
        (package / part / "op.py").write_text("")
    (package / "__init__.py").write_text("from tieredemb.modules.op import x\n")
    return package


def test_layers_without_a_breach_pass(tree):
    (tree / "cache" / "op.py").write_text("from tieredemb.storage.op import x\nfrom tieredemb import hash, config\n")
    (tree / "kernels" / "op.py").write_text("import numba\n")
    assert breaches(tree) == []


@pytest.mark.parametrize(
    ("importer", "source", "said"),
    [
        ("hash/op.py", "from tieredemb.storage.op import x", "hash must not import storage"),
        ("storage/op.py", "import tieredemb.lookup.op", "storage must not import lookup"),
        ("cache/op.py", "from tieredemb.lookup import op", "cache must not import lookup"),
        ("cache/op.py", "from ..lookup.op import x", "cache must not import lookup"),
        ("kernels/op.py", "from tieredemb import hash", "kernels must not import hash"),
        ("config/op.py", "from tieredemb.kernels import twin", "config must not import kernels"),
        ("lookup/op.py", "def late():\n    from tieredemb.cache.op import x", "lookup must not import cache"),
        ("modules/op.py", "import tieredemb.plots", "modules must not import plots"),
        ("modules/op.py", "from tieredemb import LFU", "modules must not import the package itself"),
        ("__init__.py", "from tieredemb.doctor import run", "the package must not import doctor"),
        ("__init__.py", "from tieredemb import ops", "the package must not import ops"),
        ("modules/op.py", "import tieredemb.ops", "modules must not import ops"),
        (
            "hash/op.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tieredemb.cache.op import x",
            "hash must not import cache",
        ),
        ("cache/op.py", "import numba", "only tieredemb.kernels compiles"),
        ("lookup/op.py", "def late():\n    from cupy import RawModule", "only tieredemb.kernels compiles"),
        ("storage/op.py", "import importlib\nimportlib.import_module('numba.core')", "only tieredemb.kernels compiles"),
    ],
)
def test_layers_planted_breach_is_found(tree, importer, source, said):
    (tree / importer).write_text(source + "\n")
    found = breaches(tree)
    assert len(found) == 1
    assert said in found[0]


def test_circles_are_found_wherever_the_import_stands(tree):
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tieredemb.cache.third import x\n"
    (tree / "cache" / "op.py").write_text("def late():\n    from tieredemb.cache.other import x\n")
    (tree / "cache" / "other.py").write_text(late)
    (tree / "cache" / "third.py").write_text("from tieredemb.cache import op\n")
    assert circle_groups(modules_of(tree)) == [["tieredemb.cache.op", "tieredemb.cache.other", "tieredemb.cache.third"]]


def test_circles_that_share_a_file_are_one_group(tree):
    for name, source in {
        "op": "from tieredemb.cache import left, right",
        "left": "from tieredemb.cache import op",
        "right": "from tieredemb.cache import op, leaf",
        "leaf": "",
    }.items():
        (tree / "cache" / f"{name}.py").write_text(source + "\n")
    assert circle_groups(modules_of(tree)) == [["tieredemb.cache.left", "tieredemb.cache.op", "tieredemb.cache.right"]]


def test_layers_new_part_needs_a_layer(tree):
    (tree / "cellar.py").write_text("")
    assert breaches(tree) == [
        "tieredemb.cellar: 'cellar' has no layer; give it one in MAY_IMPORT and in docs/design.md"
    ]
