"""What is read of our CUDA sources, against the compiler; and that what is not understood is refused."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from nvrtc import compiled
from test_cuda_compile import row_flags

from tieredemb.kernels import constants
from tieredemb.kernels.compiler import options
from tieredemb.kernels.source import PACKAGE, SourceError, Type, read, text

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.cu"))


@pytest.fixture
def source(tmp_path):
    """Reads a file of the given lines."""

    def read_lines(*lines):
        file = tmp_path / "some.cu"
        file.write_text("\n".join(lines) + "\n")
        return read(str(file))

    yield read_lines
    read.cache_clear()


def laid_out(file):
    """The layouts of a file's structs but those whose size depends on flags: of these no kernel may take any."""
    source = read(file)
    taken = {source.pointed(each.type).name for kernel in source.kernels for each in source.parameters(kernel)}
    found = [source.layout(name) for name in source.structs if name in taken]
    for name in {*source.structs} - taken:
        with contextlib.suppress(SourceError):
            found.append(source.layout(name))
    return found


# --- against the compiler ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_is_read(file):
    source = read(file)
    assert len(source.kernels) == text(file).count("__global__")
    for kernel in source.kernels:
        assert source.parameters(kernel)
        assert source.bounds(kernel) in ((), (256,), (1024,), (1024, 1))


@pytest.mark.parametrize("file", FILES)
def test_structs_lie_as_the_compiler_lays_them(file):
    claims = []
    for layout in laid_out(file):
        claims.append(f"sizeof({layout.name}) == {layout.size} && alignof({layout.name}) == {layout.alignment}")
        for field in layout.fields:
            claims.append(f"__builtin_offsetof({layout.name}, {field.name}) == {field.offset}")
            claims.append(f"sizeof({layout.name}::{field.name}) == {field.size}")
    assert claims
    asserts = "".join(f'static_assert({claim}, "");\n' for claim in claims)
    compiled(file, "compute_90", (*row_flags(file, torch.float32, 12), "--device-debug"), asserts)  # read alone


def test_kernels_count_where_the_totals_have_it():
    """Not every compiler takes an offset of a field as a constant: the words are numbers there."""
    words = [leaf.name for leaf in read("cache/plan.cu").leaves("Totals")]
    found = re.findall(r"(OF_\w+) = (\d+)", text("cache/plan.cu"))
    first = {"OF_LOOKUPS": "lookups", "OF_MISSES": "overflow", "OF_SWAPS": "generated", "OF_WRITES": "written_back"}
    assert {name: words[int(word)] for name, word in found} == first


def test_a_wrong_layout_fails():
    with pytest.raises(AssertionError, match="static assertion failed"):
        compiled("hash/slot_map.cu", "sm_90", options(), 'static_assert(sizeof(Cell) == 15, "");')


# --- by example -------------------------------------------------------------------------------------------------------


def test_kernel_is_read_with_its_parameters(source):
    found = source(
        "typedef long long i64;",
        "constexpr int MOST = 1 << 8;",
        'extern "C" __global__ void __launch_bounds__(MOST, 2) rows_add(const i64 *keys, i64 n, float by) {',
        '    for (i64 i = 0; i < n; i++) { asm("}"); }  // }',
        "}",
    )
    assert found.kernels == ("rows_add",)
    assert found.bounds("rows_add") == (256, 2)
    given = [(each.name, each.type) for each in found.parameters("rows_add")]
    assert given == [("keys", Type("i64", True)), ("n", Type("i64", False)), ("by", Type("float", False))]


def test_struct_is_laid_out_with_arrays_pointers_and_structs_inside(source):
    found = source(
        "constexpr int N = 2, M = 3 * (N + 1);",
        "struct Pair { int a; double b; };",
        "struct alignas(32) Whole { unsigned char c, d[N][M]; const Pair *at, *end; Pair pair; };",
    )
    whole = found.layout("Whole")
    assert [(field.name, field.offset, field.size) for field in whole.fields] == [
        *(("c", 0, 1), ("d", 1, 18), ("at", 24, 8), ("end", 32, 8), ("pair", 40, 16)),
    ]
    assert (whole.size, whole.alignment) == (64, 32)
    assert whole["d"].counts == (2, 9)
    assert [(leaf.name, leaf.offset) for leaf in found.leaves("Whole")][-2:] == [("a", 40), ("b", 48)]


