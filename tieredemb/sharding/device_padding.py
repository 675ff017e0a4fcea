"""Exchanges of one size on a GPU: a few kernels do what `padding` and `request` do on a CPU by operations on tensors,
each of them a launch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tieredemb.kernels.arguments import StructValue, struct_type
from tieredemb.kernels.compiler import blocks_for, kernel
from tieredemb.kernels.constants import MOST_PARTS
from tieredemb.kernels.streams import on_device
from tieredemb.sharding.bags import Part
from tieredemb.sharding.header import Bound

PADDING = "sharding/padding.cu"  # compiled as one
THREADS, IN_ONE_BLOCK, IN_ONE_WARP = 256, 1024, 32


def prepare(device: torch.device) -> None:
    """Begins to compile the kernels, which may first be launched in a capture."""
    kernel(PADDING, "blocks_begin").prepare(device.index)


class Sender:
    """What messages for one `part` have in common. `before`: int64 (receivers + 1,), of how many features the bags are
    pooled by the receivers before each one, or 0 where none are."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.part = part
        self.before: torch.Tensor | int = 0
        self._by_rank: torch.Tensor | int = 0
        if part.is_table_wise:
            before = [*itertools.accumulate(part.held * part.copies, initial=0)]
            self.before = torch.tensor(before, dtype=torch.int64, device=device)
            self._by_rank = torch.from_numpy(part.by_rank).to(device)

    def bags(self, offsets: torch.Tensor, order: torch.Tensor, batch: int, samples: int) -> StructValue:
        """As `bags_pad` takes them; `offsets`: of all bags, int64 (F · `batch` + 1,) · `order`: see `PaddedBags`."""
        return struct_type(PADDING, "SentBags")(
            held=self.before, by_rank=self._by_rank, offsets=offsets, order=order, batch=batch, samples=samples,
            most=self.part.most_held, copies=self.part.copies,
        )  # fmt: skip


class PaddedBags(NamedTuple):
    """Requests in blocks of one size. `order`: int64, the occurrences, `bound` for each different message · `bags`:
    int64 (F · B,), which bag each one is that comes back, −1 for a sample that this rank does not have; empty for
    row-wise tables."""

    order: torch.Tensor
    bags: torch.Tensor


def pad_bags(
    sender: Sender,
    counts: torch.Tensor,
    order: torch.Tensor,
    ids: torch.Tensor,
    homes: torch.Tensor,
    offsets: torch.Tensor,
    into: torch.Tensor,
    *,
    bound: Bound,
    batch: int,
    samples: int,
) -> PaddedBags:
    """Pads occurrences `order` and `ids`, int64 (·,), that lie rank by rank, to `bound.ids` for each, and writes `ids`
    `into` messages, int64 (W, M); see `Padding.pad` and `write_messages`. Makes `homes`, int32 (N,), which are numbers
    of rows, those of entries; see `Padding.move`, and where a row comes back for each id `Padding.place`. `counts`:
    int64 (W, columns), how many ids of each feature are requested of each rank, and behind those how many rows; of a
    feature without any, bags are sent as empty · `offsets`: int64 (F · `batch` + 1,), of all bags · `samples`: of the
    rank that has most. Does not synchronise."""
    ranks, device, features = sender.part.ranks, counts.device, len(sender.part.space.features)
    begins = counts.new_empty((2, ranks + 1))
    padded = counts.new_empty(ranks * bound.ids)
    of_bags = counts.new_empty(features * samples if sender.part.is_table_wise else 0)
    with on_device(device):
        kernel(PADDING, "blocks_begin")(1, IN_ONE_WARP, counts.data_ptr(), counts.stride(0), ranks, features, begins)
        kernel(PADDING, "bags_pad")(
            blocks_for(max(into.numel(), len(homes)), THREADS), THREADS, counts.data_ptr(), counts.stride(0), features,
            begins, ranks, bound.ids, -1 if bound.rows is None else bound.rows, order, len(order), ids, len(ids), homes,
            len(homes), sender.bags(offsets, of_bags, batch, samples), padded, into.data_ptr(), into.stride(0),
        )  # fmt: skip
    return PaddedBags(padded, of_bags)


class Joined(NamedTuple):
    """What all ranks have sent, in the order of one process: feature by feature, and in these rank by rank. `edges`:
    int64 (F + 1,), where features begin and end · `joined`: int64 (N,), the entry of each id among those of all parts,
    and N behind the last id · `ids`: int64 (N,) · `row`: int32 (N,), the row of the output · `picked`: int64 (K,),
    which ids have the rows that go back · `begins`: int64 (F′ · (W · B + 1),), of the features whose bags are pooled
    here, where bags begin among all ids, and the last one ends."""

    edges: torch.Tensor
    joined: torch.Tensor
    ids: torch.Tensor
    row: torch.Tensor
    picked: torch.Tensor
    begins: torch.Tensor


