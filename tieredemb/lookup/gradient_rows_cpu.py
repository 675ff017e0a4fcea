"""The summed gradient of each row of a batch on the CPU: the update's own walk, over rows that are zeros before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.kernels.segments_cpu import Segments
from tieredemb.lookup.history import CopiedRows
from tieredemb.lookup.optimizer import Hyperparameters
from tieredemb.lookup.optimizer_cpu import Gradient, update
from tieredemb.lookup.optimizers.sgd import SGD

if TYPE_CHECKING:
    from tieredemb.lookup.bags import KeySpace

    Array = np.ndarray[Any, Any]


def row_sums(segments: Segments, gradient: Gradient, space: KeySpace) -> Array:
    """Float32 (U, D): the gradient of the row of each segment, zeros for a segment without occurrences."""
    count = len(segments.homes)
    own = Segments(np.arange(count, dtype=np.int32), segments.starts, segments.order)
    sums = CopiedRows(
        np.zeros((count, space.width), np.float32), np.empty((count, 0), np.uint32), np.empty(count, np.uint8)
    )
    # a step of rate −1 adds the gradient to a row
    step = Hyperparameters(SGD, np.full(len(space), -1.0, np.float32), (0.0,))
    update(sums, own, gradient, space, step).run()
    return sums.weight
