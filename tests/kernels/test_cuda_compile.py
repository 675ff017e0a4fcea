"""Every CUDA kernel compiles for every architecture it is meant for, without a GPU, a driver or a toolkit: NVRTC from
its wheel, called directly."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch
from nvrtc import compiled

from tieredemb.kernels.compiler import Kernel, options
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


# --- launches ---------------------------------------------------------------------------------------------------------

WORDS = {*Kernel.DTYPES, "n", "i", "x", "d", "p"}
SCALARS = {"i64": "n", "int": "i", "u32": "i", "float": "x", "double": "d"}
KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*\))?\s*(\w+)\(([^)]*)\)\s*\{\s*([^;]*;)')


def kernels(file):
    """Name, parameters and first statement of every kernel of a file."""
    code = re.sub("//[^\n]*", "", text(file))
    found = KERNEL.findall(code)
    assert len(found) == code.count("__global__")
    return found


def parameters():
    """The parameters of every kernel, by name: `*` for a pointer, else the word that launches give it."""
    found = {}
    for file in (*PLAIN, *BY_ROW):
        for name, given, _ in kernels(file):
            words = ["*" if "*" in one else SCALARS[one.split()[-2]] for one in given.split(",")]
            found.setdefault(name, []).append(words)
    return found


def launches(path, names):
    """Where `path` names a kernel and, beside it, the words of its arguments: line, name, words."""
    tree = ast.parse(path.read_text())
    texts = {}  # of names, by line: functions call theirs alike
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            texts |= {(target.id, node.lineno): node.value.value for target in node.targets if hasattr(target, "id")}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for first, second in itertools.pairwise(call.args):
            if isinstance(first, ast.Constant) and first.value in names:
                parts = second.values if isinstance(second, ast.JoinedStr) else [second]
                parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in parts]
                above = {name: text for (name, line), text in sorted(texts.items()) if line <= call.lineno}
                words = [
                    above.get(part.id) if isinstance(part, ast.Name) else getattr(part, "value", None) for part in parts
                ]
                if all(isinstance(word, str) for word in words) and {*"".join(words).split()} <= WORDS:
                    yield call.lineno, first.value, "".join(words).split()


def test_launches_pass_what_the_kernels_take():
    """A number in a pointer's place, or one argument too few, is not seen before a GPU runs it."""
    taken, launched = parameters(), set()
    for path in (*PACKAGE.rglob("*.py"), *Path(__file__).parents[2].glob("[bt]e*/**/*.py")):
        for line, name, words in launches(path, taken):
            given = [word if word in SCALARS.values() else "*" for word in words]
            launched.add(name)
            assert given in taken[name], f"{path.name}:{line}: {name}"
    assert launched == set(taken)


@pytest.mark.parametrize("file", [*PLAIN, *BY_ROW])
def test_kernel_waits_for_the_one_before_it_first(file):
    """A launch may begin before that has ended: without the wait a GPU reads old numbers, now and then."""
    for name, _, first in kernels(file):
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
