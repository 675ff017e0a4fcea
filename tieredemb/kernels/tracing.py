"""What traces a model's code: `torch.compile`, which leaves ours out; and what takes a model as one program of tensors.

That is `torch.export`, `torch.onnx`, `torch.jit`, `torch.fx`, `torch.func`. The rows of a tiered table are no tensor of
the model, so none of these can have them. All of them get one error, which names the way: a model whose tables were
restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

from tieredemb.errors import UnsupportedError

RESTORE = (
    "tieredemb.restore_embedding_bags(model) puts nn.Embedding and nn.EmbeddingBag with the trained rows in the place "
    "of the tables, if memory holds them; use the model that it returns"
)
P = ParamSpec("P")
R = TypeVar("R")
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


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps `torch.compile` out of `function`, whose arrays and kernels it would trace wrongly: a graph breaks there.
    A process that does not compile is spared the import of the compiler, which takes seconds. Raises `UnsupportedError`
    where a program is recorded as a whole."""
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # while dynamo traces, the first is true and a graph breaks; where it runs frames, it has left its callback
        traced = torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
        # what is_exporting() returns, which torch before 2.13 takes for true wherever dynamo traces
        if traced and torch.compiler._is_exporting_flag:
            raise no_export("torch.export")
        if not traced and (torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack()):
            check_not_recorded()
        return disabled(*args, **kwargs) if traced else function(*args, **kwargs)

    return call
