"""Segments: the occurrences of a batch grouped by row, each row's in the order of the batch.

The backward sums a row's gradients along its segment, so this order is what makes results independent of slots,
threads and timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.kernels import twin

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Segments:
    """`homes`: int32 (U,), one a segment · `starts`: int64 (U + 1,) into `order` · `order`: int32 (occurrences,)."""

    homes: Array
    starts: Array
    order: Array


def segments_of(inverse: Array, homes: Array) -> Segments:
    """Groups occurrences by `inverse` (int32 (N,), −1 left out) into the U segments of `homes`; a segment may be
    empty."""
    kernels: Any = twin(__name__, torch.device("cpu"))
    return Segments(homes, *kernels.group(inverse, len(homes)))


def segments_of_homes(homes: Array, slots: int) -> Segments:
    """Groups occurrences by their home (int32 (N,), negative left out, below `slots`): for several batches at once."""
    kernels: Any = twin(__name__, torch.device("cpu"))
    return segments_of(*kernels.number_homes(homes, slots))
