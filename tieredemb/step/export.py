"""What takes a model as one program of tensors: `torch.export`, `torch.onnx`, `torch.jit`, `torch.fx`, `torch.func`.

The rows of a tiered table are no tensor of the model, so none of these can have them. All of them get one error, which
names the way: a model whose tables were restored.
"""

from __future__ import annotations

import torch

from tieredemb.errors import UnsupportedError

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
