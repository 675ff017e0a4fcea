"""Rows of a table on a GPU that a call names by number, without a lookup: found, to be read or updated."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tieredemb.cache.device.plan import OverflowRows
from tieredemb.lookup.device_lookup import DeviceLookup, HotTensors, Segments


class DeviceRows(NamedTuple):
    """Rows of one table, each the only occurrence of a bag of its own. `feature`: one that looks the table up · `bag`:
    int32 (K,), a bag of it for each row · `homes`: int32 (K,), in `hot` and `overflow` · `past`: see `DeviceHistory`;
    None of optimizers that keep none · `steps`, `tables`: see `DeviceLookup.update`."""

    lookup: DeviceLookup
    feature: int
    bag: torch.Tensor
    homes: torch.Tensor
    hot: HotTensors
    overflow: OverflowRows
    past: torch.Tensor | None
    steps: torch.Tensor
    tables: torch.Tensor | None

    def segments(self) -> Segments:
        return self.lookup.distinct_segments(self.homes, self.bag, len(self.homes))

    def weights(self, out: torch.Tensor | None) -> torch.Tensor:
        """The weights as they are at the steps that were taken, (K, D), to `out` if it is given."""
        if self.past is None:
            return self.lookup.gather(self.hot, self.overflow, self.homes, out)
        rows, _ = self.lookup.read_current(
            self.hot, self.overflow, self.homes, self.past, self.steps,
            bag=self.bag, batch=len(self.homes), tables=self.tables, distinct=True, out=out,
        )  # fmt: skip
        return rows

    def keep_replayed(self) -> None:
        """See `DeviceLookup.keep_replayed`."""
        if self.past is not None:
            self.lookup.keep_replayed(
                self.hot, self.overflow, self.homes, self.past, self.steps,
                bag=self.bag, batch=len(self.homes), tables=self.tables,
            )  # fmt: skip
