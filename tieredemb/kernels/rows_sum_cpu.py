"""The sum of some rows, in registers: most of the work of a lookup on the CPU.

A loop that adds a row to an array in memory checks at each row whether the two overlap, and writes what the next row
reads. Here as many columns as fit in registers are summed over all rows, then the next ones. The loops are emitted as
LLVM code, one for each number of columns: to type and lower them by numba took ten seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types

from tieredemb.kernels.cpu import DIRECT, as_floats, check_contiguous, intrinsic, rounded_to

COLUMNS = 64, 32, 16, 8, 4, 1  # that are summed at once
_LONG, _FLOAT = ir.IntType(64), ir.FloatType()


class _Sum(NamedTuple):
    """The operands of a sum. `data`: for each array the pointer to its first element · `carrier`, `rounded`: numba's
    types of elements of `rows` and `out` · the others are arguments of `rows_sum`."""

    out: Any
    to: Any
    rows: Any
    homes: Any
    step: Any
    first: Any
    stop: Any
    weights: Any
    divisor: Any
    carrier: Any
    rounded: Any


@intrinsic
def rows_sum(typingctx, out, to, rows, homes, step, first, stop, weights, weighted, divisor, width):
    """Writes the sum of rows to `width` elements from `out.ravel()[to]` on: float32, added in their order, each times
    its weight where `weighted`, divided by a `divisor` above 1, and rounded once. The rows are those of occurrences
    first … stop − 1: occurrence i has it at `rows.ravel()[homes[i] * step]`, or none where `homes[i]` is negative. All
    arrays are C-contiguous. For rows that are not direct it is compiled, but never runs."""
    for array in (out, rows, homes, weights):
        check_contiguous(array)
    kinds = types.void(out, to, rows, homes, step, first, stop, weights, weighted, divisor, width)

    def codegen(context, builder, signature, args):
        if rows.dtype not in DIRECT:
            return context.get_dummy_value()
        arrays = [
            context.make_array(kind)(context, builder, arg).data
            for kind, arg in zip(signature.args, args, strict=True)
            if isinstance(kind, types.Array)
        ]
        numbers = [
            context.cast(builder, arg, kind, types.int64)
            for kind, arg in zip(signature.args, args, strict=True)
            if not isinstance(kind, types.Array | types.Boolean)
        ]
        (out_data, rows_data, homes_data, weights_data), (to, step, first, stop, divisor, width) = arrays, numbers
        sums = out_data, to, rows_data, homes_data, step, first, stop, weights_data, divisor
        of = _Sum(*sums, carrier=rows.dtype, rounded=out.dtype)
        with builder.if_else(args[8]) as (then, otherwise):
            for branch, is_weighted in ((then, True), (otherwise, False)):
                with branch:
                    _emit_columns(builder, of, width, is_weighted)
        return context.get_dummy_value()

    return kinds, codegen


def _emit_columns(builder: Any, of: _Sum, width: Any, is_weighted: bool) -> None:
    """Emits the sums of all columns."""
    done = cgutils.alloca_once_value(builder, _LONG(0))
    for count in COLUMNS:
        with _while_left(builder, done, count, width) as column:
            _emit_sum(builder, of, column, count, is_weighted)


@contextlib.contextmanager
def _while_left(builder: Any, done: Any, count: int, width: Any) -> Iterator[Any]:
    """What is emitted inside is repeated while `count` columns or more of the `width` are left; gives the first of
    them. `done`: the pointer to how many were summed."""
    test, body, end = (builder.append_basic_block(name) for name in ("test", "body", "end"))
    builder.branch(test)
    builder.position_at_end(test)
    column = builder.load(done)
    after = builder.add(column, _LONG(count))
    builder.cbranch(builder.icmp_signed("<=", after, width), body, end)
    builder.position_at_end(body)
    yield column
    builder.store(after, done)
    builder.branch(test)
    builder.position_at_end(end)


def _emit_sum(builder: Any, of: _Sum, column: Any, count: int, is_weighted: bool) -> None:
    """Emits the sum of `count` columns."""
    kind = ir.VectorType(_FLOAT, count)
    total = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, [0.0] * count), total)
    with cgutils.for_range(builder, of.stop, start=of.first, intp=_LONG) as occurrence:
        home = builder.sext(builder.load(builder.gep(of.homes, [occurrence.index])), _LONG)
        with builder.if_then(builder.icmp_signed(">=", home, _LONG(0)), likely=True):
            place = builder.add(builder.mul(home, of.step), column)
            row = _vector(builder, of.rows, place, count)
            values = as_floats(builder, builder.load(row, align=of.carrier.bitwidth // 8), of.carrier)
            before = builder.load(total)
            if is_weighted:
                weight = _every(builder, builder.load(builder.gep(of.weights, [occurrence.index])), count)
                name = f"llvm.fma.v{count}f32"  # which llvmlite knows of numbers alone
                fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
                builder.store(builder.call(fma, [weight, values, before]), total)
            else:
                builder.store(builder.fadd(before, values), total)
    with builder.if_then(builder.icmp_signed(">", of.divisor, _LONG(1))):
        divisor = _every(builder, builder.sitofp(of.divisor, _FLOAT), count)
        builder.store(builder.fdiv(builder.load(total), divisor), total)
    target = _vector(builder, of.out, builder.add(of.to, column), count)
    rounded = rounded_to(builder, builder.load(total), of.rounded)
    builder.store(rounded, target, align=of.rounded.bitwidth // 8)


def _vector(builder: Any, data: Any, index: Any, count: int) -> Any:
    """The pointer to `count` elements from the one of that index on."""
    pointer = builder.gep(data, [index])
    return builder.bitcast(pointer, ir.VectorType(pointer.type.pointee, count).as_pointer())


def _every(builder: Any, value: Any, count: int) -> Any:
    """A vector of the same number."""
    kind = ir.VectorType(_FLOAT, count)
    none = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(none, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count))
