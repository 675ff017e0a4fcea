"""A backward pass that fails where a test wants it to."""

from __future__ import annotations

import torch


class FailsBackward(torch.autograd.Function):
    """A copy of its input, whose backward raises RuntimeError."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("planted")