def test_header_is_read_and_put_in_once():
    assert text("cache/plan.cu").count("struct Clock {") == 1
    assert "#include" not in text("cache/plan.cu")
    assert "Clock" in read("cache/plan.cu").structs


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("class Row { int a; };", "'class'"),
        ("enum Kind { A, B };", "'enum'"),
        ("int global;", "'int'"),
        ("#undef N", "'#undef N'"),
        ('#include "nowhere.cuh"', "no header 'nowhere.cuh'"),
        ("struct A { int f : 3; };", "':'"),
        ("struct A { int &f; };", "'&'"),
        ("struct N { int a; };", "'N' is not understood where it is declared again"),
        ('extern "C" __global__ void k(int a[3]) {}', r"'\['"),
        ('extern "C" __global__ void k(const int &a) {}', "'&'"),
        ('extern "C" __global__ int k(int a) {}', "'extern'"),
        ('extern "C" __global__ void k(int a) {', "the file ends"),
    ],
)
def test_declaration_that_is_not_understood_is_refused_by_its_line(source, line, said):
    with pytest.raises(SourceError, match=rf"some\.cu:2: .*{said}"):
        source("constexpr int N = 1;", line)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["struct A { B b; };"], "some.cu:1: type 'B' is declared nowhere"),
        (["struct A { int a[N]; };"], "some.cu:1: 'N' is not understood in a size"),
        (["struct A { int a[sizeof(int)]; };"], "'sizeof' is not understood in a size"),
        (["struct A { int a[010]; };"], "'010' is not understood in a size"),
        (["struct A { int a[1 +]; };"], "some.cu:1: '1 +' is no size"),
        (
            ["#ifdef HALF", "typedef short T;", "#else", "typedef float T;", "#endif", "struct A { T a; };"],
            "some.cu:6: T",
        ),
        (["#ifndef N", "#define N 2", "#endif", "struct A { int a[N]; };"], "some.cu:4: N stands under a condition"),
        (["#ifdef N", "struct A { int a; };", "#endif"], "A stands under a condition"),
    ],
)
def test_size_that_is_not_known_is_refused(source, lines, said):
    with pytest.raises(SourceError) as refused:
        source(*lines).layout("A")
    assert said in str(refused.value)


def test_kernel_of_an_unknown_type_is_refused(source):
    kernel = 'extern "C" __global__ void k(Row *rows) {}'
    with pytest.raises(SourceError, match=r"some\.cu:1: type 'Row' is declared nowhere"):
        source(kernel).parameters("k")


@pytest.mark.parametrize("ask", [lambda s: s.parameters("x"), lambda s: s.layout("x"), lambda s: s.layout("A")["x"]])
def test_what_is_not_there_is_refused(source, ask):
    with pytest.raises(SourceError, match=r"no (kernel|struct|field) x"):
        ask(source("struct A { int a; };"))


# --- numbers of both sides --------------------------------------------------------------------------------------------


def test_constants_have_their_values_in_c():
    numbers = {name: value for name, value in vars(constants).items() if name.isupper() and name != "MODES"}
    assert len(numbers) > 10
    claims = "".join(
        f'static_assert({name} == {value}{"ll" * isinstance(value, int)}, "");\n' for name, value in numbers.items()
    )
    compiled("hash/slot_map.cu", "sm_90", options(), claims)


def test_constant_is_written_once():
    """None is declared in a CUDA file again, in another scope say."""
    names = [name for name in vars(constants) if name.isupper()]
    again = re.compile(rf"(?:constexpr|const|#define)\b[^;\n]*\b({'|'.join(names)})\b\s*(?:=|\d)")
    for path in (*PACKAGE.rglob("*.cu"), *PACKAGE.rglob("*.cuh")):
        assert again.findall(path.read_text()) == [], path.name
