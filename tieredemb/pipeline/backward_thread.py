"""The thread that runs the backward passes of a loop over one GPU.

Autograd runs the nodes of each GPU on a thread of its own, and the loop's thread waits for it. What Python does there
starts with cold caches, and the two threads wake each other in each step, which can take as long as the step's Python.
With one GPU nothing runs at the same time, so inside a loop the backward runs on the loop's thread. Where a model is
spread over several GPUs autograd's threads stay, as they launch side by side.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn


class _Loop:
    """One loop that has its backward passes on its thread."""


class _OfThread(threading.local):
    """Loops that run on a thread, and whether autograd had threads of its own there before the first of them: None
    while there are none. Where another thread ends the last one, that is for the next loop to restore."""

    def __init__(self) -> None:
        self.loops: weakref.WeakSet[_Loop] = weakref.WeakSet()
        self.before: bool | None = None


_THREAD = _OfThread()


@contextlib.contextmanager
def backward_on_this_thread(model: nn.Module, tables: Iterable[torch.device]) -> Iterator[None]:
    """Backward passes that this thread begins inside run on it, if one GPU has all of a `model` that is on GPUs. Then
    autograd has its threads again as before, once no other loop of this thread is inside. `tables`: the devices of the
    model's tables, which are among no parameters."""
    devices = chain(tables, (tensor.device for tensor in chain(model.parameters(), model.buffers())))
    if len({device for device in devices if device.type == "cuda"}) != 1:
        yield
        return
    loop, loops = _Loop(), _THREAD.loops
    if _THREAD.before is None:
        _THREAD.before = torch._C._is_multithreading_enabled()
    loops.add(loop)
    torch._C._set_multithreading_enabled(False)
    try:
        yield
    finally:
        loops.discard(loop)
        if not loops and loops is _THREAD.loops and _THREAD.before is not None:
            torch._C._set_multithreading_enabled(_THREAD.before)
            _THREAD.before = None
