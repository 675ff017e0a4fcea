"""Streams and captures of CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def outside_capture() -> Iterator[None]:
    """Launches at once even while the current stream is being captured: what the graph finds, not what it does. Memory
    is to be taken before, as CUDA gives none to other streams during a capture. Before one torch waits for the device,
    so nothing is pending that this would overtake."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield
