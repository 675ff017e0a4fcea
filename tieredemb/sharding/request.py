"""What all ranks ask of one in the tables of one width: one batch, of rows of tables that are dealt out, and of bags of
those that the rank holds whole. So there is one plan of it, and one update.

The ids of all ranks are one batch feature by feature, and within a feature rank by rank: the order that one process
would have. Rows of its output are single rows, or pooled bags (`step.stack`). So an owner's update is that of one
process, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tieredemb.config import Mode
from tieredemb.sharding.asked import AskedPart, spans, uploaded
from tieredemb.step.batch import Batch
from tieredemb.step.program import Call
from tieredemb.step.stack import Run, Stack


class Kind(NamedTuple):
    """How a feature is looked up where its rows are. `part`: which part it is of · `mode`: how its bags are pooled
    there; None where rows go back."""

    part: int
    mode: Mode | None


class Request:
    """Of one width. `parts`: what is asked of each part · `batch`: what this rank looks up, once it has come
    (`take`)."""

    batch: Batch
    keeps_gradients = False  # as they come: they are put into the order of the ids

    def __init__(self, parts: Sequence[AskedPart], kinds: Sequence[Kind], device: torch.device) -> None:
        """`kinds`: of the features, in their order."""
        self.parts, self._kinds, self._device = list(parts), kinds, device
        self._pieces: list[tuple[int, int, int]] = []  # ids of neighbouring features: the part, the first, the end
        self._weights: torch.Tensor | None = None

    def take(self, came: Sequence[torch.Tensor]) -> None:
        """What is asked has come, of each part. Does not synchronise."""
        for part, message in zip(self.parts, came, strict=True):
            part.take(message)
        runs, ends = self._runs()
        ids = self._joined([part.ids for part in self.parts])
        stack = self._stack(runs) if any(part.is_whole for part in self.parts) else None
        self._edges = edges = uploaded(np.array(ends, np.int64), self._device)
        self.batch = Batch(ids, edges, len(edges), True, 1, None, (ids, edges), stack=stack)

    def _runs(self) -> tuple[list[Run], list[int]]:
        """Neighbouring features whose bags are pooled alike, and where the ids of each feature begin and end."""
        runs, ends, done = [], [0], [0] * len(self.parts)
        for kind, its in itertools.groupby(self._kinds):
            part, start = self.parts[kind.part], done[kind.part]
            stop = done[kind.part] = start + len(list(its))
            first, last = part.ends[start], part.ends[stop]
            low, high, shift = part.grads.ends[start], part.grads.ends[stop], ends[-1] - first
            if kind.mode is not None and low < high:
                edges = part.edges[low : high + 1] + shift if shift else part.edges[low : high + 1]
                runs.append(Run((first + shift, last + shift), (low, high), kind.mode, edges))
            self._pieces.append((kind.part, first, last))
            ends += [shift + end for end in part.ends[start + 1 : stop + 1]]
        return runs, ends

    @property
    def _bags(self) -> int:
        """How many rows of the output are of bags."""
        return sum(part.grads.ends[-1] for part in self.parts if part.is_whole)

    def _stack(self, runs: list[Run]) -> Stack:
        row = []
        for part in self.parts:
            numbers = torch.arange(part.grads.ends[-1], dtype=torch.int32, device=self._device)
            if not part.has_ones:
                numbers = torch.repeat_interleave(numbers, part.edges.diff(), output_size=part.ends[-1])
            row.append(numbers if part.is_whole else numbers + self._bags)
        rows = sum(part.grads.ends[-1] for part in self.parts)
        is_plain = all(part.is_whole and part.has_ones for part in self.parts)
        is_plain = is_plain and all(run.mode == "sum" for run in runs)
        return Stack(runs, self._joined(row), self._bags, rows, self._picked(), is_plain)

    def _picked(self) -> torch.Tensor:
        """Which of all ids have the rows that go back one by one, in the order in which they do."""
        for number, part in enumerate(self.parts):
            if not part.is_whole:
                lengths = np.array([last - first for _, first, last in self._pieces], np.int64)
                starts, its = np.cumsum(lengths) - lengths, [p == number for p, _, _ in self._pieces]
                return spans(starts[its], lengths[its], self._device)[part.picked]
        return torch.empty(0, dtype=torch.int64, device=self._device)

    def _joined(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values of the ids of each part, feature by feature, in the order of all features."""
        return values[0] if len(values) == 1 else torch.cat([values[p][first:last] for p, first, last in self._pieces])

    def _filled(self, number: int, values: torch.Tensor) -> list[torch.Tensor]:
        """Of each part what it multiplies by: `values` in that of this number, ones in others."""
        return [values if p == number else values.new_ones(part.ends[-1]) for p, part in enumerate(self.parts)]

    # --- forward and backward ---------------------------------------------------------------------------------------

    def look_up(
        self, call: Call, weights: Sequence[torch.Tensor | None], dtype: torch.dtype, *, trains: bool, every: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """What goes back, of each part, (·, D) rank by rank: rows, or pooled bags of `dtype`; and, where `every` row of
        ids that are pooled is asked for, those rows, too, (N, D). `weights`: float32 (N,), rank by rank, of those ids,
        where they are given."""
        if self.batch.stack is None:
            (part,) = self.parts
            return [call.pick(part.picked)], [None]
        for number, its in enumerate(weights):
            if its is not None:
                self._weights = self._joined(self._filled(number, self.parts[number].order.by_feature(its)))
        found = call.pool_stack(self._weights, dtype, differentiable=trains, all_rows=every)
        answers = [part.answer.by_rank(found.bags) if part.is_whole else found.rows for part in self.parts]
        return answers, [self._every(number, found.every) for number in range(len(self.parts))]

    def _every(self, number: int, rows: torch.Tensor | None) -> torch.Tensor | None:
        """Of the `rows` of all ids those of a part that pools, rank by rank."""
        part = self.parts[number]
        if rows is None or not part.is_whole:
            return None
        pieces, begin = [], 0
        for p, first, last in self._pieces:
            if p == number:
                pieces.append(rows[begin : begin + last - first])
            begin += last - first
        return part.order.by_rank(torch.cat(pieces))

    def gradient(self, call: Call, came: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """That of the output of `call`, float32 (·, D), of what came of each part, rank by rank: gradients (·, D), and
        where they are multiplied by something that, float32 (N,)."""
        parts = list(zip(self.parts, came, strict=True))
        for number, (part, (_, *scale)) in enumerate(parts):
            for each in scale:
                filled = self._joined(self._filled(number, part.order.by_feature(each)))
                call.weigh(filled if self._weights is None else filled * self._weights)
        # bags lie before single rows
        parts.sort(key=lambda each: not each[0].is_whole)
        grads = [part.grads.by_feature(grad) for part, (grad, *_) in parts]
        return grads[0] if len(grads) == 1 else torch.cat(grads)

    def tensors(self) -> list[torch.Tensor]:
        """All that lie on the device."""
        of_parts = [tensor for part in self.parts for tensor in part.tensors()]
        stack = self.batch.stack
        weights = [] if self._weights is None else [self._weights]
        return [*of_parts, *weights, self.batch.ids, self._edges, *(() if stack is None else stack.tensors())]
