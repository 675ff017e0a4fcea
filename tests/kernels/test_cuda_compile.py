"""Every CUDA kernel compiles for every architecture it is meant for, without a GPU, a driver or a toolkit: NVRTC from
its wheel, called directly."""

from __future__ import annotations

import ast
import ctypes
import functools
import itertools
import re
from pathlib import Path

import pytest
import torch
import training

from tieredemb.kernels.compiler import OPTIONS, PACKAGE, Kernel, options, source
from tieredemb.kernels.row_format import RowFormat
from tieredemb.lookup.optimizer import recipe_file, recipe_flags, state_width

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
PLAIN = ("hash/slot_map.cu", "cache/policy.cu", "cache/plan.cu", "lookup/bags.cu")
BY_ROW = (
    "doctor/probe.cu",
    "storage/initial.cu",
    "cache/device/transfer.cu",
    "lookup/embedding_bag.cu",
)
OPTIMIZERS = {recipe_file(optimizer): optimizer for optimizer in training.OPTIMIZERS}
FLOAT, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
ROWS = [(FLOAT, 1), (FLOAT, 6), (FLOAT, 128), (FLOAT, 300), (HALF, 6), (HALF, 64), (BFLOAT16, 100), (BFLOAT16, 128)]


@functools.cache
def nvrtc() -> ctypes.CDLL:
    package = pytest.importorskip("nvidia", reason="NVRTC's wheel is missing: pip install tieredemb[dev]")
    found = sorted(path for root in package.__path__ for path in Path(root).rglob("libnvrtc.so.*"))
    if not found:
        pytest.skip("NVRTC's wheel is missing: pip install tieredemb[dev]")
    for builtins in found[-1].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))  # NVRTC opens it by name alone, which its own folder does not answer to
    return ctypes.CDLL(str(found[-1]))


def compiled(file: str, architecture: str, flags: tuple[str, ...]) -> tuple[str, str]:
    """The compiler's log, empty where it had nothing to say, and PTX. Fails the test on an error."""
    library, program = nvrtc(), ctypes.c_void_p()
    code = source(file).encode()
    library.nvrtcCreateProgram(ctypes.byref(program), code, file.encode(), 0, None, None)
    given = [flag.encode() for flag in (*flags, f"--gpu-architecture={architecture}")]
    result = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    log, ptx = (text_of(program, what) for what in ("ProgramLog", "PTX"))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert result == 0, log
    return log, ptx


def text_of(program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc(), f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def compile_for(file: str, architecture: str, flags: tuple[str, ...]) -> str:
    return compiled(file, architecture, flags)[0]


def test_every_cuda_file_is_compiled_here():
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.cu")}
    assert found == {*PLAIN, *BY_ROW, *OPTIMIZERS}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", PLAIN)
def test_kernel_compiles_without_a_warning(file, architecture):
    assert compile_for(file, architecture, options()) == ""


def row_flags(file, dtype, width):
    """What the files are compiled with for rows; an optimizer's with the names of its numbers, too."""
    if file in PLAIN:
        return options()
    if file not in OPTIMIZERS:
        return options(dtype, width)
    optimizer = OPTIMIZERS[file]
    row = RowFormat(width=width, dtype=dtype, state_width=state_width(optimizer, width))
    return (*OPTIONS, *row.flags, *recipe_flags(optimizer))


@pytest.mark.parametrize(("dtype", "width"), ROWS)
@pytest.mark.parametrize("file", [*BY_ROW, *OPTIMIZERS])
def test_row_kernel_compiles_for_every_format_and_width(file, dtype, width):
    for architecture in ARCHITECTURES if (width, dtype) == (128, torch.float32) else ("sm_80",):
        assert compile_for(file, architecture, row_flags(file, dtype, width)) == ""


@pytest.mark.parametrize("flags", [("-DSLOTLESS",), ("-DHAS_MAX",), ("-DUNALIGNED",), ("-DSLOTLESS", "-DHAS_MAX")])
@pytest.mark.parametrize("file", ["cache/plan.cu", "lookup/embedding_bag.cu", *OPTIMIZERS])
def test_kernel_compiles_with_what_batches_ask_for(file, flags):
    assert compile_for(file, "sm_90", (*row_flags(file, torch.bfloat16, 12), *flags)) == ""


@pytest.mark.parametrize("output", ["-DOUT_FLOAT", "-DOUT_HALF", "-DOUT_BFLOAT16"])
@pytest.mark.parametrize(("dtype", "width"), ROWS)
def test_lookup_compiles_for_outputs_of_another_dtype(dtype, width, output):
    for more in ((), ("-DUNALIGNED", "-DHAS_MAX")):
        assert compile_for("lookup/embedding_bag.cu", "sm_90", (*options(dtype, width), output, *more)) == ""


# --- launches ---------------------------------------------------------------------------------------------------------

WORDS = {*Kernel.DTYPES, "n", "i", "x", "d", "p"}
SCALARS = {"i64": "n", "int": "i", "u32": "i", "float": "x", "double": "d"}
KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*\))?\s*(\w+)\(([^)]*)\)\s*\{\s*([^;]*;)')


def kernels(file):
    """Name, parameters and first statement of every kernel of a file."""
    text = re.sub("//[^\n]*", "", source(file))
    found = KERNEL.findall(text)
    assert len(found) == text.count("__global__")
    return found


def parameters():
    """The parameters of every kernel, by name: `*` for a pointer, else the word that launches give it."""
    found = {}
    for file in (*PLAIN, *BY_ROW, *OPTIMIZERS):
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


@pytest.mark.parametrize("file", [*PLAIN, *BY_ROW, *OPTIMIZERS])
def test_kernel_waits_for_the_one_before_it_first(file):
    """A launch may begin before that has ended: without the wait a GPU reads old numbers, now and then."""
    for name, _, first in kernels(file):
        assert first == "wait_for_prior_kernel();", name


@pytest.mark.parametrize("file", [*PLAIN, *BY_ROW, *OPTIMIZERS])
def test_compiler_moves_no_access_to_memory_before_the_wait(file):
    flags = row_flags(file, torch.float32, 128)
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
