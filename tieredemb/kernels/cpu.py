"""CPU kernels: numba functions that release the GIL, and the device functions that they share.

Compiled code is cached on disk (kernel_cache.py); the first process reports that it compiles. The threads that run
kernels are in parallel_cpu.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.ccallback import CFunc
from numba.core.errors import TypingError
from numba.np.numpy_support import as_dtype
from numba.np.unsafe.ndarray import to_fixed_tuple

from tieredemb.errors import UnsupportedError
from tieredemb.kernels.compile_notice import report_compiling
from tieredemb.kernels.compile_pause import pause_collector_for_compiling
from tieredemb.kernels.device_functions_cpu import device_compiler
from tieredemb.kernels.kernel_cache import KernelCache
from tieredemb.kernels.row_format import codec_of

CONFIG: Any = numba.config  # has no types
if CONFIG.DISABLE_JIT:
    raise UnsupportedError(
        "NUMBA_DISABLE_JIT is set, so numba compiles nothing, but the CPU kernels of tieredemb run as compiled code "
        "alone (on threads without the interpreter, with addresses of memory); unset it (unset NUMBA_DISABLE_JIT), and "
        "start a new process"
    )

_COMPILER = device_compiler()


def jit(function: Callable[..., Any]) -> Any:
    """Compiles a kernel of one thread: no GIL, no reassociation, no contraction unless the source requests it,
    cached on disk."""
    kernel: Any = numba.njit(nogil=True, error_model="numpy")(function)
    kernel._cache = KernelCache(function)
    return kernel


def c_function(function: Callable[..., Any], kinds: list[Any]) -> Any:
    """numba's `cfunc` of a function that returns nothing, compiled for arguments of these types, cached on disk."""
    compiled: Any = CFunc(function, (tuple(kinds), types.void), locals={}, options={})
    compiled._cache = KernelCache(function)
    compiled.compile()
    return compiled


def inline(function: Callable[..., Any]) -> Any:
    """Decorator of a device function: compiled into each kernel that calls it, at each call. A call would pass every
    array as seven words."""
    return numba.njit(nogil=True, error_model="numpy", forceinline=True, pipeline_class=_COMPILER)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's `intrinsic`: a device function that is one LLVM instruction."""
    return numba.extending.intrinsic(function)


as_tuple = to_fixed_tuple  # (array, length that is a literal): its elements, inside kernels only

report_compiling()
pause_collector_for_compiling()


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
    """Keeps an array that a kernel has allocated alive until here. numba frees it after its last use, not counting uses
    of what is `borrowed` from it."""

    def codegen(context, builder, signature, args):
        return context.get_dummy_value()

    return types.void(array), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """`a * b + c` rounded once, in float32."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def prefetch_line(builder: Any, pointer: Any, *, to_write: bool = False) -> None:
    """Emits a prefetch of the cache line at an LLVM pointer."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    builder.call(function, [builder.bitcast(pointer, byte), word(int(to_write)), word(3), word(1)])


