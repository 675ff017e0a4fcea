"""Device functions: part of the kernels that call them, and nothing by themselves."""

from __future__ import annotations

import os

import forks
import numpy as np
import pytest
from numba.core import codegen
from numba.core.compiler import Compiler

from tieredemb.kernels import device_functions_cpu
from tieredemb.kernels.cpu import inline, jit
from tieredemb.kernels.parallel_cpu import over_ranges, parallel_for


@inline
def half_of(value):
    return value * np.float32(0.5)


@inline
def halve(values, i):
    values[i] = half_of(values[i])


@jit
def halve_all(values):
    for i in range(values.shape[0]):
        halve(values, i)


@over_ranges
def halve_ranges(lo, hi, values):
    for i in range(lo, hi):
        halve(values, i)


def test_kernels_run_their_device_functions():
    values = np.arange(100, dtype=np.float32)
    halve_all(values)
    parallel_for(halve_ranges, [0, 30, 100], values)
    np.testing.assert_array_equal(values, np.arange(100, dtype=np.float32) / 4)


def test_machine_code_is_made_of_kernels_alone(monkeypatch):
    made = []
    add = codegen.JITCPUCodegen._add_module

    def note(self, module):
        made.append({function.name for function in module.functions if not function.is_declaration})
        return add(self, module)

    monkeypatch.setattr(codegen.JITCPUCodegen, "_add_module", note)

    @inline
    def third_of(value):
        return value / np.float32(3)

    @inline
    def twice_third_of(value):
        return third_of(value) + third_of(value)

    def kernel(values):
        values[0] = twice_third_of(values[0])

    values = np.array([3], np.float32)
    jit(kernel)(values)
    assert values[0] == 2
    [names] = made
    assert any("kernel" in name for name in names)
    assert not any("third_of" in name for name in names)  # they are where they were called


def test_a_device_function_is_not_called_from_outside():
    halve_all(np.zeros(1, np.float32))
    with pytest.raises(AttributeError, match="half_of"):
        half_of(np.float32(3))


@pytest.mark.parametrize("missing", ["_optimize_final_module", "_finalize_final_module"])
def test_another_numba_compiles_them_as_it_does(monkeypatch, missing):
    assert device_functions_cpu.device_compiler() is device_functions_cpu.PartCompiler

    class Other:
        _optimize_final_module = _finalize_final_module = None

    delattr(Other, missing)
    monkeypatch.setattr(device_functions_cpu, "JITCodeLibrary", Other)
    assert device_functions_cpu.device_compiler() is Compiler


def test_numbas_own_way_gives_the_same_bits(tmp_path):
    """Of a model that trains, in a process whose device functions are compiled one by one."""
    script = """
import sys
import torch
from tieredemb.kernels import device_functions_cpu
if sys.argv[1] == "numba":
    device_functions_cpu.device_compiler = lambda: device_functions_cpu.Compiler
import tieredemb as te
bag = te.TieredEmbeddingBag(50, 5, capacity=7, optimizer=te.SparseAdam(lr=0.1), dtype=torch.float16,
                            rounding="stochastic", device="cpu")
for seed in range(3):
    ids = torch.randint(50, (40,), generator=torch.Generator().manual_seed(seed))
    bag(ids, torch.arange(0, 40, 4)).float().pow(2).sum().backward()
print(bag.state_dict()["weight"].view(torch.int16).tolist())
"""
    found = []
    for way, apart in (("ours", {}), ("numba", {"NUMBA_CACHE_DIR": str(tmp_path)})):
        run = forks.run(script, way, base=forks.TORCH, env=os.environ | apart)
        assert run.returncode == 0, run.stderr
        found.append(run.stdout)
    assert found[0] == found[1]
    assert len(found[0]) > 1000
