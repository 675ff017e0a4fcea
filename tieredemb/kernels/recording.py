"""Launches that are recorded once as a CUDA graph, and replayed with other arguments: of tensors that come and go, such
as a batch and an output, the graph is told where they are now, which costs the host a tenth of copying them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tieredemb.kernels.captures import Capture, no_collector
from tieredemb.kernels.compiler import driver
from tieredemb.kernels.streams import capture_lock, side_stream

KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
PACKED, SIZE = 1, 3  # where a launch's packed arguments are in `extra`, and how many bytes: see `compiler._Arguments`
WORD = 8


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, the second version."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z")),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Node:
    """A launch of ours in a graph, some of whose arguments change: `places`, of each which one it is, and which word of
    the packed arguments."""

    def __init__(self, node: int, params: _NodeParams, places: Sequence[tuple[int, int]]) -> None:
        size = ctypes.cast(params.extra[SIZE], ctypes.POINTER(ctypes.c_size_t))[0]
        self.node = node
        self.places = tuple(places)
        self._size = ctypes.c_size_t(size)
        self._packed = ctypes.create_string_buffer(
            ctypes.string_at(params.extra[PACKED], size), -(-size // WORD) * WORD
        )
        self._words = (ctypes.c_uint64 * (len(self._packed) // WORD)).from_buffer(self._packed)
        self._extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(self._packed), 2, ctypes.addressof(self._size), 0)
        self._params = _NodeParams.from_buffer_copy(params)
        self._params.extra = ctypes.cast(self._extra, ctypes.POINTER(ctypes.c_void_p))
        self.params = ctypes.addressof(self._params)

    def tell(self, now: Sequence[int]) -> None:
        """Its changing arguments are at these addresses."""
        for argument, at in self.places:
            self._words[at] = now[argument]


class Recording:
    """A graph of launches on one device. `pool`: of the memory that the launches allocate and give up; recordings that
    share one are replayed one after the other.

    `replay` may be called by any thread, one at a time. Neither recording nor a replay synchronises."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._nodes: list[_Node] = []
        self._now: list[int] | None = None  # where the graph knows the changing arguments to be

    @contextlib.contextmanager
    def recorded(self, changing: Sequence[torch.Tensor]) -> Iterator[None]:
        """Records what this thread launches inside, which must not wait for the device. `changing`: tensors whose
        places `replay` is told, none empty and no two in one place; inside they are given to kernels of ours alone, and
        not to cooperative ones."""
        stream = side_stream(self._device, 0, "capture")  # streams are few: another's would be captured
        with capture_lock(self._device), no_collector(), Capture(self._graph, stream, self._pool, at_once=True):
            yield
        self._graph.instantiate()
        self._executable = self._graph.raw_cuda_graph_exec()
        self._now = [each.data_ptr() for each in changing]
        self._nodes = list(self._find_nodes(self._now))
        found = {argument for node in self._nodes for argument, _ in node.places}
        if len(found) < len(changing):
            raise RuntimeError(f"of {len(changing)} arguments of a recorded graph that change {len(found)} were found")

    def _find_nodes(self, now: Sequence[int]) -> Iterator[_Node]:
        """The launches that take one of the changing arguments, which are at `now`."""
        library, count = driver(), ctypes.c_size_t()
        graph = self._graph.raw_cuda_graph()
        _check(library.cuGraphGetNodes(graph, None, ctypes.byref(count)))
        nodes = (ctypes.c_void_p * count.value)()
        _check(library.cuGraphGetNodes(graph, nodes, ctypes.byref(count)))
        for each in nodes:
            node = each or 0
            kind = ctypes.c_int()
            _check(library.cuGraphNodeGetType(node, ctypes.byref(kind)))
            if kind.value != KERNEL_NODE:
                continue
            params = _NodeParams()
            _check(library.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)))
            if not params.extra:
                continue  # torch's, or a cooperative one
            size = ctypes.cast(params.extra[SIZE], ctypes.POINTER(ctypes.c_size_t))[0]
            words = (ctypes.c_uint64 * (size // WORD)).from_address(params.extra[PACKED])
            places = [(now.index(word), at) for at, word in enumerate(words) if word in now]
            if places:
                yield _Node(node, params, places)

    def replay(self, now: list[int]) -> None:
        """Launches all on the current stream, with the changing arguments at the addresses `now`."""
        library = driver()
        if now != self._now:
            before, self._now = self._now, None  # interrupted, what the graph knows is in doubt
            for node in self._nodes:
                for argument, _ in node.places:
                    if before is None or before[argument] != now[argument]:
                        node.tell(now)
                        _check(library.cuGraphExecKernelNodeSetParams_v2(self._executable, node.node, node.params))
                        break
            self._now = now
        _check(library.cuGraphLaunch(self._executable, torch._C._cuda_getCurrentRawStream(self._device.index)))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused a recorded graph: error {code}")
