"""What CPU kernels need on threads that never return to the interpreter: memory by its address, atomic counters, and
semaphores and conditions to sleep on. Device functions of numba, all of them for use inside kernels alone."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.np.arrayobj import populate_array

from tieredemb.kernels.cpu import intrinsic, prefetch_line

SEMAPHORE_BYTES = 64  # `sem_t` takes 32 on 64-bit Linux

# of the C library, found by name when compiled code is loaded; addresses and sizes are int64
semaphore_wait: Any = types.ExternalFunction("sem_wait", types.int32(types.int64))
semaphore_post: Any = types.ExternalFunction("sem_post", types.int32(types.int64))
mutex_lock: Any = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
mutex_unlock: Any = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
condition_wait: Any = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))  # with a mutex
condition_signal: Any = types.ExternalFunction("pthread_cond_signal", types.int32(types.int64))
condition_broadcast: Any = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.int64))
yield_core: Any = types.ExternalFunction("sched_yield", types.int32())
sleep_microseconds: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
copy_bytes: Any = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))  # target, source


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _named(name: str, function: Any) -> Any:
    """The intrinsic of a function that was made here, with a unique name, by which numba distinguishes them."""
    function.__name__ = function.__qualname__ = name
    return intrinsic(function)


def _load(name: str, kind: Any) -> Any:
    """Device function: the number of that kind at an address (int64)."""

    def function(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.load(_pointer(builder, args[0], kind.bitwidth))

        return kind(types.int64), codegen

    return _named(name, function)


load_byte = _load("load_byte", types.uint8)
load_word = _load("load_word", types.uint32)
load_long = _load("load_long", types.int64)


def _atomic(name: str, operation: str) -> Any:
    """Device function `(address, value)`, both int64: does the operation on the int64 there and returns what that was.
    Sequentially consistent."""

    def function(typingctx, address, value):
        def codegen(context, builder, signature, args):
            return builder.atomic_rmw(operation, _pointer(builder, args[0], 64), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), codegen

    return _named(name, function)


atomic_add = _atomic("atomic_add", "add")
atomic_exchange = _atomic("atomic_exchange", "xchg")


@intrinsic
def atomic_load(typingctx, address):
    """The int64 at `address` (int64), and all that was written before it was."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0], 64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def longs_at(typingctx, address, count):
    """The int64 (count,) at `address` as an array. Their owner has to live on; see `borrowed`."""
    kind = types.Array(types.int64, 1, "C")

    def codegen(context, builder, signature, args):
        array = context.make_array(kind)(context, builder)
        data = builder.inttoptr(args[0], array.data.type)
        size = context.get_constant(types.intp, 8)
        populate_array(array, data=data, shape=[args[1]], strides=[size], itemsize=size, meminfo=None)
        return array._getvalue()

    return kind(types.int64, types.int64), codegen


@intrinsic
def store_long(typingctx, address, value):
    """Puts an int64 at `address` (int64)."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0], 64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_with(typingctx, function, data):
    """Calls the C function at the address `function` with the address `data`, both int64."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tells the core that it runs a loop that waits for another thread."""
    machine = platform.machine()

    def codegen(context, builder, signature, args):
        if machine in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        elif machine in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            builder.call(builder.module.declare_intrinsic("llvm.aarch64.hint", (), kind), [ir.IntType(32)(1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def copy_line_past(typingctx, target, source):
    """Copies 64 bytes past the caches; addresses are int64, `target` a multiple of 64. Other threads see them after the
    next atomic operation."""

    def codegen(context, builder, signature, args):
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        value = builder.load(builder.inttoptr(args[1], line), align=1)
        stored = builder.store(value, builder.inttoptr(args[0], line), align=64)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _prefetch(name: str, *, to_write: bool) -> Any:
    """Device function: prefetches the cache line at an address (int64). Never faults."""

    def function(typingctx, address):
        def codegen(context, builder, signature, args):
            prefetch_line(builder, _pointer(builder, args[0], 8), to_write=to_write)
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return _named(name, function)


prefetch_to_read = _prefetch("prefetch_to_read", to_write=False)
prefetch_to_write = _prefetch("prefetch_to_write", to_write=True)
