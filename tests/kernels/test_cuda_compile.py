"""Every CUDA kernel compiles for every architecture it is meant for, without a GPU, a driver or a toolkit: NVRTC from
its wheel, called directly."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import training
from nvrtc import compiled

from tieredemb.kernels.compiler import OPTIONS, options
from tieredemb.kernels.row_format import RowFormat
from tieredemb.kernels.source import PACKAGE, text
from tieredemb.lookup.gradient_norm import GradientNorm
from tieredemb.lookup.optimizer import recipe_file, recipe_flags, state_width

ARCHITECTURES = ("75", "90", "100")  # compute capabilities
PLAIN = (
    "kernels/copies.cu",
    "hash/slot_map.cu",
    "cache/policy.cu",
    "cache/plan.cu",
    "cache/device/key_ranges.cu",
    "lookup/bags.cu",
    "lookup/exact_sum.cu",
    "lookup/homes_sort.cu",
    "lookup/spoilt.cu",
    "sharding/owners.cu",
    "sharding/padding.cu",
    "sharding/barrier.cu",
    "sharding/exchange_clock.cu",
    "sharding/peer_exchange.cu",
)
BY_ROW = (
    "doctor/probe.cu",
    "storage/initial.cu",
    "cache/device/transfer.cu",
    "lookup/embedding_bag.cu",
    "sharding/occurrences.cu",
)
OPTIMIZERS = dict(zip(training.NAMES, training.OPTIMIZERS, strict=True)) | {"norms": GradientNorm()}
FLOAT, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
ROWS = [(FLOAT, 1), (FLOAT, 6), (FLOAT, 300), (HALF, 6), (HALF, 64), (BFLOAT16, 100), (BFLOAT16, 128)]


# of optimizers, which share all kernels: one that moves the rows of a batch, one with a state a row, one that moves all
OPTIMISED = (*PLAIN, *BY_ROW, "SGD", "RowWiseAdagrad", "Adam", "norms")


@functools.cache
def whole(file: str) -> tuple[str, str]:
    """The compiler's log and PTX of a file that is optimised and becomes machine code, for sm_90, which takes most of
    its time: once for all tests here. Rows are floats."""
    return compiled(file_of(file), "sm_90", row_flags(file, torch.float32, 128))


def read_for(file: str, flags: tuple[str, ...], architecture: str = "90") -> tuple[str, str]:
    """The compiler's log and PTX of code that it is to read alone."""
    return compiled(file_of(file), f"compute_{architecture}", (*flags, "--device-debug"))


def file_of(name):
    """The file that is compiled for an optimizer, or the one of that name."""
    return recipe_file(OPTIMIZERS[name]) if name in OPTIMIZERS else name


def test_every_cuda_file_is_compiled_here():
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.cu")}
    assert found == {*PLAIN, *BY_ROW, *map(file_of, OPTIMIZERS)}


@pytest.mark.parametrize("file", [*PLAIN, *BY_ROW, *OPTIMIZERS])
def test_kernel_compiles_without_a_warning(file):
    is_first = file == of_one_file(file)
    if file in OPTIMISED:
        assert whole(file)[0] == ""
    for architecture in ARCHITECTURES if is_first else ("90",):
        log, code = read_for(file, row_flags(file, torch.float32, 128), architecture)
        assert log == ""
        assert ("griddepcontrol" in code) == (int(architecture) >= 90)


def of_one_file(name):
    """The first of the optimizers that share a file with it."""
    return next((each for each in OPTIMIZERS if name in OPTIMIZERS and file_of(each) == file_of(name)), name)


def each_second(files, cases):
    """(file, *case): all cases of a file are those of the next, too; each has every second one."""
    return [(file, *case) for n, file in enumerate(files) for case in cases[n % 2 :: 2]]


def row_flags(file, dtype, width):
    """What the files are compiled with for rows; an optimizer's with the names of its numbers, too."""
    if file in PLAIN:
        return options()
    optimizer = next((each for name, each in OPTIMIZERS.items() if file in (name, recipe_file(each))), None)
    if optimizer is None:
        return options(dtype, width)
    words = 2 if isinstance(optimizer, GradientNorm) else state_width(optimizer, width)
    row = RowFormat(width=width, dtype=dtype, state_width=words)
    return (*OPTIONS, *row.flags, *recipe_flags(optimizer))


