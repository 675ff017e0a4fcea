"""Gradients of tables that are objects of their own: by row, or tensors that code has assigned to `.grad`.

As in torch, they stay until they are set to None: a step applies them, the next step applies them again, a backward
adds to them, and code that changes one in place changes it for all references.
"""

from __future__ import annotations

import torch

from tieredemb.step.gradient_rows import GradientRows
from tieredemb.step.table_gradient import TableGradient, norm_by_row


class OwnedGradients(dict[int, torch.Tensor]):
    """For each table a `TableGradient` known by row, or a plain tensor (rows, D), dense or sparse."""

    def rows(self, table: int) -> GradientRows:
        """A gradient by row. Waits for a GPU."""
        own = self[table]
        if isinstance(own, TableGradient):
            return own.known.rows()
        return GradientRows.of(own, own.shape, own.device)

    def norm(self, table: int, order: float) -> torch.Tensor:
        """Its norm of that order, float32 ()."""
        own = self[table]
        return own.known.norm(order) if isinstance(own, TableGradient) else norm_by_row(self.rows(table), order)

    def add(self, table: int, rows: GradientRows) -> None:
        """Adds the gradient of a backward, in place where torch would."""
        own = self[table]
        if isinstance(own, TableGradient):
            own.known.add(rows)
        elif own.layout is torch.sparse_coo:
            self[table] = own + rows.sparse()
        else:
            with torch.no_grad():
                own[rows.ids] += rows.values.to(own.dtype)
