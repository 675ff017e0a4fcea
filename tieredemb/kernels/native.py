"""What CPU kernels need on threads that never return to the interpreter: memory by its address, atomic counters, and
semaphores to sleep on. Device functions of numba, all of them for use inside kernels alone."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from tieredemb.kernels.cpu import intrinsic

SEMAPHORE_BYTES = 64  # `sem_t` takes 32 on 64-bit Linux

# of the C library, found by name when compiled code is loaded; addresses and sizes are int64
semaphore_wait: Any = types.ExternalFunction("sem_wait", types.int32(types.int64))
semaphore_post: Any = types.ExternalFunction("sem_post", types.int32(types.int64))
yield_core: Any = types.ExternalFunction("sched_yield", types.int32())
copy_bytes: Any = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))  # target, source


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


@intrinsic
def load_word(typingctx, address):
    """The 32 bits at `address` (int64)."""

    def codegen(context, builder, signature, args):
        return builder.load(_pointer(builder, args[0], 32))

    return types.uint32(types.int64), codegen


@intrinsic
def load_long(typingctx, address):
    """The int64 at `address` (int64)."""

    def codegen(context, builder, signature, args):
        return builder.load(_pointer(builder, args[0], 64))

    return types.int64(types.int64), codegen


@intrinsic
def load_byte(typingctx, address):
    """The byte at `address` (int64)."""

    def codegen(context, builder, signature, args):
        return builder.load(_pointer(builder, args[0], 8))

    return types.uint8(types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """Adds an int64 to the one at `address` (int64) and returns what was there: sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0], 64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, address):
    """The int64 at `address` (int64), and all that was written before it was."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0], 64), "seq_cst", 8)

    return types.int64(types.int64), codegen


def _prefetch(name: str, writes: int) -> Any:
    def function(typingctx, address):
        def codegen(context, builder, signature, args):
            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [byte] + [ir.IntType(32)] * 3)
            asked = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            words = [ir.IntType(32)(word) for word in (writes, 3, 1)]
            builder.call(asked, [builder.inttoptr(args[0], byte), *words])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    function.__name__ = function.__qualname__ = name
    return intrinsic(function)


prefetch_to_read = _prefetch("prefetch_to_read", 0)
prefetch_to_write = _prefetch("prefetch_to_write", 1)