@pytest.mark.parametrize(
    ("file", "dtype", "width"),
    [*((file, *row) for file in BY_ROW for row in ROWS), *each_second(OPTIMIZERS, ROWS)],
)
def test_row_kernel_compiles_for_every_format_and_width(file, dtype, width):
    assert read_for(file, row_flags(file, dtype, width))[0] == ""


BATCHES = [(("-DUNALIGNED",),), (("-DUNCACHED", "-DHAS_MAX"),), (("-DSHARED", "-DHAS_MAX"),), (("-DSEPARATE",),)]
LOOKUPS = ("cache/plan.cu", "lookup/embedding_bag.cu", "sharding/occurrences.cu")


@pytest.mark.parametrize(
    ("file", "flags"), [*((file, *each) for file in LOOKUPS for each in BATCHES), *each_second(OPTIMIZERS, BATCHES)]
)
def test_kernel_compiles_with_what_batches_ask_for(file, flags):
    assert read_for(file, (*row_flags(file, torch.bfloat16, 12), *flags))[0] == ""


AWAY = ("-DUNCACHED", "-DSEPARATE")


# each format with either, and either in vectors and without: all of them take these compilers minutes
ROUNDED = [(BFLOAT16, 128, ()), (BFLOAT16, 12, AWAY), (HALF, 64, AWAY), (HALF, 7, ())]


@pytest.mark.parametrize(
    ("file", "dtype", "width", "more"), each_second([name for name in OPTIMIZERS if name != "norms"], ROUNDED)
)
def test_update_compiles_with_stochastic_rounding(file, dtype, width, more):
    assert read_for(file, (*row_flags(file, dtype, width), "-DSTOCHASTIC", *more))[0] == ""


@pytest.mark.parametrize("flags", [("-DCLIENTS",), ("-DUNCACHED", "-DCLIENTS")])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", ["cache/plan.cu", "cache/device/transfer.cu"])
def test_kernel_compiles_with_what_clients_ask_for(file, architecture, flags):
    assert read_for(file, (*row_flags(file, torch.float32, 128), *flags), architecture)[0] == ""


@pytest.mark.parametrize("output", ["-DOUT_FLOAT", "-DOUT_HALF", "-DOUT_BFLOAT16"])
@pytest.mark.parametrize(("dtype", "width"), ROWS)
def test_lookup_compiles_for_outputs_of_another_dtype(dtype, width, output):
    for more in ((), ("-DUNALIGNED", "-DHAS_MAX")):
        assert read_for("lookup/embedding_bag.cu", (*options(dtype, width), output, *more))[0] == ""


# --- the first statement ----------------------------------------------------------------------------------------------

KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*\))?\s*(\w+)\([^)]*\)\s*\{\s*([^;]*;)')


def kernels(file):
    """Name and first statement of every kernel of a file."""
    code = re.sub("//[^\n]*", "", text(file_of(file)))
    found = KERNEL.findall(code)
    assert len(found) == code.count("__global__")
    return found


@pytest.mark.parametrize("file", [*PLAIN, *BY_ROW, *OPTIMIZERS])
def test_kernel_waits_for_the_one_before_it_first(file):
    """A launch may begin before that has ended: without the wait a GPU reads old numbers, now and then."""
    for name, first in kernels(file):
        assert first == "wait_for_prior_kernel();", name


@pytest.mark.parametrize("file", OPTIMISED)
def test_compiler_moves_no_access_to_memory_before_the_wait(file):
    bodies = whole(file)[1].split(".entry")[1:]
    assert len(bodies) == len(kernels(file))
    for body in bodies:
        before, wait, _ = body.partition("griddepcontrol.wait;")
        assert wait
        assert re.findall(r"\s(?:ld|st|atom|red|bar|bra|ret)\b(?!\.param)\S*", before) == []


def test_a_broken_kernel_fails():
    with pytest.raises(AssertionError, match="undefined"):
        read_for("hash/slot_map.cu", (*options(), "-Dreturn=nowhere"))
