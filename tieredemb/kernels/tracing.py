"""What tracing tools see of this library: profilers named ranges, `torch.compile` nothing, exporters an error.

Named ranges show which part of a step is planning, moving rows, looking up, or updating. They are torch's
`record_function`, so `torch.profiler` shows them, and under `torch.autograd.profiler.emit_nvtx()` they are NVTX ranges,
which Nsight Systems shows: torch then pushes one for each range on the profiled thread and on those of its backward
passes (torch/csrc/profiler/standalone/nvtx_observer.cpp). Without either a range costs 0.3 µs, for the check. A
replayed CUDA graph runs no Python and so has no ranges: there the names of the kernels show the part of the step.

`torch.export`, `torch.onnx`, `torch.jit`, `torch.fx` and `torch.func` take a model as one program of tensors. The rows
of a tiered table are no tensor of the model, so none of these can have them. All of them get one error, which names the
solution: a model whose tables were restored.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

from tieredemb.errors import UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")

# --- profilers --------------------------------------------------------------------------------------------------------

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

KERNELS = {  # by the range that launches them; for a lookup rows catch up and their norms are limited
    "plan": (
        *("tensors_copy", "bags_join", "offsets_check", "bags_fill", "bags_number", "fault_tell"),
        *("owners_find", "order_find", "requests_place"),
        *("blocks_begin", "bags_pad", "blocks_exchange", "pieces_find", "marks_write", "bags_begin", "ids_join"),
        *("plan_begin", "records_clear", "records_index", "keys_find", "victims_select", "missed_resolve"),
        *("missed_place", "homes_count", "range_find", "range_begin"),
        *("slot_map_find", "slot_map_insert", "slot_map_erase", "slot_map_rebuild"),
    ),
    "swap": ("missed_report", "rows_swap", "rows_write_back", "rows_generate", "rows_generate_range"),
    "sort": ("digits_count", "digits_sort", "bags_place", "segments_find"),  # beside the swap, within the plan
    "lookup": (
        *("bags_pool", "bags_spread", "bags_unpack", "rows_gather", "rows_spread", "ranks_meet", "clock_note"),
        *("segments_limit_norm", "segments_catch_up", "rows_keep_replayed", "rows_read_current"),
    ),
    "update": (
        *("options_set", "step_begin", "bags_mean_scale", "weights_gradient", "scale_gather", "occurrences_gradient"),
        *("occurrences_spread", "bags_send", "addresses_set", "segments_update", "long_segments_update", "step_end"),
        *("values_add", "sums_round", "spoilt_refuse"),  # norms of gradients
    ),
}
_PART_OF = {kernel: part for part, kernels in KERNELS.items() for kernel in kernels}
_TORCH_SORT = re.compile(r"(?i)(?<!search)sort|fill_reverse_indices|fill_index_and_segment")


def marked(name: str) -> contextlib.AbstractContextManager[object]:
    """A range called "tieredemb.<name>"; nothing without a profiler."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"tieredemb.{name}")


def ranged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes each call of a function such a range."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            if not torch._C._autograd._profiler_enabled():
                return function(*args, **keywords)
            with torch.profiler.record_function(f"tieredemb.{name}"):
                return function(*args, **keywords)

        return call

    return decorate


def part_of(kernel: str) -> str | None:
    """The part of a step, a key of `KERNELS`, of a kernel with this name in a profile; None for kernels of others.
    torch's sorts count as the sort by which a plan groups occurrences."""
    return _PART_OF.get(kernel, "sort" if _TORCH_SORT.search(kernel) else None)


# --- what compiles or records ----------------------------------------------------------------------------------------

RESTORE = (
    "tieredemb.restore_embedding_bags(model) puts nn.Embedding and nn.EmbeddingBag with the trained rows in the place "
    "of the tables, if memory holds them; use the model that it returns"
)
_Key = torch._C._TorchDispatchModeKey


def no_export(what: str) -> UnsupportedError:
    """The error for `what`, which takes a model as one program."""
    return UnsupportedError(f"a tiered table cannot go through {what}: its rows are no tensor of the model. {RESTORE}")


def check_not_recorded() -> None:
    """Raises `UnsupportedError` where operations are recorded (`torch.jit.trace`, `torch.onnx.export`, `make_fx`), or
    run on tensors without content."""
    if torch._C._get_tracing_state() is not None:
        raise no_export("torch.jit.trace or torch.onnx.export")
    if any(torch._C._get_dispatch_mode(key) is not None for key in (_Key.PROXY, _Key.FAKE)):
        raise no_export("torch.export, make_fx, or a mode of fake tensors")


# for code that is to make no call of Python to ask, where it is `untraced`: either says that it is traced
is_compiling = torch.compiler.is_compiling
callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps `torch.compile` out of `function`, whose arrays and kernels it would trace wrongly: a graph breaks there.
    A process that does not compile is spared the import of the compiler, which takes seconds. Raises `UnsupportedError`
    where a program is recorded as a whole."""
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # while dynamo traces, the first is true and a graph breaks; where it runs frames, it has left its callback
        traced = is_compiling() or callback() is not None
        # what is_exporting() returns, which torch before 2.13 takes for true wherever dynamo traces
        if traced and torch.compiler._is_exporting_flag:
            raise no_export("torch.export")
        if not traced and (torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack()):
            check_not_recorded()
        return disabled(*args, **kwargs) if traced else function(*args, **kwargs)

    return call
