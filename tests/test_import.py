"""`import tieredemb` stays quick: what only some users or some calls need is loaded there."""

from __future__ import annotations

import json

import forks
import pytest

LATE = ("numba", "llvmlite", "matplotlib", "cupy", "scipy", "sklearn", "tqdm", "zstandard", "pandas")


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in `sys.modules` of an interpreter that had torch alone, and ran `statement`."""
    code = f"import sys, json; {statement}; print(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    return set(json.loads(forks.run(code, base=forks.TORCH).stdout))


@pytest.fixture(scope="module")
def loaded_with_torch():
    return loaded_after("import torch")


def test_import_loads_no_compiler_and_no_extras(loaded_with_torch):
    assert loaded_after("import tieredemb").intersection(LATE) - loaded_with_torch == set()


def test_import_of_command_line_loads_no_compiler_and_no_extras(loaded_with_torch):
    assert loaded_after("import tieredemb.__main__").intersection(LATE) - loaded_with_torch == set()


def test_import_leaves_what_several_processes_need_for_later():
    code = """
import sys, tieredemb
late = [name for name in sys.modules if name.startswith("tieredemb.sharding")]
assert not late, late
assert {"RowWise", "TableWise", "ShardedTieredEmbeddingBagCollection"} <= set(dir(tieredemb))
from tieredemb import RowWise, ShardedTieredEmbeddingBagCollection, TableWise
assert tieredemb.RowWise is RowWise
assert "tieredemb.sharding.collection" in sys.modules
"""
    done = forks.run(code, base=forks.TORCH)
    assert done.returncode == 0, done.stderr


def test_public_names_are_there_and_others_are_not():
    import tieredemb

    assert all(getattr(tieredemb, name) is not None for name in tieredemb.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'RowWize'"):
        _ = tieredemb.RowWize


def test_import_check_sees_what_a_statement_loads(loaded_with_torch):
    assert "numba" in loaded_after("import tieredemb.kernels.cpu") - loaded_with_torch
