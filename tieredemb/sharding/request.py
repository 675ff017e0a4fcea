"""What all ranks request of one in the tables of one width, as one batch: rows of row-wise tables, and bags of tables
that this rank holds whole, alone or as all ranks do. So there is one plan of it, and one update.

Messages are blocks of one size. The ids of all ranks are put into the order that one process would have, feature by
feature and in these rank by rank. So an owner's update is that of one process, bit for bit. On a GPU kernels do this
(`device_padding`), as the host does not know how many ids there are: there is memory for as many as fit, and those
behind the last one belong to no bag. A rank that has fewer samples than another sends bags without ids for the others.

Rows of the output are single rows, or pooled bags (`step.stack`).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from tieredemb.config import MODES
from tieredemb.shallow import shallow_copy
from tieredemb.sharding.bags import Part
from tieredemb.sharding.device_padding import Joiner, PooledFeature
from tieredemb.sharding.header import Bound
from tieredemb.sharding.padding import ReceivedMessages, firsts_of, plain_ids, read
from tieredemb.step.batch import Batch, Given
from tieredemb.step.program import Call
from tieredemb.step.stack import PooledBags, Stack

_NUMBERS = itertools.count()


class RequestLayout:
    """What all requests of one width have in common. Features are in the order of the collection."""

    def __init__(self, parts: Sequence[Part], rank: int, ranks: int, device: torch.device) -> None:
        self.parts, self.rank, self.ranks, self.device = list(parts), rank, ranks, device
        held = [part.held_by(rank) for part in parts]
        self.held = [int(its.sum()) for its in held]
        # the part whose rows go back, if there is one
        self.row_wise = next((number for number, part in enumerate(parts) if not part.is_table_wise), None)
        firsts = np.cumsum([0, *(len(part.space.features) for part in parts)])
        found = sorted((f, p, k) for p, part in enumerate(parts) for k, f in enumerate(part.space.features.tolist()))
        order = [int(firsts[p]) + k for _, p, k in found]  # of each feature, its position among those of all parts
        self.order = torch.tensor(order, dtype=torch.int64, device="cpu")  # a GPU's is in its joiner
        # the features whose bags are pooled here: of each part their positions among all features, and how
        self.pooled = [[f for f, (_, q, k) in enumerate(found) if p == q and held[p][k]] for p in range(len(parts))]
        self.modes = [tuple(MODES[parts[p].space.mode[found[f][2]]] for f in its) for p, its in enumerate(self.pooled)]
        self.bags_before = [0, *itertools.accumulate(self.held)]
        self.joiner: Joiner | None = None
        if device.type == "cuda":
            pooled = [PooledFeature(p, k, f) for p, its in enumerate(self.pooled) for k, f in enumerate(its)]
            self.joiner = Joiner(parts, ranks, order, pooled, device)

    def of(self, samples: int, bounds: Sequence[Bound]) -> Request:
        """The request of a batch in which no rank has more `samples`, in blocks of the `bounds`."""
        return Request(self, samples, bounds)


class Request:
    """The request of one batch. `row_wise`: the number of the part whose rows go back, if there is one · `batch`: what
    this rank looks up, once the messages were received (`take`)."""

    batch: Batch

    def __init__(self, layout: RequestLayout, samples: int, bounds: Sequence[Bound]) -> None:
        self._layout, self._samples, self._bounds, self.row_wise = layout, samples, bounds, layout.row_wise
        count = layout.ranks * samples
        # of each part, the first row of its bags in the output, and the end; how many bags there are
        self._spans = [(count * before, count * end) for before, end in itertools.pairwise(layout.bags_before)]
        self._bags = count * layout.bags_before[-1]
        self._entries = [layout.ranks * bound.ids for bound in bounds]
        self._weights: torch.Tensor | None = None

    def take(self, messages: Sequence[torch.Tensor]) -> None:
        """Takes the received `messages`, of each part int64 (W, M). Does not synchronise."""
        layout = self._layout
        if layout.joiner is not None:
            joined = layout.joiner.join(messages, self._samples, self._bounds)
            self._ends, self._joined = joined.edges, joined.joined
            ids, stack = joined.ids, self._stack_of(joined.begins, joined.row, joined.picked)
        else:  # on a CPU, where the host knows how many ids it has received
            received = [
                read(values, len(part.owner), bound.ids, held, self._samples)
                for values, part, held, bound in zip(messages, layout.parts, layout.held, self._bounds, strict=True)
            ]
            self._ends = self._place(received)
            ids, destination = torch.cat([message.ids for message in received]), None
            if layout.row_wise is not None:
                row_wise, rows = received[layout.row_wise], self._bounds[layout.row_wise].rows
                if rows is not None:
                    ids, destination = plain_ids(ids), firsts_of(row_wise.ids, row_wise.counts.sum(1), rows)
            lengths = [message.lengths for message in received if message.lengths is not None]
            stack = self._stack(self._ends, lengths, destination)
            ids = ids.index_select(0, self._joined)
        edges = self._ends
        self.batch = Batch(ids, edges, len(edges), False, 1, None, (ids, edges), stack=stack)

    def _place(self, messages: Sequence[ReceivedMessages]) -> torch.Tensor:
        """Finds the entry of each id; returns where features begin and end, int64 (F + 1,)."""
        ranks, counts, firsts = self._layout.ranks, [], []
        starts = [0, *itertools.accumulate(self._entries)]
        rank = torch.arange(ranks, device=self._layout.device)[:, None]
        for message, bound, start in zip(messages, self._bounds, starts, strict=False):
            counts.append(message.counts)
            firsts.append(torch.cumsum(message.counts, 1) - message.counts + rank * bound.ids + start)
        order = self._layout.order
        count = torch.cat(counts, 1).index_select(1, order).t().reshape(-1)  # by feature and rank
        first = torch.cat(firsts, 1).index_select(1, order).t().reshape(-1)
        ends = torch.cumsum(count, 0)
        number = torch.arange(int(ends[-1]), device=self._layout.device)
        piece = torch.searchsorted(ends, number, right=True)
        self._joined = (first - ends + count)[piece] + number
        return torch.cat([ends[:1] * 0, ends[ranks - 1 :: ranks]])

    def _entry(self, number: int) -> torch.Tensor:
        """Of each id its entry in a part, int64 (N,); W · bound for ids of other parts, and behind the last id."""
        start, entries = sum(self._entries[:number]), self._entries[number]
        if len(self._entries) == 1:
            return self._joined
        is_here = (self._joined >= start) & (self._joined < start + entries)
        return torch.where(is_here, self._joined - start, entries)

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradient of its output is what its one part receives, unchanged."""
        return len(self._bounds) == 1 and self.row_wise is not None

    def _stack_of(self, begins: torch.Tensor, row: torch.Tensor, picked: torch.Tensor) -> Stack:
        """The layout of the output: the bags of each part, sample by sample, and behind them the rows of ids, one for
        each entry, whether or not it is requested. Rows lie in the order in which their gradients are received, so
        these need not be sorted. `begins`: see `Joined`."""
        layout, bags, samples = self._layout, self._bags, self._layout.ranks * self._samples
        rows = 1 if layout.row_wise is None else self._entries[layout.row_wise]  # ids of other parts get the last
        edges = begins.split([(samples + 1) * count for count in layout.held]) if bags else ()
        each = zip(self._spans, layout.modes, edges, strict=False)
        pooled = [PooledBags(span, samples, modes, its) for span, modes, its in each if modes]
        return Stack(pooled, row, bags, bags + rows, picked)

    def _stack(self, edges: torch.Tensor, lengths: Sequence[torch.Tensor], destination: torch.Tensor | None) -> Stack:
        """The same on a CPU. `lengths`: of the bags that are pooled here, int64 (F′, W · B), of each part with such
        features · `destination`: see `_picked`."""
        bags, layout = self._bags, self._layout
        row_wise, begins = layout.row_wise, edges[:0]
        number = edges.new_full((len(self._joined),), bags)
        picked = edges[:0]
        if row_wise is not None:
            entry = self._entry(row_wise)
            number += entry.clamp(max=self._entries[row_wise] - 1)
            picked = self._picked(entry, destination)
        if bags:
            each, features = torch.cat([*lengths]), list(itertools.chain(*layout.pooled))
            ends = torch.cat([edges.new_zeros((len(each), 1)), each.cumsum(1)], 1) + edges[features][:, None]
            begins = torch.minimum(ends, edges[1:][features][:, None])  # no bag reads beyond its feature
            own, starts = iter(begins), edges.tolist()
            for p, its in enumerate(layout.pooled):
                for k, f in enumerate(its):
                    ids = torch.arange(starts[f], starts[f + 1], device=layout.device)
                    sample = torch.searchsorted(next(own)[:-1], ids, right=True) - 1
                    number[starts[f] : starts[f + 1]] = self._spans[p][0] + sample * layout.held[p] + k
            begins = begins.view(-1)
        return self._stack_of(begins, number.to(torch.int32), picked)

    def _picked(self, entry: torch.Tensor, destination: torch.Tensor | None) -> torch.Tensor:
        """Which id each of the rows that go back is of, int64 (K,); any id for entries that are padding; empty where
        there are no ids. `entry`: of each id · `destination`: of each entry, where its row lies among those, if not at
        the entry (`firsts_of`)."""
        back = self._back
        if destination is not None:  # ids of other parts go behind all rows
            entry = torch.cat([destination, destination.new_full((1,), back)]).index_select(0, entry)
        picked = self._joined.new_zeros(back + 1)
        picked.index_copy_(0, entry, torch.arange(len(self._joined), device=self._layout.device))
        return picked[:-1] if len(self._joined) else picked[:0]

    @property
    def _back(self) -> int:
        """How many rows go back."""
        assert self.row_wise is not None
        return self._layout.ranks * self._bounds[self.row_wise].row_count

    def _answer(self, call: Call, rows: torch.Tensor) -> torch.Tensor:
        """The rows to send, of `rows` that were picked; none if they have been written to the other ranks' memory."""
        return rows if len(rows) or call.rows_to is not None else rows.new_zeros((self._back, rows.shape[1]))

    def _gathered(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """Of `values` of a part's entries, (W · bound, …), those of the ids, in their order; ids of other parts get any
        of them."""
        return values.index_select(0, self._entry(number).clamp(max=self._entries[number] - 1))

    def _scattered(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """The inverse: the values of a part's entries, of `values` of all ids."""
        out = values.new_empty((self._entries[number] + 1, *values.shape[1:]))
        out.index_copy_(0, self._entry(number)[: len(values)], values)
        return out[:-1]

    def _factors(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """Factors of all ids: the `values` of a part's entries, ones for ids of other parts."""
        return torch.where(self._entry(number) < self._entries[number], self._gathered(number, values), 1.0)

    # --- forward and backward ---------------------------------------------------------------------------------------

    def look_up(
        self, call: Call, weights: Sequence[torch.Tensor | None], dtype: torch.dtype, *, trains: bool, every: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Looks the batch up. Returns what goes back, of each part, (·, D) rank by rank: rows, or pooled bags of
        `dtype`; what stays here is of this rank's bags alone. If `every` row is requested, returns the rows of ids that
        are pooled, too, (W · bound, D). `weights`: float32 (W · bound,), of the entries of each part, where they are
        given."""
        given = [self._factors(number, values) for number, values in enumerate(weights) if values is not None]
        if given:
            self._weights = functools.reduce(operator.mul, given)
        parts = self._layout.parts
        every = every and any(part.is_table_wise for part in parts)
        found = call.pool_stack(self._weights, dtype, differentiable=trains, all_rows=every)
        answers, all_rows = list[torch.Tensor](), list[torch.Tensor | None]()
        for number, part in enumerate(parts):
            if part.is_table_wise:
                answers.append(self._answered(found.bags, number))
                all_rows.append(None if found.every is None else self._rows_of(number, found.every))
            else:
                answers.append(self._answer(call, found.rows))
                all_rows.append(None)
        return answers, all_rows

    def _answered(self, bags: torch.Tensor, number: int) -> torch.Tensor:
        """The bags of a part, rank by rank, of all `bags`, (K, D); only those of this rank where they stay here."""
        first, end = self._spans[number]
        if self._layout.parts[number].copies > 1:
            bags_of_rank = self._layout.held[number] * self._samples
            first += self._layout.rank * bags_of_rank
            end = first + bags_of_rank
        return bags[first:end]

    def _rows_of(self, number: int, every: torch.Tensor) -> torch.Tensor:
        """The rows of a part's entries, of `every` row of all ids; only those of this rank where they stay here."""
        rows, bound = self._scattered(number, every), self._bounds[number].ids
        return rows if self._layout.parts[number].copies == 1 else rows[self._layout.rank * bound :][:bound]

    def gradient(self, call: Call, received: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The gradient of the output of `call`, float32 (·, D). `received`: of each part, rank by rank, gradients (·,
        D) and, where they have factors, those, float32 (W · bound,)."""
        bags, rows = list[torch.Tensor](), list[torch.Tensor]()
        for number, (part, (grad, *scales)) in enumerate(zip(self._layout.parts, received, strict=True)):
            for factors in scales:
                filled = self._factors(number, factors)
                call.weigh(filled if self._weights is None else filled * self._weights)
            (bags if part.is_table_wise else rows).append(grad)
        if not rows:
            rows.append(received[0][0].new_zeros((1, received[0][0].shape[1])))
        return _as_one([*bags, *rows])

    def relocate(self, put: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `GpuBags`; to be called behind `take`, on a GPU."""
        self._joined, self._ends = put(self._joined), put(self._ends)
        ids, stack = put(self.batch.ids), self.batch.stack
        if stack is not None:
            pooled = [bags._replace(edges=put(bags.edges)) for bags in stack.pooled]
            stack = replace(stack, pooled=pooled, row=put(stack.row), picked=put(stack.picked))
        self.batch = self.batch._replace(ids=ids, offsets=self._ends, given=(ids, self._ends), stack=stack)

    def rebind(self) -> Request:
        """See `GpuBags`."""
        request = shallow_copy(self)
        request._weights = None
        return request

    def separated(self) -> Request:
        """As `rebind`, for a forward whose update may be deferred until another forward has run: what the update reads
        is copied. A number tells its inputs from those of that forward, which lie at the same addresses."""
        request, stack = self.rebind(), self.batch.stack
        if stack is not None:
            pooled = [bags._replace(edges=bags.edges.clone()) for bags in stack.pooled]
            stack = replace(stack, pooled=pooled)
        given = (self.batch.ids, self._ends, next(_NUMBERS))
        request.batch = self.batch._replace(given=cast("Given", given), stack=stack)
        return request

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that it has on the device."""
        stack = self.batch.stack
        weights = [] if self._weights is None else [self._weights]
        return [self._joined, self._ends, self.batch.ids, *weights, *(stack.tensors() if stack else ())]


def _as_one(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Several `values` (·, D), one behind another: (·, D). A view, if they lie so in one memory."""
    values = [each for each in values if len(each)] or values[:1]
    first = values[0]
    if len(values) == 1:
        return first
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for each in values:
        if each.data_ptr() != end or each.untyped_storage().data_ptr() != storage:
            return torch.cat([*values])
        end += each.nbytes
    return first.as_strided((sum(map(len, values)), first.shape[1]), first.stride())
