"""CPU kernels: numba functions that release the GIL, and the threads that run them.

A kernel takes a half-open range `(lo, hi, …)` and owns its outputs there, so results do not depend on the number of
threads. Our own threads rather than numba's: its OpenMP layer dies after a fork and its workqueue layer aborts when
two Python threads enter it, and prefetching needs both. Compiled code is cached on disk by numba; the first process
says that it compiles.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import overload
from numba.np.numpy_support import as_dtype
from numba.np.unsafe.ndarray import to_fixed_tuple

from tieredemb.kernels.compile_notice import tell_of_compiling
from tieredemb.kernels.row_format import RowFormat, codec_of


def jit(function: Callable[..., Any]) -> Any:
    """Compiles a kernel: no GIL, no reassociation, no contraction that the source does not ask for, cached on disk."""
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

_POOLS: dict[bool, tuple[int, int, ThreadPoolExecutor]] = {}  # (pid, threads, pool): a fork leaves its threads behind
_LOCAL = threading.local()


def use_own_threads() -> None:
    """Kernels that this thread calls run on threads apart from those of all others, which they would keep waiting."""
    _LOCAL.apart = True


def _pool(threads: int) -> ThreadPoolExecutor:
    apart = getattr(_LOCAL, "apart", False)
    known = _POOLS.get(apart)
    if known is None or known[0] != os.getpid() or known[1] < threads:
        pool = ThreadPoolExecutor(threads, thread_name_prefix="tieredemb")
        known = _POOLS[apart] = (os.getpid(), threads, pool)
    return known[2]


def num_threads() -> int:
    """Threads that kernels may use: those of torch (`torch.set_num_threads`)."""
    return torch.get_num_threads()


class _Job:
    """The ranges of one call that threads of the pool run, and what came of them."""

    def __init__(self, kernel: Callable[..., Any], ranges: list[tuple[int, int]], args: tuple[Any, ...]) -> None:
        self._kernel, self._args = kernel, args
        self._left = deque(enumerate(ranges))
        self._running = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.results: list[Any] = [None] * len(ranges)

    def work(self) -> None:
        """Runs ranges until none is left."""
        while True:
            with self._changed:
                if not self._left:
                    return
                number, (lo, hi) = self._left.popleft()
                self._running += 1
            try:
                self.results[number] = self._kernel(lo, hi, *self._args)
            except BaseException as error:
                self._error = error
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def wait(self) -> None:
        """Returns once every range was run, and raises what one of them has raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left and not self._running)
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Returns once no range runs, and begins none any more: its caller was interrupted."""
        with self._changed:
            self._left.clear()
            self._changed.wait_for(lambda: not self._running)


def end_interrupted() -> None:
    """Waits for kernels that an interrupt has left running on other threads: they write to memory which its next user
    takes for its own. Costs nothing where there are none."""
    jobs = getattr(_LOCAL, "interrupted", None)
    while jobs:
        jobs[-1].end()
        jobs.pop()


def parallel_for(kernel: Callable[..., Any], bounds: list[int], *args: Any) -> list[Any]:
    """Runs `kernel(lo, hi, *args)` over the consecutive ranges that `bounds` cuts, one thread each.

    Waits for all of them; returns their results in order. The last range runs on the calling thread. An exception that
    comes amid the call, an interrupt for one, leaves no range running; some may not have been run.
    """
    if len(bounds) == 2:
        end_interrupted()
        return [kernel(*bounds, *args)] if bounds[1] > bounds[0] else []
    return _run(kernel, [(lo, hi) for lo, hi in itertools.pairwise(bounds) if hi > lo], args, [])


def _run(
    kernel: Callable[..., Any], ranges: list[tuple[int, int]], args: tuple[Any, ...], jobs: list[_Job]
) -> list[Any]:
    """`jobs`: gets what other threads run of it."""
    end_interrupted()
    if len(ranges) < 2 or not threading.main_thread().is_alive():  # no new threads once the interpreter shuts down
        return [kernel(lo, hi, *args) for lo, hi in ranges]
    pool, job = _pool(len(ranges) - 1), _Job(kernel, ranges[:-1], args)
    jobs.append(job)
    try:
        for _ in ranges[:-1]:
            pool.submit(job.work)
        last = kernel(*ranges[-1], *args)
        job.wait()
    except BaseException:
        if not hasattr(_LOCAL, "interrupted"):
            _LOCAL.interrupted = []
        _LOCAL.interrupted.append(job)  # where another interrupt comes before its end
        end_interrupted()
        raise
    return [*job.results, last]


class Pass:
    """`kernel(lo, hi, *args, done)` over the ranges that `bounds` cuts, each of them once, also where an interrupt
    comes in between: `done`, uint8 (bounds[-1],), says of the range that begins at `lo` whether it was run, and the
    kernel sets it when it ends, in compiled code that nothing interrupts. `run` goes on with what is left."""

    def __init__(self, kernel: Callable[..., Any], bounds: list[int], *args: Any) -> None:
        self._kernel, self._args = kernel, args
        self._ranges = [(lo, hi) for lo, hi in itertools.pairwise(bounds) if hi > lo]
        self._done = np.zeros(bounds[-1], np.uint8)
        self._jobs: list[_Job] = []

    @property
    def begun(self) -> bool:
        """Whether a range was run."""
        return any(self._done[lo] for lo, _ in self._ranges)

    def run(self) -> None:
        """Runs what was not run before, as `parallel_for` does."""
        for job in self._jobs:  # whoever began it
            job.end()
        left = [(lo, hi) for lo, hi in self._ranges if not self._done[lo]]
        _run(self._kernel, left, (*self._args, self._done), self._jobs)


def even_bounds(n: int, grain: int) -> list[int]:
    """Cuts 0 … n into at most `num_threads()` even ranges of at least `grain`: below it a thread costs more than
    it brings (a hand-over takes about 20 microseconds)."""
    if n < 2 * grain:
        return [0, n]
    parts = max(1, min(num_threads(), n // max(1, grain)))
    return [n * part // parts for part in range(parts + 1)]


def _without_owner(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Emits a value of numba's type `kind` whose arrays name no owner of their memory."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = array.meminfo.type(None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        kinds: Any = kind
        parts = zip(kinds, cgutils.unpack_tuple(builder, value), strict=True)
        return context.make_tuple(builder, kind, [_without_owner(context, builder, *part) for part in parts])
    return value


@intrinsic
def borrowed(typingctx, value):
    """An array, or a tuple of arrays and other values, whose references are not counted.

    numba counts a reference, atomically, wherever a loop hands an array to a device function behind a branch. In the
    kernels of dense optimizers that took longer than the work on a row, and made threads wait for each other. The owner
    has to live on: arguments of a kernel do, and what the kernel allocates does until its `keep`.
    """

    def codegen(context, builder, signature, args):
        return _without_owner(context, builder, signature.args[0], args[0])

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


@jit
def _rows_decode(lo, hi, rows, values):
    for row in range(lo, hi):
        for d in range(values.shape[1]):
            values[row, d] = load(rows, row, d)


@jit
def _rows_encode(lo, hi, values, rows):
    for row in range(lo, hi):
        row_store(rows, row, values[row : row + 1])


def rows_decode(rows: Any, values: Any) -> None:
    """Writes `rows`, as they are carried, to `values`, float32 (K, D)."""
    parallel_for(_rows_decode, even_bounds(len(rows), 1024), rows, values)


def rows_encode(values: Any, rows: Any) -> None:
    """Writes `values`, float32 (K, D), to `rows`, as they are carried."""
    parallel_for(_rows_encode, even_bounds(len(rows), 1024), values, rows)


def in_encoding(rows: Any, now: RowFormat, wanted: RowFormat) -> Any:
    """Rows (K, ·) as they are carried `now`, as `wanted` carries them: rounded to nearest where that is coarser."""
    if now.encoding == wanted.encoding:
        return rows
    values = np.empty((len(rows), now.width), np.float32)
    rows_decode(rows, values)
    found = np.empty((len(rows), wanted.columns), wanted.carrier)
    rows_encode(values, found)
    return found
