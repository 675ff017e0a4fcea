"""Batches of several tables that are planned as one. Their form, of shapes and dtypes, is checked once: of a later
batch of the same form only the values are new."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tieredemb.lookup.bags import MAX_BAGS, EqualBags
from tieredemb.step.batch import Batch

if TYPE_CHECKING:
    from tieredemb.lookup.device_bags import Joined
    from tieredemb.tables.table_set import Place

MOST_FORMS = 8  # of one selection of tables: the last ones used


def is_joinable(batch: Batch) -> bool:
    """Whether forwards of such batches can be planned as one, if they have equally many bags: each id is in a bag."""
    if batch.weights is not None or batch.places:
        return False
    # offsets may include the end of the last bag, and there may be ids beyond it
    return not isinstance(batch.offsets, torch.Tensor) or batch.offsets.shape[0] == batch.size


def may_join(batches: Sequence[Batch]) -> bool:
    """Whether forwards of these batches, one of each of several tables, can be planned as one."""
    size = batches[0].size
    if size == 0 or any(batch.size != size or not is_joinable(batch) for batch in batches):
        return False
    return len(batches) ** 2 * size <= MAX_BAGS and sum(batch.ids.shape[0] for batch in batches) > 0


class Block(NamedTuple):
    """The forwards in one pool. `positions`: of the forwards among all · `ids`: the range of their ids · `starts`:
    where the ids of each forward begin in this range, and the end · `bags`: if all are of one length · `edges`: the
    range of the bags' edges."""

    positions: range
    ids: slice
    starts: list[int]
    bags: EqualBags | None
    edges: slice


class Inputs(NamedTuple):
    """The form of a forward's ids and offsets, without the number of ids. `ids`, `offsets`: their dtypes, or int64 if
    they have to be copied before they are joined (`is_copied`); None without offsets · `stride`: from an id to the next
    one, in elements · `length`: of its bags, or −1 with offsets."""

    ids: torch.dtype
    offsets: torch.dtype | None
    is_copied: bool
    stride: int
    length: int

    @classmethod
    def of(cls, batch: Batch) -> Inputs:
        ids, *rest = batch.given
        assert isinstance(ids, torch.Tensor)
        offsets = rest[0] if isinstance(batch.offsets, torch.Tensor) else None
        given = [each for each in (ids, offsets) if isinstance(each, torch.Tensor)]
        is_read = ids.dim() == 1 or ids.is_contiguous()
        is_read &= all(each.dtype in (torch.int32, torch.int64) for each in given)
        is_read &= offsets is None or given[1].is_contiguous()
        dtypes = [each.dtype if is_read else torch.int64 for each in given]
        length = batch.offsets.length if isinstance(batch.offsets, EqualBags) else -1
        stride = ids.stride(0) if is_read and ids.dim() == 1 else 1
        return cls(dtypes[0], dtypes[1] if len(dtypes) > 1 else None, not is_read, stride, length)


