"""Launches that are recorded once as a CUDA graph, and replayed with other arguments: a replay sets the addresses of
tensors that change, such as a batch and an output, and copies nothing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tieredemb.kernels.arguments import Signature
from tieredemb.kernels.captures import Capture, no_collector
from tieredemb.kernels.compiler import LISTENERS, driver
from tieredemb.kernels.streams import capture_lock, side_stream

WORD = 8  # bytes of an address


@functools.cache
def _library() -> Any:
    """The driver's library."""
    library, pointer = driver(), ctypes.c_void_p
    library.cuStreamGetCaptureInfo_v3.argtypes = [pointer] * 7
    library.cuGraphKernelNodeGetParams_v2.argtypes = [pointer] * 2
    library.cuGraphExecKernelNodeSetParams_v2.argtypes = [pointer] * 3
    library.cuGraphLaunch.argtypes = [pointer] * 2
    return library


def can_record() -> bool:
    """Whether launches are to be recorded: unless `TIEREDEMB_RECORD=0` is in the environment, and where the driver can
    say which node of a graph a launch is."""
    return os.environ.get("TIEREDEMB_RECORD", "1") not in ("", "0") and _knows_nodes()


@functools.cache
def _knows_nodes() -> bool:
    """Whether the driver does, from CUDA 12.3 on."""
    try:
        _library()
    except AttributeError:
        return False
    return True


class GraphPool:
    """The memory that recordings use while they run, one after another. torch drops a pool once no graph that shares it
    is left, and fails if another graph uses it then; after a failed recording it may still consider it in use: the next
    recording gets a new pool."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Has the next recording get a new pool; recordings with memory in this one keep it."""
        self._used_by: weakref.WeakSet[Recording] = weakref.WeakSet()
        self._handle: Any = None

    def handle(self) -> Any:
        """Of torch's pool, for a capture."""
        if self._handle is None or not self._used_by:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def used_by(self, recording: Recording) -> None:
        """It has a part in the pool, for as long as it lives."""
        self._used_by.add(recording)


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, the second version."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z")),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Node:
    """A launch in a graph, of which arguments change: `places`, each by its number and its place among the packed
    arguments."""

    def __init__(self, node: int, signature: Signature, packed: bytes) -> None:
        self.node = node
        self._buffer = ctypes.create_string_buffer(packed, len(packed) + WORD)
        at = ctypes.addressof(self._buffer)
        starts = [at + start for start in signature.starts]
        self._pointers = (ctypes.c_void_p * len(starts))(*starts)
        self._params = _NodeParams()
        self.params = ctypes.addressof(self._params)
        _check(_library().cuGraphKernelNodeGetParams_v2(node, self.params))
        self._params.parameters, self._params.extra = ctypes.addressof(self._pointers), None
        inside = [start for start in signature.starts if start + WORD <= len(packed)]
        self._words = [ctypes.c_uint64.from_address(at + start) for start in inside]
        self.places: list[tuple[int, Any]] = []

    def find(self, now: Sequence[int]) -> bool:
        """Whether it takes any of the changing arguments, which are `now`."""
        self.places = [(now.index(word.value), word) for word in self._words if word.value in now]
        return bool(self.places)


class Recording:
    """A graph of launches on one device. `pool`: of the memory that the launches allocate and free · `priority`: as
    of a stream, which a graph's kernels keep wherever it is launched.

    `replay` may be called by any thread, one at a time. Neither recording nor a replay synchronises. See
    `can_record`."""

    def __init__(self, device: torch.device, pool: GraphPool, priority: int = 0) -> None:
        self._device = device
        self._priority = priority
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._nodes: list[_Node] = []
        self._now: list[int] | None = None  # the changing arguments that the graph knows of

    @contextlib.contextmanager
    def recorded(self, changing: Sequence[int]) -> Iterator[None]:
        """Records what this thread launches inside, which must not wait for the device. `changing`: the arguments that
        each replay is given, addresses of tensors that are not empty, no two alike, or in place of a number of 64 bits
        an address that stands for it; inside they are given to kernels of ours alone, and not to cooperative ones."""
        stream = side_stream(self._device, self._priority, "capture")
        launched: list[_Node] = []

        def note(signature: Signature, packed: bytes, stream: int) -> None:
            launched.append(_Node(_last_node(stream), signature, packed))

        with capture_lock(self._device), no_collector():
            try:
                with Capture(self._graph, stream, self._pool.handle(), at_once=True), _listening(note):
                    yield
            except BaseException:
                self._pool.begin_anew()
                raise
            self._pool.used_by(self)
        self._graph.instantiate()
        self._executable = self._graph.raw_cuda_graph_exec()
        self._now = [*changing]
        self._nodes = [node for node in launched if node.find(self._now)]
        found = {argument for node in self._nodes for argument, _ in node.places}
        if len(found) < len(changing):
            raise RuntimeError(f"of {len(changing)} arguments of a recorded graph that change {len(found)} were found")

    def replay(self, now: list[int]) -> None:
        """Launches all on the current stream, with the changing arguments as they are `now`."""
        library = _library()
        if now != self._now:
            before, self._now = self._now, None  # interrupted, what the graph knows is suspect
            for node in self._nodes:
                for argument, _ in node.places:
                    if before is None or before[argument] != now[argument]:
                        for number, word in node.places:
                            word.value = now[number]
                        _check(library.cuGraphExecKernelNodeSetParams_v2(self._executable, node.node, node.params))
                        break
            self._now = now
        _check(library.cuGraphLaunch(self._executable, torch._C._cuda_getCurrentRawStream(self._device.index)))


@contextlib.contextmanager
def _listening(note: Callable[[Signature, bytes, int], None]) -> Iterator[None]:
    """Calls `note` for each launch of this thread inside, and for none later, even after an interrupt."""
    thread = threading.get_ident()
    with contextlib.ExitStack() as after:
        after.callback(LISTENERS.pop, thread, None)
        LISTENERS[thread] = note
        yield


def _last_node(stream: int) -> int:
    """The node that was captured last on a stream."""
    status, count = ctypes.c_int(), ctypes.c_size_t()
    nodes, edges = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
    _check(
        _library().cuStreamGetCaptureInfo_v3(
            stream, ctypes.byref(status), None, None, ctypes.byref(nodes), ctypes.byref(edges), ctypes.byref(count)
        )
    )
    if count.value != 1 or not nodes[0]:
        raise RuntimeError(f"a launch that is captured is {count.value} nodes of the graph, and not one")
    return int(nodes[0])


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused a recorded graph: error {code}")
