"""Rows of one cold storage, copied to and from buffers of a GPU by the copy threads.

A storage has arrays and knows no threads: space is reserved in it before rows are copied, and it is not called during a
copy. Scattered rows are written while other work goes on, so any other use of the storage calls `finish` first.
"""

from __future__ import annotations

import torch

from tieredemb.cache.device.copy_threads import CopyJob, MissReport, copy_threads
from tieredemb.storage.base import ColdRows


class RowCopies:
    """The copies of the rows of `cold`. Buffers are contiguous CPU tensors: `weight` (K, D) in the rows' dtype, `state`
    int32 (K, S + 1), which ends with the score. The caller serialises calls and passes keys in range."""

    def __init__(self, cold: ColdRows) -> None:
        self.cold = cold
        self._is_copying = False  # whether rows may yet be being written, or read

    def gather(
        self, keys: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, *, begun: CopyJob | None = None
    ) -> None:
        """Fills `weight` and `state` with the rows `keys` (int64 (K,)) of storage, after all writes that were begun;
        returns when they are filled. The weights of a row never written, whose score is zero, are not copied. `begun`:
        the job that `gather_when_reported` returned for exactly these rows and buffers. Raises `StorageError` if there
        is no space to write a score back."""
        self.cold.reserve_scores(keys.numpy())
        self._is_copying = True
        if begun is not None:
            copy_threads().finish()
        if begun is None or not begun.is_done:
            copy_threads().begin(CopyJob(keys, self.cold.weight, self.cold.state, weight, state))
            copy_threads().finish()

    def gather_when_reported(self, report: MissReport, weight: torch.Tensor, state: torch.Tensor) -> CopyJob | None:
        """Has the copy threads gather the rows of a report as soon as it arrives, if all of them fit into `weight` and
        `state`; returns at once. `gather` waits for the rows. Until `gather` or `finish` the buffers and `report.words`
        must not be used, nor the rows written. Returns None, with nothing begun, if no thread can wait, or space for
        scores is not reserved yet, for which the keys are needed."""
        self.cold.begin_changes()
        if not self.cold.has_all_scores_reserved:
            return None
        job = CopyJob(report.keys(weight.shape[0]), self.cold.weight, self.cold.state, weight, state, report=report)
        self._is_copying = True
        return job if copy_threads().begin_when_reported(job) else None

    def reserve(self, keys: torch.Tensor, dirty: torch.Tensor) -> None:
        """Reserves space for the rows of `keys` (int64 (K,)) that are `dirty` (uint8 (K,)), before `scatter`. Raises
        `StorageFullError`, with every row unchanged."""
        # numpy, and not torch: that would wake its own threads for it, which then keep all cores from others
        chosen, moved = keys.numpy(), dirty.numpy()
        # to choose them takes longer than all else where nothing has to be taken
        self.cold.reserve(chosen if self.cold.has_all_reserved or moved.all() else chosen[moved != 0])

    def scatter(self, keys: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, dirty: torch.Tensor) -> None:
        """Begins to write `weight` and `state` to the rows `keys` (int64 (K,), distinct), for which `reserve` was
        called: the whole row where `dirty` (uint8 (K,)) is not zero, else its score. The next `gather`, `scatter` or
        `finish` waits until all is written; until then the tensors are not to be changed."""
        self._is_copying = True
        copy_threads().begin(CopyJob(keys, self.cold.weight, self.cold.state, weight, state, dirty))

    def finish(self) -> None:
        """Returns once all rows are written that `scatter` was given. A gather that waits for its report is given
        up."""
        if self._is_copying:
            copy_threads().finish()
            self._is_copying = False
