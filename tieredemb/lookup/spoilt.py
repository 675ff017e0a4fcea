"""Gradients that were multiplied by a factor that is not finite, as after a norm that is NaN. In torch all rows of a
table are NaN after such a step, as the zeros of rows outside the batch are multiplied, too; a step that cannot do the
same is refused."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tieredemb.kernels.compiler import kernel

FILE = "lookup/spoilt.cu"
WARP = 32


class Scaling(NamedTuple):
    """What the gradients of a step on a GPU are multiplied by, all float32. `found_inf`: (), not 0 where the step is
    not to be taken · `grad_scale`: (), a scaler's, which they are divided by · `factors`: (T,), see `refuse_spoilt`."""

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among these."""
        return [each for each in self if each is not None]


def why_refused(table: str, *, is_dense: bool) -> str:
    """What is wrong with a step in which the gradient of the table of that name is spoilt. `is_dense`: whether the
    optimizer moves every row."""
    why = "its rows, which the optimizer moves in steps that use them alone, cannot all become NaN"
    if is_dense:
        why = "that of others of the module was not, with which it takes its steps"
    return (
        f"the gradient of table {table!r} was multiplied by NaN or infinity, as clip_grad_norm_ does where a gradient "
        f"is NaN; in torch no row of the table would be a number after the step, and {why}. Find the NaN, skip the "
        f"step, or clip with error_if_nonfinite=True"
    )


def refuse_spoilt(
    spoilt: torch.Tensor,
    tables: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    skipped: torch.Tensor,
    report: int,
    *,
    is_dense: bool,
    separate: bool,
) -> torch.Tensor | None:
    """On a GPU: writes to `skipped`, float32 (), whether to skip the step: after an infinity that a scaler has found
    (`found_inf`, float32 ()), or because no step can do what torch does, which is reported to the host's words at
    `report`. Returns for a dense optimizer a factor of gradients, float32 (T,): NaN or 1. Does not synchronise.

    `spoilt`: float32 (T,), NaN for a table whose gradient was multiplied by a factor that is not finite · `tables`:
    their numbers in the report, int32 (T,), or None for 0, 1, … · `separate`: whether each takes separate steps.
    """
    factors = torch.empty_like(spoilt) if is_dense else None
    kernel(FILE, "spoilt_refuse")(
        1, WARP, spoilt, spoilt.shape[0], 0 if tables is None else tables, is_dense, separate,
        0 if found_inf is None else found_inf, skipped, 0 if factors is None else factors, report,
    )  # fmt: skip
    return factors