@intrinsic
def prefetch(typingctx, array, index):
    """Prefetches the cache line of `array.ravel()[index]` (C-contiguous). Never faults."""

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        view = context.make_array(array_type)(context, builder, args[0])
        prefetch_line(builder, builder.gep(view.data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


def check_contiguous(array: Any) -> None:
    """Elements of an array with gaps would be others, without an error."""
    if array.layout != "C":
        raise TypingError(f"an array of layout C is needed, not {array}")


@intrinsic
def line_elements(typingctx, array):
    """How many elements of `array` a cache line of 64 bytes holds: a constant, where `array.itemsize` is none, by which
    each row would be divided."""

    def codegen(context, builder, signature, args):
        size = context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        return context.get_constant(types.intp, max(1, 64 // size))

    return types.intp(array), codegen


@intrinsic
def item(typingctx, array, index):
    """`array.ravel()[index]` (C-contiguous). The index is not tested for being negative, counted from the end: where a
    kernel reads little else, the tests took it twice as long."""
    check_contiguous(array)

    def codegen(context, builder, signature, args):
        array, index = signature.args
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.load(builder.gep(data, [context.cast(builder, args[1], index, types.intp)]))

    return array.dtype(array, index), codegen


@intrinsic
def put(typingctx, array, index, value):
    """`array.ravel()[index] = value` (C-contiguous), of an index that is not negative."""
    check_contiguous(array)

    def codegen(context, builder, signature, args):
        array, index, value = signature.args
        data = context.make_array(array)(context, builder, args[0]).data
        pointer = builder.gep(data, [context.cast(builder, args[1], index, types.intp)])
        builder.store(context.cast(builder, args[2], value, array.dtype), pointer)
        return context.get_dummy_value()

    return types.void(array, index, value), codegen


@intrinsic
def added(typingctx, array, index, value):
    """Atomically adds to an element of an int64 array of one dimension; returns the old value."""

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", builder.gep(view.data, [args[1]]), args[2], "monotonic")

    return types.int64(array, types.int64, types.int64), codegen


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


# --- rows, whatever carries them (`row_format`) -----------------------------------------------------------------------
#
# Intrinsics rather than functions that numba chooses by type: those took a tenth of a second each to compile, at each
# call. Indices are not tested for being negative, counted from the end, which keeps loops from being vectorised (a
# pooled lookup took four times as long).

DIRECT = (types.float32, types.uint16, types.int16)


def _codec(array: Any) -> Any:
    """Encoding and codec of the rows of an array type that is not direct."""
    return codec_of(as_dtype(array.dtype))


def calling(typingctx: Any, function: Any, *kinds: Any) -> Any:
    """What an intrinsic returns that is a call of one device function, chosen by the types of its arguments."""
    kind = numba.typeof(function)
    signature = typingctx.resolve_function_type(kind, kinds, {})

    def codegen(context, builder, given, args):
        return context.get_function(kind, signature)(builder, args)

    return signature, codegen


_device = functools.cache(inline)  # of a codec's functions


def _element(context: Any, builder: Any, kinds: Any, args: Any) -> tuple[Any, int | None]:
    """The pointer to array[row, column], and its alignment where that is not its type's."""
    array = context.make_array(kinds[0])(context, builder, args[0])
    indices = [context.cast(builder, *each, types.intp) for each in zip(args[1:], kinds[1:], strict=True)]
    pointer = cgutils.get_item_pointer(context, builder, kinds[0], array, indices, wraparound=False)
    return pointer, None if kinds[0].aligned else 1


def _emit_load(context: Any, builder: Any, kinds: Any, args: Any) -> Any:
    pointer, alignment = _element(context, builder, kinds, args)
    return as_floats(builder, builder.load(pointer, align=alignment), kinds[0].dtype)


def _emit_store(context: Any, builder: Any, kinds: Any, args: Any, value: Any) -> None:
    pointer, alignment = _element(context, builder, kinds, args)
    builder.store(rounded_to(builder, value, kinds[0].dtype), pointer, align=alignment)


def _like(value: Any, element: Any) -> Any:
    """The LLVM type of as many elements as `value` has, which is a number or a vector of numbers."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def as_floats(builder: Any, value: Any, carrier: Any) -> Any:
    """Emits as float32 what was loaded of rows that are direct: a number, or a vector of numbers."""
    if carrier == types.float32:
        return value
    if carrier == types.uint16:
        return builder.fpext(builder.bitcast(value, _like(value, ir.HalfType())), _like(value, ir.FloatType()))
    word = _like(value, ir.IntType(32))
    bits = builder.shl(builder.zext(value, word), _every(word, 16))
    return builder.bitcast(bits, _like(value, ir.FloatType()))


def rounded_to(builder: Any, value: Any, carrier: Any) -> Any:
    """Emits a float32, or a vector of them, rounded to nearest even as rows that are direct carry it."""
    if carrier == types.uint16:
        half = builder.fptrunc(value, _like(value, ir.HalfType()))
        return builder.bitcast(half, _like(value, ir.IntType(16)))
    return _bfloat16_bits(builder, value) if carrier == types.int16 else value


def _every(kind: Any, number: int) -> Any:
    """A constant of an LLVM type of integers, the same in each element of a vector."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _bfloat16_bits(builder: Any, value: Any) -> Any:
    word = _like(value, ir.IntType(32))
    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, _every(word, 16)), _every(word, 1))
    rounded = builder.add(builder.add(bits, _every(word, 0x7FFF)), odd)
    quiet = builder.or_(bits, _every(word, 0x400000))  # a NaN stays a NaN
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, _every(word, 0x7FFFFFFF)), _every(word, 0x7F800000))
    chosen = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, _every(word, 16)), _like(value, ir.IntType(16)))


