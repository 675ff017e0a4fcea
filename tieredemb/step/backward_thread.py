"""Which thread runs backward passes: that which begins them, while something holds them there.

Autograd runs the nodes of each GPU on a separate thread, and the thread of the loop waits for it. Python code there
starts with cold CPU caches, and the two threads wake each other in each step, which can take as long as the step's
Python code. With one GPU nothing runs in parallel. So inside a loop over a model on one GPU, and while a collection
lives that is sharded over GPUs, of which a process has one, the backward runs on the thread that has begun it. If a
model is on several GPUs, autograd's threads stay, as they launch in parallel.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import nn


class _Holder:
    """What holds the backward passes of a thread."""


class _OfThread(threading.local):
    """The holders of a thread, and whether autograd used its own threads before the first of them: None without
    holders. If another thread releases the last one, the next holder restores that."""

    def __init__(self) -> None:
        self.holders: weakref.WeakSet[object] = weakref.WeakSet()
        self.before: bool | None = None


_THREAD = _OfThread()


def hold_backward(owner: object) -> Callable[[], object]:
    """Backward passes that this thread begins run on it. This lasts until the returned function is called, or `owner`
    is gone, and no other holder of this thread is left."""
    holder, holders = _Holder(), _THREAD.holders
    if _THREAD.before is None:
        _THREAD.before = torch._C._is_multithreading_enabled()
    holders.add(holder)
    torch._C._set_multithreading_enabled(False)

    def release() -> None:
        holders.discard(holder)
        if not holders and holders is _THREAD.holders and _THREAD.before is not None:
            torch._C._set_multithreading_enabled(_THREAD.before)
            _THREAD.before = None

    released = weakref.finalize(owner, release)
    released.atexit = False
    return released


@contextlib.contextmanager
def backward_on_this_thread(model: nn.Module, tables: Iterable[torch.device]) -> Iterator[None]:
    """Inside, backward passes that this thread begins run on it, if all of `model` that is on GPUs is on one. `tables`:
    the devices of the model's tables, which are not among its parameters."""
    devices = chain(tables, (tensor.device for tensor in chain(model.parameters(), model.buffers())))
    if len({device for device in devices if device.type == "cuda"}) != 1:
        yield
        return
    loop = _Holder()
    release = hold_backward(loop)
    try:
        yield
    finally:
        release()
