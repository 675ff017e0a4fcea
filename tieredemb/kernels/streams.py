"""Devices, streams, and captures of CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU, `device`, the current one; for nothing where it is."""
    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


_IDLE: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # streams of a device and priority, to be used again


def own_stream(owner: object, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream of `device` that nothing else uses while `owner` lives. Does not synchronise.

    `torch.cuda.Stream()` returns one of 32 streams of a priority, by turns. If two threads use the same one, and one of
    them captures a graph there, the launches of the other are captured too, and do not run. A stream is never
    destroyed, because torch's allocator may still record an event there: the next owner gets it.
    """
    from tieredemb.kernels.compiler import cupy

    index = torch.cuda.current_device() if device.index is None else device.index
    idle = _IDLE[index, priority]
    try:
        handle = idle.pop()
    except IndexError:
        runtime = cupy().cuda.runtime
        with cupy().cuda.Device(index):
            handle = runtime.streamCreateWithPriority(runtime.streamNonBlocking, priority)
    weakref.finalize(owner, idle.append, handle).atexit = False
    stream: torch.cuda.Stream = torch.cuda.ExternalStream(handle, index)
    return stream


@functools.cache
def side_stream(device: torch.device, priority: int = 0, name: str = "") -> torch.cuda.Stream:
    """One side stream for each device, priority and name, shared, as torch's allocator keeps memory for each stream."""
    return own_stream(side_stream, device, priority)


_STREAMS: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(index: int | None = None) -> torch.cuda.Stream:
    """The current stream of the device of that index, or of the current one: as torch's own call, of which every step
    makes dozens, in a tenth of the time."""
    at = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice() if index is None else index)
    stream = _STREAMS.get(at)
    if stream is None:
        stream_id, device_index, device_type = at
        stream = _STREAMS[at] = torch.cuda.Stream(
            stream_id=stream_id, device_index=device_index, device_type=device_type
        )
    return stream


def side_by_side(device: torch.device, functions: Sequence[Callable[[], object]], name: str = "beside") -> None:
    """Calls independent functions, one after another. Inside a capture their launches may run at the same time: those
    of the first on the current stream, those of each other one on a side stream, which the current stream then waits
    for. Eagerly, events would cost the host more than the device gains. `name`: of these streams; code on several
    branches of a graph needs different names, or the branches would wait for each other."""
    if len(functions) < 2 or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        for function in functions:
            function()
        return
    main, begun, beside = current_stream(), torch.cuda.Event(), list[torch.cuda.Stream]()
    begun.record(main)
    try:
        functions[0]()
        for number, function in enumerate(functions[1:]):
            stream = side_stream(device, main.priority, f"{name} {number}")
            begun.wait(stream)
            beside.append(stream)
            with on_stream(stream):
                function()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture is invalid already: the exception raised below is why
            _wait_for(main, beside)
        raise
    _wait_for(main, beside)


def _wait_for(stream: torch.cuda.Stream, others: Sequence[torch.cuda.Stream]) -> None:
    for other in others:
        stream.wait_stream(other)


class on_stream:  # noqa: N801 - it reads as the context manager that it is
    """Makes a stream of the current device the current one inside, as `torch.cuda.stream` does, in a fifth of the
    time."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._stream.device_index)
        _make_current(self._stream.stream_id, self._stream.device_index, self._stream.device_type)

    def __exit__(self, *_: object) -> None:
        _make_current(*self._before)


def _make_current(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


_CAPTURE_LOCKS: dict[int, contextlib.AbstractContextManager[bool]] = {}


def capture_lock(device: torch.device) -> contextlib.AbstractContextManager[bool]:
    """Held while a stream of `device` is captured, and while a thread waits for all work on the device: in the middle
    of a capture CUDA refuses that, and ends the capture. Taken after all locks of caches."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _CAPTURE_LOCKS.setdefault(index, threading.RLock())


def synchronize(device: torch.device) -> None:
    """Waits for all work on `device`, and before for a capture there by another thread."""
    with capture_lock(device):
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def outside_capture(device: torch.device) -> Iterator[None]:
    """Inside, launches run at once even while the current stream is being captured: they prepare memory for the graph,
    and are not part of it. That memory must be older than the capture. Before a capture torch waits for the device, so
    no pending work can be overtaken."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    with torch.cuda.stream(side_stream(device, 0, "outside captures")):
        yield
