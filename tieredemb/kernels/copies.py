"""Copies several tensors on one GPU by one launch, where torch would launch one for each, or one for each dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tieredemb.kernels.arguments import struct_type
from tieredemb.kernels.compiler import blocks_for, kernel
from tieredemb.kernels.constants import MOST_COPIED

COPIES = "kernels/copies.cu"
THREADS, MOST_BLOCKS = 256, 512  # blocks for each tensor
UNIT = 16  # bytes that a thread copies at once


def copy_on_device(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies the bytes of each of `sources` over the target at its position, which has as many, on the current stream.
    All are contiguous and on the current device; none is a conjugate or negative view, and no target overlaps a source.
    Does not synchronise."""
    for first in range(0, len(targets), MOST_COPIED):
        into, given = targets[first : first + MOST_COPIED], sources[first : first + MOST_COPIED]
        count, sizes = len(into), [source.nbytes for source in given]
        blocks = blocks_for(max(sizes), THREADS * UNIT, MOST_BLOCKS)
        unused = [0] * (MOST_COPIED - count)
        kernel(COPIES, "tensors_copy")(
            blocks * count, THREADS,
            struct_type(COPIES, "Copies")(
                source=[*(source.data_ptr() for source in given), *unused],
                target=[*(target.data_ptr() for target in into), *unused],
                bytes=[*sizes, *unused],
            ),
            count,
        )  # fmt: skip
    torch.autograd.graph.increment_version(targets)
