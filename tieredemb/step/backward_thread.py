"""Which thread runs backward passes: for a while, the one that begins them.

Autograd runs the nodes of each GPU on a separate thread, and the thread that has begun the backward sleeps meanwhile.
Python code on either starts with cold CPU caches, and the two wake each other in each step, which can take as long as
the step's Python code. With one GPU nothing runs in parallel. So autograd uses no threads of its own inside a loop over
a model on one GPU, and while a collection is open that is sharded over GPUs, of which a process has one. If a model is
on several GPUs, its threads stay, as they launch in parallel.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import nn


class _OfThread(threading.local):
    """Who needs the backward passes of a thread on it, and whether autograd used its own threads before the first: None
    where nobody does. If another thread ends the last need, that is restored when this thread ends a later one."""

    def __init__(self) -> None:
        self.needs: set[object] = set()
        self.before: bool | None = None


_THREAD = _OfThread()


def disable_autograd_threads() -> Callable[[], None]:
    """Backward passes that this thread begins run on it, until it has called what each of these calls has returned.
    Calling that again does nothing."""
    need, needs = object(), _THREAD.needs
    if _THREAD.before is None:
        _THREAD.before = torch._C._is_multithreading_enabled()
    needs.add(need)
    torch._C._set_multithreading_enabled(False)

    def restore() -> None:
        needs.discard(need)
        if not needs and needs is _THREAD.needs and _THREAD.before is not None:
            torch._C._set_multithreading_enabled(_THREAD.before)
            _THREAD.before = None

    return restore


@contextlib.contextmanager
def backward_on_this_thread(model: nn.Module, tables: Iterable[torch.device]) -> Iterator[None]:
    """Inside, backward passes that this thread begins run on it, if all of `model` that is on GPUs is on one. `tables`:
    the devices of the model's tables, which are not among its parameters."""
    devices = chain(tables, (tensor.device for tensor in chain(model.parameters(), model.buffers())))
    if len({device for device in devices if device.type == "cuda"}) != 1:
        yield
        return
    restore = disable_autograd_threads()
    try:
        yield
    finally:
        restore()
