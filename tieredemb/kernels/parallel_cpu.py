# mypy: allow-untyped-defs, allow-untyped-calls
"""CPU kernels that run on several threads.

A kernel over ranges takes a half-open range `(lo, hi, …)` and owns its outputs there, so results do not depend on the
number of threads, nor on how finely ranges are cut. One call into compiled code, without the GIL, runs all of them, on
the calling thread and its helpers (helpers_cpu.py). The threads are our own rather than numba's: its OpenMP layer dies
after a fork and its workqueue layer aborts when two Python threads enter it, and prefetching needs both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import typeof
from numba.core import cgutils, types

from tieredemb.kernels.cpu import inline, intrinsic, jit, without_owner
from tieredemb.kernels.helpers_cpu import called

FINENESS = 4  # ranges a thread, so that none waits long for one that has lost its core

_LONG, _INT = ir.IntType(64), ir.IntType(32)
_WORK = ir.FunctionType(ir.VoidType(), [_LONG])  # of the address of what threads share
_WHO, _NOBODY = 3, (0, 0, 0)  # words of a job about its helpers; these: the caller alone


def num_threads() -> int:
    """How many threads kernels may use: as many as torch (`torch.set_num_threads`)."""
    return torch.get_num_threads()


def even_bounds(n: int, grain: int) -> list[int]:
    """Cuts 0 … n into even ranges of at least `grain`, a few for each thread: for less than the grain a thread costs
    more than it saves."""
    if n < 2 * grain or num_threads() == 1:
        return [0, n]
    parts = max(1, min(FINENESS * num_threads(), n // max(1, grain)))
    return [n * part // parts for part in range(parts + 1)]


def parallel_for(kernel: Callable[..., int], bounds: list[int], *args: Any) -> None:
    """Runs a kernel `over_ranges` on each of the consecutive ranges that `bounds` cuts, and waits for all of them.

    The calling thread takes part. An exception during the call, such as an interrupt, is raised before all ranges or
    after them.
    """
    who = _NOBODY if len(bounds) == 2 else _who(bounds)
    if kernel(np.array([*who, *bounds, *[0] * (len(bounds) - 1)]), *args):  # a job; see `Pass`
        raise _no_memory()


def _who(bounds: list[int]) -> tuple[int, int, int]:
    helpers = min(len(bounds) - 1, num_threads()) - 1
    return called(helpers) if helpers > 0 else _NOBODY


def _no_memory() -> MemoryError:
    return MemoryError("a CPU kernel did not get the memory that it works in")


class Pass:
    """`kernel(lo, hi, *args)` over the ranges that `bounds` cuts, each of them once, even after an interrupt: compiled
    code, which cannot be interrupted, notes the ranges that were run, and `run` continues with the rest. `held`:
    objects that it reads beside its arguments, to be kept alive · `is_small`: whether helpers would cost more than they
    save, for any number of ranges."""

    held: object = None
    is_small = False

    def __init__(self, kernel: Callable[..., int], bounds: list[int], *args: Any) -> None:
        self._kernel, self._bounds, self._args = kernel, bounds, args
        # the input of compiled code, int64: the helpers (`_WHO`), the bounds (K + 1), whether a range was run (K)
        self._job = np.array([*_NOBODY, *bounds, *[0] * (len(bounds) - 1)])

    @property
    def call(self) -> tuple[Any, tuple[Any, ...]]:
        """The kernel and its arguments."""
        return self._kernel, (self._job, *self._args)

    @property
    def begun(self) -> bool:
        """Whether a range was run."""
        return bool(self._job[_WHO + len(self._bounds) :].any())

    def run(self) -> None:
        """Runs the ranges that were not run before, as `parallel_for` does."""
        if len(self._bounds) > 2 and not self.is_small:
            self._job[:_WHO] = _who(self._bounds)  # of the thread that runs it
        if self._kernel(self._job, *self._args):
            raise _no_memory()


def over_ranges(function: Callable[..., None], unless: Callable[..., Any] | None = None) -> Any:
    """Compiles a kernel `(lo, hi, *args)` of several threads, which `parallel_for` and `Pass` call. It returns nothing:
    results go to its output arrays. `unless`: a device function `(*args)` that the calling thread calls before; if it
    returns True, no range is run."""
    name, names = function.__name__, list(inspect.signature(function).parameters)[2:]
    args = ", ".join(names)
    source = f"def {name}(_job, {args}): return {f'0 if _unless({args}) else ' * bool(unless)}_spread(_job, ({args},))"
    place = function.__code__  # where numba checks the source for changes, and beside which it caches code
    lines = "\n" * (place.co_firstlineno - 1)
    made: dict[str, Any] = {
        "_unless": unless,
        "_spread": _spread(inline(function), f"{function.__module__}_{name}".replace(".", "_")),
    }
    exec(compile(lines + source, place.co_filename, "exec"), made)
    entry = made[name]
    entry.__module__, entry.__qualname__, entry.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return jit(entry)


def _spread(kernel: Any, name: str) -> Any:
    """The device function that runs `kernel` over ranges and returns how many of them have failed."""

    def spread(typingctx, job, args):
        found = typingctx.resolve_function_type(typeof(kernel), (types.int64, types.int64, *args.types), {})

        def codegen(context, builder, signature, values):
            compiled = kernel.get_compile_result(found)
            context.add_linking_libs([compiled.library])
            array = context.make_array(signature.args[0])(context, builder, values[0])
            [length] = cgutils.unpack_tuple(builder, array.shape, 1)
            count = builder.sdiv(builder.sub(length, _LONG(_WHO + 1)), _LONG(2))
            bounds = builder.gep(array.data, [_LONG(_WHO)])
            done = builder.gep(bounds, [builder.add(count, _LONG(1))])
            fields = _LONG(0), _LONG(0), count, bounds, done, values[1]
            kind = ir.LiteralStructType([field.type for field in fields])
            data = cgutils.alloca_once(builder, kind)
            for field, value in enumerate(fields):
                builder.store(value, _field(builder, data, field))
            work = _worker(context, builder.module, name, kind, compiled.fndesc, found)
            who = [builder.load(builder.gep(array.data, [_LONG(each)])) for each in range(_WHO)]
            _call(builder, work, builder.ptrtoint(data, _LONG), who)
            return builder.load(_field(builder, data, FAILED))

        return types.int64(job, args), codegen

    spread.__name__ = spread.__qualname__ = name  # numba distinguishes them by name
    return intrinsic(spread)


NEXT, FAILED, COUNT, BOUNDS, DONE, ARGS = range(6)  # what threads share


def _field(builder: Any, data: Any, field: int) -> Any:
    return builder.gep(data, [_INT(0), _INT(field)], inbounds=True)


def _worker(context: Any, module: Any, name: str, job: Any, kernel: Any, kinds: Any) -> Any:
    """Emits what each thread runs: a function of a job, that takes ranges until none is left."""
    function = ir.Function(module, _WORK, module.get_unique_name(f"{name}.ranges"))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    take, run, end = (function.append_basic_block(each) for each in ("take", "run", "end"))
    data = builder.inttoptr(function.args[0], job.as_pointer())
    count, bounds, done = (builder.load(_field(builder, data, each)) for each in (COUNT, BOUNDS, DONE))
    given = zip(kinds.args[2:], cgutils.unpack_tuple(builder, builder.load(_field(builder, data, ARGS))), strict=True)
    args = [without_owner(context, builder, *each) for each in given]  # their owner waits for the end
    builder.branch(take)
    builder.position_at_end(take)
    number = builder.atomic_rmw("add", _field(builder, data, NEXT), _LONG(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", number, count), run, end)
    builder.position_at_end(run)
    lo = builder.load(builder.gep(bounds, [number]))
    hi = builder.load(builder.gep(bounds, [builder.add(number, _LONG(1))]))
    mark = builder.gep(done, [number])
    is_left = builder.icmp_unsigned("==", builder.load(mark), _LONG(0))
    with builder.if_then(builder.and_(is_left, builder.icmp_signed("<", lo, hi))):
        status, _ = context.call_internal_no_propagate(builder, kernel, kinds, [lo, hi, *args])
        with builder.if_else(status.is_ok, likely=True) as (then, otherwise):
            with then:
                builder.store(_LONG(1), mark)
            with otherwise:
                builder.atomic_rmw("add", _field(builder, data, FAILED), _LONG(1), "monotonic")
    builder.branch(take)
    builder.position_at_end(end)
    builder.ret_void()
    return function


def _call(builder: Any, work: Any, data: Any, who: list[Any]) -> None:
    """Emits the call of `work` by this thread and its helpers. `who`: the address of `job_run` and its arguments, or
    zeros for this thread alone."""
    run, board, helpers = who
    kind = ir.FunctionType(ir.VoidType(), [_LONG] * 4)
    with builder.if_else(builder.icmp_unsigned("!=", run, _LONG(0))) as (shared, alone):
        with shared:
            function = builder.inttoptr(run, kind.as_pointer())
            builder.call(function, [board, helpers, builder.ptrtoint(work, _LONG), data])
        with alone:
            builder.call(work, [data])
