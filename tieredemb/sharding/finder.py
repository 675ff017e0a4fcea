"""What finds bags, on the device where they are."""

from __future__ import annotations

from collections.abc import Sequence

from tieredemb.sharding.bags import CountingFinder, Part
from tieredemb.sharding.layout import Layout
from tieredemb.tables.config import TableSetConfig


def bag_finder(layout: Layout, parts: Sequence[Part], config: TableSetConfig) -> CountingFinder:
    """What finds the bags of `parts`, on the device of `config`, that of the whole tables."""
    if config.device.type == "cuda":
        from tieredemb.sharding.gpu_bags import GpuFinder

        return GpuFinder(layout, parts, config)
    from tieredemb.sharding.host_bags import HostFinder

    return HostFinder(layout, parts)
