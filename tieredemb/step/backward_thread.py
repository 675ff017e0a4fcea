"""The thread that runs the backward passes of a loop over one GPU.

Autograd runs the nodes of each GPU on a separate thread, and the loop's thread waits for it. Python code there starts
with cold CPU caches, and the two threads wake each other in each step, which can take as long as the step's Python
code. With one GPU nothing runs in parallel, so inside a loop the backward runs on the loop's thread. If a model is on
several GPUs, autograd's threads stay, as they launch in parallel.
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
    """A loop that has its backward passes on its thread."""


class _OfThread(threading.local):
    """The loops of a thread, and whether autograd used its own threads before the first of them: None without loops. If
    another thread ends the last loop, the next loop restores that."""

    def __init__(self) -> None:
        self.loops: weakref.WeakSet[_Loop] = weakref.WeakSet()
        self.before: bool | None = None


_THREAD = _OfThread()


@contextlib.contextmanager
def backward_on_this_thread(model: nn.Module, tables: Iterable[torch.device]) -> Iterator[None]:
    """Inside, backward passes that this thread begins run on it, if all of `model` that is on GPUs is on one.
    Autograd's threads are restored once the last loop of this thread ends. `tables`: the devices of the model's tables,
    which are not among its parameters."""
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
