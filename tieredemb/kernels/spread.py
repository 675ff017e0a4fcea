"""Rows that a kernel writes to several ranks' memory, as many to each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tieredemb.kernels.arguments import StructValue, struct_type

MOST_BLOCKS = 264  # of 256 threads: they saturate the link to another GPU, and leave room on this one


@dataclass(frozen=True)
class RowSpread:
    """Where they go. `begins`: int64 (W,) on the device, where each rank's memory begins · `each`: how many rows each
    rank gets: the first ones the first rank · `first`: behind how many in its memory."""

    begins: torch.Tensor
    each: int
    first: int

    @property
    def rows(self) -> int:
        """How many there are in all."""
        return len(self.begins) * self.each

    def of(self, file: str) -> StructValue:
        """As kernels of a `.cu` file take it."""
        return struct_type(file, "Spread")(begins=self.begins, each=self.each, first=self.first, ranks=len(self.begins))