class PooledFeature(NamedTuple):
    """A feature whose bags are pooled here: its part, its position among those of the part that are, and its position
    among all features."""

    part: int
    of_part: int
    feature: int


class Joiner:
    """Joins what all ranks have sent for the `parts` of one width. `order`: of each feature, in the order of the
    collection, its position among those of all parts, one after the other · `pooled`: part by part."""

    def __init__(
        self,
        parts: Sequence[Part],
        ranks: int,
        order: Sequence[int],
        pooled: Sequence[PooledFeature],
        device: torch.device,
    ) -> None:
        self._ranks, self._device, self._features = ranks, device, [len(part.space.features) for part in parts]
        self._is_row_wise = not parts[0].is_table_wise  # the first one, if any
        held = Counter(its.part for its in pooled)
        self._bags = len(pooled)  # of each sample
        number = {its.feature: h for h, its in enumerate(pooled)}
        rows = [(*its, held[its.part]) for its in pooled]

        def upload(numbers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        self._pooled = struct_type(PADDING, "Pooled")(
            place=upload(sorted(range(len(order)), key=order.__getitem__)),
            number=upload([number.get(f, -1) for f in range(len(order))]),
            pooled=upload([*itertools.chain(*zip(*rows, strict=True))]), count=len(pooled),
        )  # fmt: skip

    def join(self, messages: Sequence[torch.Tensor], samples: int, bounds: Sequence[Bound]) -> Joined:
        """Joins the received `messages`, of each part int64 (W, M); no rank has more `samples`. Does not
        synchronise."""
        ranks, device, features, empty = self._ranks, self._device, sum(self._features), messages[0].new_empty
        a, b, c = self._messages(messages, bounds)
        entries, bags = ranks * sum(bound.ids for bound in bounds), self._bags * ranks * samples
        back, rows, firsts = 0, -1, 0  # all rows that go back, those to each rank, and the entries that may have them
        if self._is_row_wise:
            rows = bounds[0].rows or 0
            back, firsts = ranks * (rows or bounds[0].ids), ranks * bounds[0].ids * (rows > 0)
        ends, shift, ids_of_blocks = empty(ranks * features), empty(ranks * features), empty(MOST_PARTS * ranks)
        edges, joined, ids, picked = empty(features + 1), empty(entries), empty(entries), empty(back)
        begins = empty(bags + self._bags if bags else 0)
        row, marks = (torch.empty(n, dtype=torch.int32, device=device) for n in (entries, firsts + bags))
        of_bags, of_ids = blocks_for(max(1, bags), THREADS), blocks_for(max(1, entries), THREADS)
        with on_device(device):
            kernel(PADDING, "pieces_find")(
                1, IN_ONE_BLOCK, a, b, c, ranks, self._pooled, ends, shift, edges, ids_of_blocks
            )
            kernel(PADDING, "marks_write")(
                blocks_for(max(1, back, len(marks)), THREADS), THREADS, a, b, c, ranks, samples, self._pooled,
                ids_of_blocks, firsts, marks, picked, back,
            )  # fmt: skip
            sums = torch.cumsum(marks, 0, dtype=torch.int32) if len(marks) else marks
            if bags:
                kernel(PADDING, "bags_begin")(
                    of_bags, THREADS, ranks * samples, self._pooled, edges, firsts, sums, begins
                )
            kernel(PADDING, "ids_join")(
                of_ids,
                THREADS,
                a,
                b,
                c,
                ranks,
                ranks * samples,
                self._pooled,
                ends,
                shift,
                sums,
                begins,
                rows,
                joined,
                ids,
                row,
                picked,
            )
        return Joined(edges, joined, ids, row, picked, begins)

    def _messages(self, messages: Sequence[torch.Tensor], bounds: Sequence[Bound]) -> list[StructValue]:
        """As kernels take them."""
        made, start, first = list[StructValue](), 0, 0
        for k in range(MOST_PARTS):
            values = stride = bound = features = 0
            if k < len(messages):
                values, stride = messages[k].data_ptr(), messages[k].stride(0)
                bound, features = bounds[k].ids, self._features[k]
            made.append(
                struct_type(PADDING, "Messages")(
                    values=values, stride=stride, bound=bound, start=start, features=features, first=first
                )
            )
            start, first = start + self._ranks * bound, first + features
        return made
