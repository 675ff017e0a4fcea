"""Rows of one cold storage, copied to and from buffers of a GPU by the copy threads.

A storage holds arrays and knows no threads: space is reserved in it before rows are copied, and nothing else is asked
of it while a copy is under way. Rows that are scattered are written while other work goes on, so whoever uses the
storage otherwise calls `finish` first.
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
        """Fills `weight` and `state` with the rows `keys` (int64 (K,)) as they lie in storage, after all writes that
        were begun; returns when they are there. The weights of a row never written, whose score is zero, are not
        copied. `begun`: the job that `gather_when_reported` returned for these very rows and buffers. Raises
        `StorageError` where a score has no space to come back to."""
        self.cold.reserve_scores(keys.numpy())
        self._is_copying = True
        if begun is not None:
            copy_threads().finish()
        if begun is None or not begun.is_done:
            copy_threads().begin(CopyJob(keys, self.cold.weight, self.cold.state, weight, state))
            copy_threads().finish()

    def gather_when_reported(self, report: MissReport, weight: torch.Tensor, state: torch.Tensor) -> CopyJob | None:
        """Lets the copy threads gather the rows of a report as soon as it is there, if all of them fit into `weight`
        and `state`; returns at once. `gather` waits for the rows. Until `gather` or `finish` the buffers and
        `report.words` are not to be used, nor the rows written. None, with nothing begun, where no thread can wait, or
        scores have yet to get their space, which takes their keys."""
        self.cold.begin_changes()
        if not self.cold.has_all_scores_reserved:
            return None
        job = CopyJob(report.keys(weight.shape[0]), self.cold.weight, self.cold.state, weight, state, report=report)
        self._is_copying = True
        return job if copy_threads().begin_when_reported(job) else None

    def reserve(self, keys: torch.Tensor, dirty: torch.Tensor) -> None:
        """Takes space for those of the rows `keys` (int64 (K,)) that are `dirty` (uint8 (K,)), before `scatter`. Raises
        `StorageFullError`, with every row as it was."""
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
