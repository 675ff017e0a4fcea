"""The functions that find bags on the device where they are, and that record how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tieredemb.sharding.bags import CountingFinder, Part
from tieredemb.sharding.layout import Layout
from tieredemb.tables.config import TableSetConfig

if TYPE_CHECKING:
    from tieredemb.sharding.context import ShardedContext
    from tieredemb.sharding.recorded_requests import RecordedRequests


def bag_finder(layout: Layout, parts: Sequence[Part], config: TableSetConfig) -> CountingFinder:
    """Finds the bags of `parts`, on the device of `config`, the config of the whole tables."""
    if config.device.type == "cuda":
        from tieredemb.sharding.gpu_bags import GpuFinder

        return GpuFinder(layout, parts, config)
    from tieredemb.sharding.host_bags import HostFinder

    return HostFinder(layout, parts)


def recorded_requests(context: ShardedContext, finder: CountingFinder) -> RecordedRequests | None:
    """Records how forwards find bags by `finder`, on a GPU; None on a CPU."""
    if context.device.type != "cuda":
        return None
    from tieredemb.sharding.gpu_bags import GpuFinder
    from tieredemb.sharding.recorded_requests import RecordedRequests

    return RecordedRequests(context, finder) if isinstance(finder, GpuFinder) else None
