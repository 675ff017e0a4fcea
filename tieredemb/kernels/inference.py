"""Torch's inference mode, entered only if it differs from the current one.

If it is interrupted at its beginning or end, torch's guard lives as long as the exception, and then restores the grad
mode of its beginning, even if that was changed since. Inside a forward gradients are off, and would stay off.
"""

from __future__ import annotations

import contextlib

import torch

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def inference(mode: bool) -> contextlib.AbstractContextManager[object]:
    """Inside, torch is in inference mode or not."""
    return _NOTHING if torch.is_inference_mode_enabled() == mode else torch.inference_mode(mode)


def no_inference() -> contextlib.AbstractContextManager[object]:
    """For tensors that outlast the caller's inference mode, and are changed in place then."""
    return inference(False)
