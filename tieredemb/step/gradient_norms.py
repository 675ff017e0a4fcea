"""The norms of tables' gradients, over all calls that wait for one update.

A row's gradient is summed over all of its occurrences first, as the update sums it, and its powers in float64. Sums of
these over rows are exact until they are rounded: which slots the rows are in changes no bit, and neither does which
rank owns them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from tieredemb.kernels.streams import on_device
from tieredemb.lookup.exact_sum import add_exactly, new_sums, rounded
from tieredemb.step.program import Collected, in_forward_order
from tieredemb.tables.group import DeviceGroup, HostGroup
from tieredemb.tables.table_set import TableSet

OverRanks = Callable[[torch.Tensor, float], torch.Tensor]  # of exact sums or maxima here, and p: those of all ranks


def gradient_norms(
    tables: TableSet, collected: Collected, norm_type: float, over_ranks: OverRanks | None = None
) -> torch.Tensor:
    """The p-norm of each table's gradient, float32 (T,) on the tables' device; p is `norm_type`, above 0, or infinite.
    Padding is left out. `over_ranks`: if other ranks have rows of the tables, too. Does not synchronise with a GPU."""
    count, device = len(tables.config.tables), tables.config.device
    largest = math.isinf(norm_type)
    totals = torch.zeros(count, dtype=torch.float64, device=device) if largest else new_sums(count, device)
    collected = in_forward_order(collected)
    with tables.placed.now.rows.held():
        for g, group in enumerate(tables.groups):
            if isinstance(group, DeviceGroup):
                _norm_on_device(totals, group, g, collected, norm_type)
            else:
                assert isinstance(group, HostGroup)
                _norm_on_host(totals, group, g, collected, norm_type)
    if over_ranks is not None:
        totals = over_ranks(totals, norm_type)
    if not largest:
        totals = rounded(totals)
        totals = totals.sqrt() if norm_type == 2.0 else totals.pow(1.0 / norm_type)
    return totals.to(torch.float32)


def _norm_on_host(totals: torch.Tensor, group: HostGroup, g: int, collected: Collected, norm_type: float) -> None:
    from tieredemb.lookup.gradient_norm_cpu import row_powers
    from tieredemb.step.host_call import gather

    parts = [call.parts[g] for call, _ in collected]
    for part in parts:
        group.cache.check_rows(part.ticket)
    segments, gradient = gather(group, parts, [grad for _, grad in collected])
    filled = np.flatnonzero(np.diff(segments.starts))
    powers = row_powers(segments, gradient, group.space, norm_type)[filled]  # type: ignore[no-untyped-call]
    of = group.space.tables[group.space.table[gradient.feature[segments.order[segments.starts[filled]]]]]
    if not math.isinf(norm_type):
        add_exactly(totals, torch.from_numpy(powers), torch.from_numpy(of))
        return
    for table in group.space.tables.tolist():
        totals[table] = float(np.max(powers[of == table], initial=0.0))


def _norm_on_device(totals: torch.Tensor, group: DeviceGroup, g: int, collected: Collected, norm_type: float) -> None:
    from tieredemb.lookup.gradient_norm import occurrence_powers
    from tieredemb.step.device_update import combined

    batch, tickets = combined(collected, g)
    with on_device(group.config.device), group.cache.using(*tickets):
        powers = occurrence_powers(
            group.lookup, batch.homes, batch.bag, batch.samples, batch.grad, batch.scale, batch.argmax, norm_type
        )
        if powers.numel() == 0:
            return
        of = torch.div(batch.bag, max(1, batch.samples), rounding_mode="floor")
        if group.device_space.table is not None:
            of = group.device_space.table[of]
        tables = group.space.tables.tolist()
        if math.isinf(norm_type):
            for j, table in enumerate(tables):
                totals[table] = torch.where(of == j, powers, 0.0).max()
            return
        sums = new_sums(len(tables), powers.device)
        add_exactly(sums, powers, of.to(torch.int64))
        for j, table in enumerate(tables):
            totals[table].copy_(sums[j])
