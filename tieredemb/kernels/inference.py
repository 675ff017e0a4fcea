"""Torch's inference mode, entered where it is another than the current one, and else not touched.

Interrupted where it begins or ends, torch's guard lives as long as the error does, and brings back in the end how
gradients were when it began, whatever was set since. Inside of a forward they are off, and would stay so.
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
