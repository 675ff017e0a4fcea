"""CPU kernels: numba functions that release the GIL, and the device functions that they share.

Compiled code is cached on disk by numba; the first process says that it compiles. The threads that run kernels are in
parallel_cpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import overload
from numba.np.numpy_support import as_dtype
from numba.np.unsafe.ndarray import to_fixed_tuple

from tieredemb.kernels.compile_notice import tell_of_compiling
from tieredemb.kernels.row_format import codec_of


def jit(function: Callable[..., Any]) -> Any:
    """Compiles a kernel of one thread: no GIL, no reassociation, no contraction that the source does not ask for,
    cached on disk."""
    return numba.njit(nogil=True, cache=True, error_model="numpy")(function)


def inline(function: Callable[..., Any]) -> Any:
    """Decorator of a device function: compiled into each kernel that calls it, at each call. A call would pass every
    array as seven words."""
    return numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's `intrinsic`: a device function that is one LLVM instruction."""
    return numba.extending.intrinsic(function)


as_tuple = to_fixed_tuple  # (array, length that is a literal): its elements, inside kernels only

tell_of_compiling()


def without_owner(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Emits a value of numba's type `kind` whose arrays name no owner of their memory."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = array.meminfo.type(None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        kinds: Any = kind
        parts = zip(kinds, cgutils.unpack_tuple(builder, value), strict=True)
        return context.make_tuple(builder, kind, [without_owner(context, builder, *part) for part in parts])
    return value


@intrinsic
def borrowed(typingctx, value):
    """An array, or a tuple of arrays and other values, whose references are not counted.

    numba counts a reference, atomically, wherever a loop hands an array to a device function behind a branch. In the
    kernels of dense optimizers that took longer than the work on a row, and made threads wait for each other. The owner
    has to live on: what a kernel allocates does until its `keep`. Arguments of a kernel `over_ranges` are borrowed.
    """

    def codegen(context, builder, signature, args):
        return without_owner(context, builder, signature.args[0], args[0])

    return value(value), codegen


@intrinsic
def keep(typingctx, array):
    """Makes an array that a kernel has allocated live until here. numba frees it after its last use, and takes no
    notice of those of what is `borrowed` from it."""

    def codegen(context, builder, signature, args):
        return context.get_dummy_value()

    return types.void(array), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """`a * b + c` rounded once, in float32."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def ask_for_line(builder: Any, pointer: Any, *, to_write: bool = False) -> None:
    """Emits what asks for the cache line at an LLVM pointer, for what `prefetch` and its like are made of."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    builder.call(function, [builder.bitcast(pointer, byte), word(int(to_write)), word(3), word(1)])


@intrinsic
def prefetch(typingctx, array, index):
    """Asks for the cache line of `array.ravel()[index]` (C-contiguous). Never faults."""

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        view = context.make_array(array_type)(context, builder, args[0])
        ask_for_line(builder, builder.gep(view.data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def _half_to_float(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _float_to_half(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def float_bits(typingctx, value):
    """The bits of a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def bits_float(typingctx, value):
    """The float32 whose bits are the given uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


def load(array: Any, row: int, column: int) -> float:
    """Weight `column` of a row as float32, whatever carries it (`row_format`). Inside kernels only.

    Indices are taken as unsigned, here and in `store`: numba tests every signed one for being negative, counted from
    the end, and that keeps loops from being vectorised (a pooled lookup took four times as long).
    """
    raise RuntimeError("a kernel function")


@overload(load, inline="always")
def _load(array, row, column):
    if array.dtype == types.float32:
        return lambda array, row, column: array[np.uint64(row), np.uint64(column)]
    if array.dtype == types.uint16:
        return lambda array, row, column: _half_to_float(array[np.uint64(row), np.uint64(column)])
    if array.dtype == types.int16:
        return lambda array, row, column: _bfloat16_to_float(array[np.uint64(row), np.uint64(column)])
    return _codec(array)[1].load


def store(array: Any, row: int, column: int, value: float) -> None:
    """Rounds the float32 `value` to nearest even into `array[row, column]`, of rows that are direct. Inside kernels
    only."""
    raise RuntimeError("a kernel function")


@inline
def _bfloat16_to_float(bits):
    return bits_float(np.uint32(np.uint16(bits)) << np.uint32(16))


@inline
def _bfloat16_bits(value):
    bits = float_bits(value)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    quiet = bits | np.uint32(0x400000)  # a NaN stays a NaN
    chosen = quiet if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded
    return np.int16(np.uint16(chosen >> np.uint32(16)))


@overload(store, inline="always")
def _store(array, row, column, value):
    if array.dtype == types.float32:

        def store_float(array, row, column, value):
            array[np.uint64(row), np.uint64(column)] = value

        return store_float
    if array.dtype == types.uint16:

        def store_half(array, row, column, value):
            array[np.uint64(row), np.uint64(column)] = _float_to_half(value)

        return store_half

    def store_bfloat16(array, row, column, value):
        array[np.uint64(row), np.uint64(column)] = _bfloat16_bits(value)

    return store_bfloat16


# --- rows that are not an element a weight ----------------------------------------------------------------------------

_DIRECT = (types.float32, types.uint16, types.int16)


def _codec(array: Any) -> Any:
    """Encoding and codec of the rows of an array type that is not direct."""
    return codec_of(as_dtype(array.dtype))


def is_direct(array: Any) -> bool:
    """Whether an element of the rows in `array` is a weight, so that `store` may write it alone: a constant to the
    compiler. Inside kernels only."""
    raise RuntimeError("a kernel function")


@overload(is_direct, inline="always")
def _is_direct(array):
    return (lambda array: True) if array.dtype in _DIRECT else (lambda array: False)


def is_float(array: Any) -> bool:
    """Whether the rows in `array` are float32: a constant to the compiler. Inside kernels only."""
    raise RuntimeError("a kernel function")


@overload(is_float, inline="always")
def _is_float(array):
    return (lambda array: True) if array.dtype == types.float32 else (lambda array: False)


def row_width(array: Any) -> int:
    """Weights of a row in `array`; 0 where it has no columns. Inside kernels only."""
    raise RuntimeError("a kernel function")


@overload(row_width, inline="always")
def _row_width(array):
    if array.dtype in _DIRECT:
        return lambda array: array.shape[1]
    head = _codec(array)[0].head
    return lambda array: max(0, array.shape[1] - head)


def row_store(array: Any, row: int, values: Any) -> None:
    """Rounds float32 `values` (1, D) into a row as a whole. Inside kernels only."""
    raise RuntimeError("a kernel function")


@overload(row_store)
def _row_store(array, row, values):
    if array.dtype in _DIRECT:

        def row_store_direct(array, row, values):
            for d in range(values.shape[1]):
                store(array, row, d, values[0, d])

        return row_store_direct
    return _codec(array)[1].row_store


def weight_copy(out: Any, row: int, column: int, array: Any, home: int, d: int) -> None:
    """Copies weight `d` of a row to an element of `out`, bit by bit where both have one dtype. Inside kernels only."""
    raise RuntimeError("a kernel function")


@overload(weight_copy, inline="always")
def _weight_copy(out, row, column, array, home, d):
    if out.dtype == array.dtype and array.dtype in _DIRECT:

        def copy_bits(out, row, column, array, home, d):
            out[np.uint64(row), np.uint64(column)] = array[np.uint64(home), np.uint64(d)]

        return copy_bits

    def copy_value(out, row, column, array, home, d):
        store(out, row, column, load(array, home, d))

    return copy_value


@inline
def row_load(array, row, values):
    """Reads a row as a whole into float32 `values` (1, D)."""
    for d in range(values.shape[1]):
        values[0, d] = load(array, row, d)
