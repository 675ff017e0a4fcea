"""Gradients of tables that are objects of their own: by row, or tensors that code has assigned to `.grad`.

They stay what they are until they are set to None, as gradients do in torch: a step applies them, the next one does so
again, a backward adds to them, and what changes them in place changes them for all who have them.
"""

from __future__ import annotations

import torch

from tieredemb.step.gradient_rows import GradientRows
from tieredemb.step.table_gradient import TableGradient, norm_by_row


class OwnedGradients(dict[int, torch.Tensor]):
    """By table: a `TableGradient` that is known by row, or a plain tensor (rows, D), dense or sparse."""

    def rows(self, table: int) -> GradientRows:
        """One by row. Waits for a GPU."""
        own = self[table]
        if isinstance(own, TableGradient):
            return own.known.rows()
        return GradientRows.of(own, own.shape, own.device)

    def norm(self, table: int, order: float) -> torch.Tensor:
        """Its norm of that order, float32 ()."""
        own = self[table]
        return own.known.norm(order) if isinstance(own, TableGradient) else norm_by_row(self.rows(table), order)

    def add(self, table: int, rows: GradientRows) -> None:
        """Adds what a backward has brought, in place where torch would."""
        own = self[table]
        if isinstance(own, TableGradient):
            own.known.add(rows)
        elif own.layout is torch.sparse_coo:
            self[table] = own + rows.sparse()
        else:
            with torch.no_grad():
                own[rows.ids] += rows.values.to(own.dtype)
