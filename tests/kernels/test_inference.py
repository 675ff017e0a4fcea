"""Inference mode is left where it is to be, and what is interrupted in a forward leaves gradients on."""

from __future__ import annotations

import gc

import pytest
import torch

from tieredemb.kernels.inference import inference, no_inference


class Interrupted(torch.autograd.Function):
    """A forward in which Ctrl-C comes right behind the beginning of a context."""

    @staticmethod
    def forward(ctx, x):
        context = no_inference()  # which the error's traceback keeps
        context.__enter__()
        raise KeyboardInterrupt


def test_an_interrupt_in_a_forward_leaves_gradients_on():
    with pytest.raises(KeyboardInterrupt) as error:
        Interrupted.apply(torch.ones(1, requires_grad=True))
    del error
    gc.collect()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_inside_it_is_as_wanted(outside, wanted):
    with torch.inference_mode(outside):
        with inference(wanted):
            assert torch.is_inference_mode_enabled() == wanted
            assert torch.ones(1).is_inference() == wanted
        assert torch.is_inference_mode_enabled() == outside
