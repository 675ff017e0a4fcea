"""Several float32 numbers in registers, as a value of CPU kernels.

A loop that adds a row to an array in memory asks at each row whether the two overlap, and writes what the next row
reads. These values stay in registers while the rows of a bag are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import register_model

from tieredemb.kernels.cpu import intrinsic


class Lanes(types.Type):
    """numba's type of `count` numbers."""

    def __init__(self, count: int) -> None:
        super().__init__(f"Lanes({count})")
        self.count = count


@register_model(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, dmm: Any, kind: Any) -> None:
        super().__init__(dmm, kind, ir.VectorType(ir.FloatType(), kind.count))


def zeros(count: int) -> Callable[..., Any]:
    """The device function that returns so many zeros."""

    def lanes_zero(typingctx):
        def codegen(context, builder, signature, args):
            return context.get_constant_null(signature.return_type)

        return Lanes(count)(), codegen

    lanes_zero.__name__ = lanes_zero.__qualname__ = f"lanes_zero_{count}"
    made: Callable[..., Any] = intrinsic(lanes_zero)
    return made


def _at(context: Any, builder: Any, kinds: Any, array: Any, index: Any, lanes: Any) -> Any:
    """The pointer to as many numbers at `array.ravel()[index]`."""
    data = context.make_array(kinds[0])(context, builder, array).data
    pointer = builder.gep(data, [context.cast(builder, index, kinds[1], types.intp)])
    return builder.bitcast(pointer, context.get_value_type(lanes).as_pointer())


@intrinsic
def lanes_add(typingctx, lanes, array, index):
    """`lanes` and the numbers from `array.ravel()[index]` on (C-contiguous), added. Of arrays of other numbers, for
    which kernels compile it too and never come here, `lanes`."""

    def codegen(context, builder, signature, args):
        if array.dtype != types.float32:
            return args[0]
        more = builder.load(_at(context, builder, signature.args[1:], *args[1:], lanes), align=4)
        return builder.fadd(args[0], more)

    return lanes(lanes, array, index), codegen


@intrinsic
def lanes_put(typingctx, array, index, lanes):
    """Writes `lanes` from `array.ravel()[index]` on, of float32, C-contiguous."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], _at(context, builder, signature.args[:2], *args[:2], lanes), align=4)
        return context.get_dummy_value()

    return types.void(array, index, lanes), codegen