class BatchForm:
    """The form of batches that `may_join`. `sizes`: how many batches are of each pool · `size`: samples of each ·
    `counts`: ids of each · `inputs`: of each · `with_offsets`: which have offsets · `blocks`: of each pool · `where`:
    of each batch its block, and its position there · `is_equal`: whether the bags of each block are of one length, so
    that no edges are joined · `layout`: distinguishes forms with equal numbers of ids and samples."""

    def __init__(self, size: int, counts: Sequence[int], inputs: Sequence[Inputs], sizes: Sequence[int]) -> None:
        self.size, self.counts, self.inputs, self._sizes = size, [*counts], inputs, sizes
        self.lengths = [each.length for each in inputs]
        self.with_offsets = [number for number, length in enumerate(self.lengths) if length < 0]
        self.blocks: list[Block] = []
        self.where: list[tuple[int, int]] = []
        for number, count in enumerate(sizes):
            self.blocks.append(self._block(number, range(len(self.where), len(self.where) + count)))
            self.where += [(number, place) for place in range(count)]
        self.is_equal = all(block.bags is not None for block in self.blocks)
        self.edges = len(self.counts) * self.size + len(self.blocks)
        self.layout = tuple(block.bags if self.is_equal else len(block.positions) for block in self.blocks)

    @classmethod
    def of(cls, batches: Sequence[Batch], sizes: Sequence[int]) -> BatchForm:
        """The form of these batches."""
        return cls(batches[0].size, [batch.ids.shape[0] for batch in batches], [*map(Inputs.of, batches)], sizes)

    def of_counts(self, counts: Sequence[int]) -> BatchForm:
        """The same form with other numbers of ids."""
        return BatchForm(self.size, counts, self.inputs, self._sizes)

    def _block(self, number: int, positions: range) -> Block:
        first, starts = sum(self.counts[: positions.start]), [0]
        for position in positions:
            starts.append(starts[-1] + self.counts[position])
        length, size = self.lengths[positions.start], self.size
        is_equal = length >= 0 and {self.lengths[position] for position in positions} == {length}
        edges = slice(positions.start * size + number, positions.stop * size + number + 1)
        bags = EqualBags(len(positions) * size, length) if is_equal else None
        return Block(positions, slice(first, first + starts[-1]), starts, bags, edges)

    @functools.cached_property
    def arrays(self) -> tuple[Any, Any]:
        """The form as a CPU's `join_edges` takes it: numpy, int64 (5, F) and (F,)."""
        given = [self.with_offsets.index(number) if length < 0 else -1 for number, length in enumerate(self.lengths)]
        ends = [-1] * len(given)
        for block in self.blocks:
            ends[block.positions[-1]] = block.starts[-1]
        lengths, blocks = [max(0, each) for each in self.lengths], [number for number, _ in self.where]
        return np.array([self._before, given, lengths, blocks, ends], np.int64), np.array(self.counts, np.int64)

    @property
    def _before(self) -> list[int]:
        """For each batch, how many ids of its block are before its own."""
        return [start for block in self.blocks for start in block.starts[:-1]]

    @functools.cached_property
    def joined(self) -> Joined:
        """The form as a GPU's `join_bags` takes it."""
        from tieredemb.lookup.device_bags import Joined, kind_of

        last = {block.positions[-1] for block in self.blocks}
        return Joined(
            batch=self.size,
            stride=[each.stride for each in self.inputs],
            start=[block.ids.start + start for block in self.blocks for start in block.starts[:-1]],
            n_ids=self.counts,
            before=self._before,
            edge=[position * self.size + block for position, (block, _) in enumerate(self.where)],
            kind=[
                kind_of(each.ids, each.offsets, each.length, is_last=position in last)
                for position, each in enumerate(self.inputs)
            ],
        )

    def batch(self, ids: torch.Tensor, edges: torch.Tensor | None) -> Batch:
        """The joined inputs of the forwards, as one batch. `edges`: of all bags, block by block, unless these are of
        one length."""
        bags: Any = self.blocks[0].bags if edges is None else edges
        return Batch(ids, bags, self.edges, True, self.size, None, (ids,))


class BatchForms:
    """The forms for one selection of tables: the last one for each signature of the inputs (`guards_of`)."""

    def __init__(self) -> None:
        self._place: weakref.ref[Place] | None = None
        self._known: OrderedDict[Any, BatchForm] = OrderedDict()

    def get(self, signature: Any, counts: Sequence[int], place: Place) -> BatchForm | None:
        """The form of batches with that signature, and `counts` ids; None if such were not checked for the present
        place of the tables, or there are no ids."""
        known = self._known  # another thread may replace it, for another place
        if self._place is None or self._place() is not place:
            return None
        found = known.get(signature)
        if found is None:
            return None
        if found.counts != counts:
            if sum(counts) == 0:
                return None
            found = known[signature] = found.of_counts(counts)
        with contextlib.suppress(KeyError):  # another thread may have removed it
            known.move_to_end(signature)
        return found

    def put(self, signature: Any, place: Place, form: BatchForm) -> None:
        """Keeps the form of batches with that signature, which were checked."""
        if self._place is None or self._place() is not place:
            self._known = OrderedDict()
            self._place = weakref.ref(place)
        known = self._known
        known[signature] = form
        with contextlib.suppress(KeyError):
            if len(known) > MOST_FORMS:
                known.popitem(last=False)
