"""The message after a failed capture: which line of the step no CUDA graph can contain, why, and what to do."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

from tieredemb.errors import TieredEmbError, UnsupportedError

WAITS = (
    "this waits for the GPU (.item(), .cpu(), .tolist(), print, a tensor as a condition, a mask as an index, "
    "torch.cuda.synchronize()), or needs memory for a stream that is no part of the step; do it outside, with what the "
    "step returns"
)
GENERATOR = (
    "random numbers are drawn from a generator of the step's own, which a replay would not advance; use torch's default"
)
# from texts in errors of CUDA (cudaErrorStreamCapture…) and torch to the reason and what to do
REASONS = {
    "not permitted when stream is capturing": WAITS,
    "unless the CPU tensor is pinned": (
        "this copies between the GPU and host memory that is not pinned; keep on the GPU what the step reads, or put "
        "it in the batch"
    ),
    "previous error during capture": (
        "an error was swallowed before, inside the step, or another thread has waited for the whole GPU "
        "(torch.cuda.synchronize()); let that error out to see it, or keep the other thread from it during the first "
        "steps"
    ),
    "a CUDA generator not in capture mode": GENERATOR,
    "construct a new CUDAGeneratorImpl": GENERATOR,
    "uncaptured work in another stream": (
        "the step waits for work from outside of it, on another stream or by an event; wait for that before the call, "
        "or let the other stream wait for the step's first"
    ),
    "unjoined work": (
        "the step leaves work on another stream; let its stream wait for that at the end: "
        "torch.cuda.current_stream().wait_stream(other)"
    ),
    "last recorded in a capturing stream": (
        "the host waits for an event of the step, or asks for it; do it outside the step"
    ),
    "the legacy stream depend": (
        "the default stream waits for the step: a part of it is done there, or a loss or output from outside the step "
        "ties its parameters to that stream; del that loss, or keep loss.detach()"
    ),
    "merge of separate capture": "the step waits for a stream that somebody else is capturing",
    "prepare for replay during capturing": "a CUDA graph is replayed inside; call the function that it was made of",
}  # fmt: skip


class NotCapturableError(UnsupportedError):
    """A step calls a torch optimizer that no CUDA graph can contain as it was built."""


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises `NotCapturableError`, before anything is captured, if torch refuses to capture an optimizer of the step as
    it was built. The user has to pass the option, as it changes how numbers are rounded."""
    # by name, as a traceback that is kept would keep an optimizer alive
    for name, groups in [(type(each).__name__, _not_capturable(each)) for each in optimizers]:
        if groups:
            raise NotCapturableError(
                f"the step calls step() of {name}, which no CUDA graph can hold as it was built: param groups {groups} "
                f"have capturable=False. Pass capturable=True, as in {name}(…, capturable=True), before its first "
                f"step: torch then keeps step counts on the GPU, and rounds a little differently"
            )


def _not_capturable(optimizer: torch.optim.Optimizer) -> list[int]:
    """The numbers of its param groups that torch refuses to capture."""
    return [number for number, group in enumerate(optimizer.param_groups) if not group.get("capturable", True)]


def explain(error: BaseException) -> None:
    """Raises `UnsupportedError` for an error of the capture; an error of the user is to be raised unchanged. Called in
    an `except` block: raised from a generator's context manager, or an `ExitStack`, the new error would be in a
    reference cycle, which keeps the step's batch in flight until it is collected."""
    text = str(error)
    reason = next((reason for text_of_torch, reason in REASONS.items() if text_of_torch in text), None)
    if reason is not None and isinstance(error, RuntimeError) and not isinstance(error, TieredEmbError):
        raise UnsupportedError(
            f"the step cannot be captured in a CUDA graph. {_line(error) or 'Inside it, or at its end'}: {reason}"
        ) from error


def _line(error: BaseException) -> str | None:
    """The last line of the user's code in the traceback of an error."""
    libraries = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)]
    inside = [frame for frame in frames if os.path.basename(frame.filename) != "contextlib.py"]
    if not inside:
        return None
    return f"{os.path.basename(inside[-1].filename)}, line {inside[-1].lineno}, in {inside[-1].name}"