@intrinsic
def load(typingctx, array, row, column):
    """Weight `column` of a row as float32."""
    if array.dtype not in DIRECT:
        return calling(typingctx, _device(_codec(array)[1].load), array, row, column)

    def codegen(context, builder, signature, args):
        return _emit_load(context, builder, signature.args, args)

    return types.float32(array, row, column), codegen


@intrinsic
def store(typingctx, array, row, column, value):
    """Rounds the float32 `value` to nearest even into `array[row, column]`, of rows that are direct."""

    def codegen(context, builder, signature, args):
        if array.dtype in DIRECT:  # others are stored as a whole; this branch is compiled, but never runs
            _emit_store(context, builder, signature.args[:3], args[:3], args[3])
        return context.get_dummy_value()

    return types.void(array, row, column, types.float32), codegen


def constant(value: bool) -> Any:
    """What an intrinsic of one argument returns that is a constant to the compiler."""

    def codegen(context, builder, signature, args):
        return context.get_constant(types.boolean, value)

    return lambda kind: (types.boolean(kind), codegen)


@intrinsic
def is_direct(typingctx, array):
    """Whether an element of the rows in `array` is a weight, so that `store` may write it alone: a constant."""
    return constant(array.dtype in DIRECT)(array)


@intrinsic
def is_float(typingctx, array):
    """Whether the rows in `array` are float32: a constant."""
    return constant(array.dtype == types.float32)(array)


@intrinsic
def row_width(typingctx, array):
    """Weights of a row in `array`; 0 where it has no columns."""
    head = 0 if array.dtype in DIRECT else _codec(array)[0].head

    def codegen(context, builder, signature, args):
        shape = context.make_array(signature.args[0])(context, builder, args[0]).shape
        columns = cgutils.unpack_tuple(builder, shape, 2)[1]
        width = builder.sub(columns, columns.type(head))
        return builder.select(builder.icmp_signed("<", width, width.type(0)), width.type(0), width)

    return types.intp(array), codegen


@inline
def _row_store_direct(array, row, values):
    for d in range(values.shape[1]):
        store(array, row, d, values[0, d])


@intrinsic
def row_store(typingctx, array, row, values):
    """Rounds float32 `values` (1, D) into a row as a whole."""
    function = _row_store_direct if array.dtype in DIRECT else _device(_codec(array)[1].row_store)
    return calling(typingctx, function, array, row, values)


@inline
def _copy_value(out, row, column, array, home, d):
    store(out, row, column, load(array, home, d))


@intrinsic
def weight_copy(typingctx, out, row, column, array, home, d):
    """Copies weight `d` of a row to an element of `out`, bit by bit where both have one dtype."""
    kinds = out, row, column, array, home, d
    if out.dtype != array.dtype or array.dtype not in DIRECT:
        return calling(typingctx, _copy_value, *kinds)

    def codegen(context, builder, signature, args):
        source, alignment = _element(context, builder, signature.args[3:], args[3:])
        value = builder.load(source, align=alignment)
        target, alignment = _element(context, builder, signature.args[:3], args[:3])
        builder.store(value, target, align=alignment)
        return context.get_dummy_value()

    return types.void(*kinds), codegen


@intrinsic
def row_at(typingctx, array, offset):
    """Rows that begin so many elements after the first one of `array`, whose owner has to live on (see `borrowed`)."""
    check_contiguous(array)

    def codegen(context, builder, signature, args):
        made = context.make_array(signature.args[0])(context, builder, args[0])
        made.data = builder.gep(made.data, [args[1]])
        made.meminfo = made.meminfo.type(None)
        return made._getvalue()

    return array(array, types.int64), codegen


@inline
def row_load(array, row, values):
    """Reads a row as a whole into float32 `values` (1, D)."""
    for d in range(values.shape[1]):
        values[0, d] = load(array, row, d)
