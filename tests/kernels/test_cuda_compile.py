"""Every CUDA kernel compiles for every architecture it is meant for, without a GPU, a driver or a toolkit: NVRTC from
its wheel, called directly."""

from __future__ import annotations

import re

import pytest
import torch
from nvrtc import compiled

from tieredemb.kernels.compiler import options
from tieredemb.kernels.source import PACKAGE, text

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
PLAIN = ("hash/slot_map.cu", "cache/policy.cu", "cache/plan.cu", "lookup/bags.cu")
BY_ROW = (
    "doctor/probe.cu",
    "storage/initial.cu",
    "cache/device/transfer.cu",
    "lookup/embedding_bag.cu",
    "lookup/optimizer.cu",
)
FLOAT, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
ROWS = [(FLOAT, 1), (FLOAT, 6), (FLOAT, 128), (FLOAT, 300), (HALF, 6), (HALF, 64), (BFLOAT16, 100), (BFLOAT16, 128)]


def compile_for(file: str, architecture: str, flags: tuple[str, ...]) -> str:
    return compiled(file, architecture, flags)[0]


def test_every_cuda_file_is_compiled_here():
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.cu")}
    assert found == {*PLAIN, *BY_ROW}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", PLAIN)
def test_kernel_compiles_without_a_warning(file, architecture):
    assert compile_for(file, architecture, options()) == ""


@pytest.mark.parametrize(("dtype", "width"), ROWS)
@pytest.mark.parametrize("file", BY_ROW)
def test_row_kernel_compiles_for_every_format_and_width(file, dtype, width):
    for architecture in ARCHITECTURES if (width, dtype) == (128, torch.float32) else ("sm_80",):
        assert compile_for(file, architecture, options(dtype, width)) == ""


@pytest.mark.parametrize(("kind", "state"), [(0, 0), (1, 64), (2, 1), (3, 128)])
def test_optimizer_kernel_compiles_for_every_optimizer(kind, state):
    flags = (*options(torch.float32, 64), f"-DKIND={kind}", f"-DSTATE={state}")
    assert compile_for("lookup/optimizer.cu", "sm_90", flags) == ""


@pytest.mark.parametrize("flags", [("-DSLOTLESS",), ("-DHAS_MAX",), ("-DUNALIGNED",), ("-DSLOTLESS", "-DHAS_MAX")])
@pytest.mark.parametrize("file", ["cache/plan.cu", "lookup/embedding_bag.cu", "lookup/optimizer.cu"])
def test_kernel_compiles_with_what_batches_ask_for(file, flags):
    row = options() if file in PLAIN else options(torch.bfloat16, 12)
    assert compile_for(file, "sm_90", (*row, *flags)) == ""


# --- the first statement ----------------------------------------------------------------------------------------------

KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*\))?\s*(\w+)\([^)]*\)\s*\{\s*([^;]*;)')


def kernels(file):
    """Name and first statement of every kernel of a file."""
    code = re.sub("//[^\n]*", "", text(file))
    found = KERNEL.findall(code)
    assert len(found) == code.count("__global__")
    return found


@pytest.mark.parametrize("file", [*PLAIN, *BY_ROW])
def test_kernel_waits_for_the_one_before_it_first(file):
    """A launch may begin before that has ended: without the wait a GPU reads old numbers, now and then."""
    for name, first in kernels(file):
        assert first == "wait_for_prior_kernel();", name


@pytest.mark.parametrize("file", [*PLAIN, *BY_ROW])
def test_compiler_moves_no_access_to_memory_before_the_wait(file):
    flags = options() if file in PLAIN else options(torch.float32, 128)
    bodies = compiled(file, "sm_90", flags)[1].split(".entry")[1:]
    assert len(bodies) == len(kernels(file))
    for body in bodies:
        before, wait, _ = body.partition("griddepcontrol.wait;")
        assert wait
        assert re.findall(r"\s(?:ld|st|atom|red|bar|bra|ret)\b(?!\.param)\S*", before) == []
    assert "griddepcontrol" not in compiled(file, "sm_80", flags)[1]


def test_a_broken_kernel_fails():
    with pytest.raises(AssertionError, match="undefined"):
        compile_for("hash/slot_map.cu", "sm_90", (*options(), "-Dreturn=nowhere"))
