"""Lookup, backward and update on a GPU: what `embedding_bag.py` and `optimizer.py` do, launched over device tensors.

Nothing here waits for the device. Rows are read and updated where they live: in slots, or without one (`overflow`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from tieredemb.config import OptimizerConfig
from tieredemb.kernels.arguments import StructValue, struct_type
from tieredemb.kernels.compiler import OPTIONS, blocks_for, kernel
from tieredemb.kernels.constants import CHUNK, MAX, MEAN, MOST_ADDRESSES
from tieredemb.kernels.row_format import RowFormat
from tieredemb.kernels.spread import MOST_BLOCKS as SPREAD_BLOCKS
from tieredemb.kernels.spread import RowSpread
from tieredemb.lookup import homes_sort
from tieredemb.lookup.device_bags import DeviceBags, DeviceKeySpace, words_of
from tieredemb.lookup.homes_sort import note_words, sort_homes
from tieredemb.lookup.optimizer import MOST_NUMBERS, device_numbers, recipe_file, recipe_flags
from tieredemb.lookup.optimizers.sgd import SGD
from tieredemb.lookup.rounding import DeviceDraws, no_draws
from tieredemb.lookup.spoilt import Scaling

BAG = "lookup/embedding_bag.cu"
THREADS = 256
MOST_BLOCKS = 4224
UPDATE_BLOCKS = 8448  # 64 a multiprocessor of an H200: items differ in length, so a block is worth little
BAGS_OF_ONE, LONG_BAGS = 4, 1  # bags a group of lanes takes: four for bags of one id, to have as many rows in flight
WORK_WORDS = 4  # of a `Work`
UNALIGNED = ("-DUNALIGNED",)  # outputs and gradients that are not read and written in vectors


class OverflowRows(Protocol):
    """Where rows without a slot are; see `cache.device.plan.OverflowRows`."""

    @property
    def weight(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def records(self) -> torch.Tensor | None: ...
    @property
    def names(self) -> torch.Tensor | None: ...
    @property
    def flags(self) -> tuple[str, ...]: ...


class HotTensors(Protocol):
    """`weight` (C, D), `state` float32 (C, S), `dirty` uint8 (C,)."""

    weight: torch.Tensor
    state: torch.Tensor
    dirty: torch.Tensor


class KeyedTensors(HotTensors, Protocol):
    """`key` int64 (C,), of the slots that are no resident table's."""

    key: torch.Tensor


@dataclass(frozen=True)
class Segments:
    """The occurrences of a batch sorted by home; occurrences of a row are in order. `homes`, `order`, `sorted_bag`:
    int32 (N,) · `work`: int32 (4,), how many items, chunks and long segments there are, and with what the sort notes
    `counted` · `items`, `longs`: int32 (·, 4)."""

    homes: torch.Tensor
    order: torch.Tensor
    sorted_bag: torch.Tensor
    counted: torch.Tensor
    work: torch.Tensor
    items: torch.Tensor
    longs: torch.Tensor


class DeviceLookup:
    """The kernels of one key space, compiled for its rows and optimizer."""

    def __init__(
        self,
        space: DeviceKeySpace,
        row: RowFormat,
        optimizer: OptimizerConfig | None,
        output_dtype: torch.dtype | None = None,
        *,
        separate: bool = False,
        draws: DeviceDraws | None = None,
    ) -> None:
        """`output_dtype`: of pooled rows; that of the rows unless it is given · `separate`: whether each feature is a
        table that takes steps of its own · `draws`: random bits for rounding, if not to nearest."""
        self.space = space
        self.has_max = bool((space.space.mode == MAX).any())
        self.has_mean = bool((space.space.mode == MEAN).any())
        self._optimizer = optimizer or SGD(lr=0.0)  # sums gradients along segments for those without one, too
        self._recipe = recipe_file(self._optimizer)
        most = ("-DHAS_MAX",) if self.has_max else ()
        self._rows = (*OPTIONS, *row.flags, *most)
        self._output: tuple[str, ...] = ()
        if output_dtype is not None and output_dtype != row.device_dtype:
            self._output = (RowFormat(width=row.width, dtype=output_dtype).flags[0].replace("ROW", "OUT"),)
        shared = ("-DSHARED",) if space.space.is_shared else ()
        self._separate = separate
        self._update = (*self._rows, *recipe_flags(self._optimizer), *shared, *(("-DSEPARATE",) if separate else ()))
        self._draws, self._nearest = draws, no_draws(self._recipe)
        if draws is not None:
            self._update = (*self._update, "-DSTOCHASTIC")
        self._lanes, self._vector, self._keeps_replayed = row.lanes, row.vector, row.is_float32
        self._columns_fit = not (space.space.column % self._vector).any()
        self._prepare(optimizer, space.device.index)

    def _prepare(self, optimizer: OptimizerConfig | None, device: int) -> None:
        """Begins to compile what first steps launch, of short bags or of long ones."""
        fitting = () if self._columns_fit else UNALIGNED
        for bags in (BAGS_OF_ONE, LONG_BAGS):
            kernel(BAG, "bags_pool", *self._rows, *self._output, f"-DBAGS={bags}", *fitting).prepare(device)
        if optimizer is None:
            return
        homes_sort.prepare(device)
        kernel(self._recipe, "segments_find", *self._update).prepare(device)
        if self.has_mean:
            kernel(BAG, "bags_mean_scale", *self._rows).prepare(device)

    # --- forward ----------------------------------------------------------------------------------------------------

    def pool(
        self,
        hot: HotTensors,
        overflow: OverflowRows,
        homes: torch.Tensor,
        bags: DeviceBags,
        weights: torch.Tensor | None,
        out: torch.Tensor,
        argmax: torch.Tensor | None,
    ) -> None:
        """Writes the pooled rows of `bags` to columns `space.column` of `out` (B, ΣD), or, for separate features,
        stacked: (F·B, D). `weights`: float32 (N,), for sums · `argmax`: int32, as `out`, takes the winning
        occurrence of each maximum, −1 for an empty bag."""
        count = len(self.space.space.features) * bags.batch
        each = BAGS_OF_ONE if homes.shape[0] <= 2 * count else LONG_BAGS
        flags = (*self._rows, *self._output, *overflow.flags, f"-DBAGS={each}", *self._alignment(out))
        pool = kernel(BAG, "bags_pool", *flags)
        stride = bags.batch + bags.have_ends
        groups = len(self.space.space.features) * ((bags.batch + each - 1) // each)
        pool(
            blocks_for(groups * self._lanes, THREADS), THREADS, hot.weight, overflow.weight,
            _address(overflow.records), homes, bags.offsets, stride, bags.batch, count, self.space.mode,
            self.space.column, bags.batch if self._separate else 0, _address(weights), out, out.shape[1],
            _address(argmax),
        )  # fmt: skip

    def read_current(
        self,
        hot: HotTensors,
        overflow: OverflowRows,
        homes: torch.Tensor,
        past: torch.Tensor,
        steps: torch.Tensor,
        *,
        bag: torch.Tensor,
        batch: int,
        tables: torch.Tensor | None = None,
        distinct: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of `homes` at the current step of a dense optimizer, (N, D), in `out` if given; and the index of
        each among them, int32 (N,), `DROPPED` for padding. The rows themselves change only as in `keep_replayed`.
        `past`: see `DeviceHistory` · `steps`: int64 (T,) · `bag`: int32 (N,), of the homes, `batch` bags a feature ·
        `tables`: see `update` · `distinct`: whether each row has one home."""
        if not distinct:
            self.keep_replayed(hot, overflow, homes, past, steps, bag=bag, batch=batch, tables=tables)
        n = homes.shape[0]
        rows = out
        if rows is None:
            rows = torch.empty((n, hot.weight.shape[1]), dtype=hot.weight.dtype, device=hot.weight.device)
        own = torch.empty_like(homes)
        read = kernel(self._recipe, "rows_read_current", *self._update, *overflow.flags)
        read(
            blocks_for(n * self._lanes, THREADS, MOST_BLOCKS), THREADS, homes, n, bag, max(1, batch), _address(tables),
            past, steps, hot.weight, hot.state, overflow.weight, overflow.state, _address(overflow.records), hot.dirty,
            distinct and self._keeps_replayed, rows, own, self._drawn(hot, overflow),
        )  # fmt: skip
        return rows, own

    def keep_replayed(
        self,
        hot: HotTensors,
        overflow: OverflowRows,
        homes: torch.Tensor,
        past: torch.Tensor,
        steps: torch.Tensor,
        *,
        bag: torch.Tensor,
        batch: int,
        tables: torch.Tensor | None = None,
    ) -> None:
        """Called before float32 rows are read: rows that have to replay steps one by one, as decay was part of the
        gradient, do so in place, so that no later read replays these again; later results do not change. Rows of 16
        bits stay unchanged, as they would be rounded once more. Arguments as for `read_current`."""
        if not self._keeps_replayed:
            return
        n = homes.shape[0]
        keep = kernel(self._recipe, "rows_keep_replayed", *self._update, *overflow.flags)
        keep(
            blocks_for(n * self._lanes, THREADS, MOST_BLOCKS), THREADS, homes, n, bag, max(1, batch), _address(tables),
            past, steps, hot.weight, hot.state, overflow.weight, overflow.state, _address(overflow.records), hot.dirty,
        )  # fmt: skip

    def gather(
        self,
        hot: HotTensors,
        overflow: OverflowRows,
        homes: torch.Tensor,
        out: torch.Tensor | None = None,
        picked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rows of `homes`, int32 (N,), or of those that are `picked`, int64 (K,): (N, D) or (K, D), to `out` if it
        is given; zeros for padding."""
        rows, n = out, (homes if picked is None else picked).shape[0]
        if rows is None:
            rows = torch.empty((n, hot.weight.shape[1]), dtype=hot.weight.dtype, device=hot.weight.device)
        gather = kernel(BAG, "rows_gather", *self._rows, *overflow.flags)
        blocks = blocks_for(n * self._lanes, THREADS, MOST_BLOCKS)
        records = _address(overflow.records)
        gather(blocks, THREADS, hot.weight, overflow.weight, records, homes, 0 if picked is None else picked, n, rows)
        return rows

    def spread(
        self, hot: HotTensors, overflow: OverflowRows, homes: torch.Tensor, picked: torch.Tensor, to: RowSpread
    ) -> None:
        """Writes the rows of those `homes`, int32 (N,), that are `picked`, int64 (`to.rows`,), to the memory of several
        ranks; zeros for padding."""
        spread = kernel(BAG, "rows_spread", *self._rows, *overflow.flags)
        blocks = blocks_for(to.rows * self._lanes, THREADS, SPREAD_BLOCKS)
        records = _address(overflow.records)
        spread(blocks, THREADS, hot.weight, overflow.weight, records, homes, picked, to.rows, to.of(BAG))

    # --- backward ---------------------------------------------------------------------------------------------------

    def weights_gradient(
        self, rows: torch.Tensor, homes: torch.Tensor, bags: DeviceBags, grad: torch.Tensor
    ) -> torch.Tensor:
        """Gradient of per-sample weights, float32 (N,): the inner product of each of the `rows` (N, D) with the
        gradient of its bag (`grad`, float32 (B, ΣD)). Zero for padding."""
        gradient = torch.zeros(homes.shape[0], dtype=torch.float32, device=grad.device)
        product = kernel(BAG, "weights_gradient", *self._rows)
        product(
            blocks_for(homes.shape[0] * self._lanes, THREADS, MOST_BLOCKS), THREADS, rows, homes, bags.bag,
            homes.shape[0], bags.batch, self.space.column, grad, grad.shape[1], gradient,
        )  # fmt: skip
        return gradient

    def mean_scale(self, homes: torch.Tensor, bags: DeviceBags) -> torch.Tensor:
        """One over the size of each occurrence's bag where its table takes means, else 1: float32 (N,)."""
        scale = torch.ones(homes.shape[0], dtype=torch.float32, device=homes.device)
        count = len(self.space.space.features) * bags.batch
        mean = kernel(BAG, "bags_mean_scale", *self._rows)
        blocks = blocks_for(count * 32, THREADS, MOST_BLOCKS)
        mean(
            blocks, THREADS, homes, bags.offsets, bags.batch + bags.have_ends, bags.batch, count, self.space.mode, scale
        )
        return scale

    def new_segments(self, n: int, device: torch.device) -> Segments:
        """Room for the segments of `n` occurrences."""
        longs = n // CHUNK + 1  # a long segment has more than one chunk, and a chunk more than the longs one in part
        counted = torch.empty(WORK_WORDS + note_words(n), dtype=torch.int32, device=device)
        return Segments(
            homes=torch.empty(n, dtype=torch.int32, device=device),
            order=torch.empty(n, dtype=torch.int32, device=device),
            sorted_bag=torch.empty(n, dtype=torch.int32, device=device),
            counted=counted,
            work=counted[:WORK_WORDS],
            items=torch.empty((n, 4), dtype=torch.int32, device=device),
            longs=torch.empty((longs, 4), dtype=torch.int32, device=device),
        )

    def find_segments(self, segments: Segments, homes: torch.Tensor, bag: torch.Tensor, batch: int) -> Segments:
        """Groups the occurrences by home, into `segments`. `bag`: int32 (N,), of each, with `batch` bags a feature.
        Allocates nothing that outlasts it, so it may run on another stream than that of the memory."""
        segments.counted.zero_()
        notes = segments.counted.data_ptr() + 4 * WORK_WORDS
        sort_homes(homes, bag, notes, segments.items, segments.homes, segments.order, segments.sorted_bag)
        self._list(segments, batch)
        return segments

    def segments(self, homes: torch.Tensor, bag: torch.Tensor, batch: int) -> Segments:
        """The occurrences by home; see `find_segments`."""
        return self.find_segments(self.new_segments(homes.shape[0], homes.device), homes, bag, batch)

    def distinct_segments(self, homes: torch.Tensor, bag: torch.Tensor, batch: int) -> Segments:
        """The same of occurrences whose rows are distinct, none of them `DROPPED`: they need not be sorted."""
        n, device = homes.shape[0], homes.device
        work = torch.zeros(WORK_WORDS, dtype=torch.int32, device=device)
        found = Segments(
            homes=homes,
            order=torch.arange(n, dtype=torch.int32, device=device),
            sorted_bag=bag,
            counted=work,
            work=work,
            items=torch.empty((n, 4), dtype=torch.int32, device=device),
            longs=torch.empty((1, 4), dtype=torch.int32, device=device),
        )
        self._list(found, batch)
        return found

    def _list(self, segments: Segments, batch: int) -> None:
        """Lists the work on occurrences that are sorted by row."""
        n = segments.homes.shape[0]
        find = kernel(self._recipe, "segments_find", *self._update)
        find(
            blocks_for(n, THREADS, MOST_BLOCKS), THREADS, segments.homes, n, segments.sorted_bag, max(1, batch),
            segments.work, segments.items, segments.longs,
        )  # fmt: skip

    def update(
        self,
        hot: HotTensors,
        overflow: OverflowRows,
        segments: Segments,
        grad: torch.Tensor,
        scale: torch.Tensor | None,
        argmax: torch.Tensor | None,
        rate: torch.Tensor,
        numbers: torch.Tensor,
        past: torch.Tensor | None = None,
        steps: torch.Tensor | None = None,
        *,
        tables: torch.Tensor | None = None,
        grads: torch.Tensor | None = None,
    ) -> None:
        """Applies one optimizer step to the rows of `segments` and marks hot ones dirty. `grad`: float32 (B, ΣD) ·
        `scale`: float32 (N,), a factor for each occurrence's share · `argmax`: int32 (B, ΣD) · `rate`, float32 (F,),
        and `numbers`, float32: from `begin` · `past`, `steps`: of a dense optimizer, as in `begin` · `tables`: for
        separate features that were looked up as one, with a `grad` of (F·B, D): the table of each, int32 (F,) ·
        `grads`: for such features, the address of each gradient, int64 (F,), if they are not adjacent; `grad` is the
        first of them, (B, D), all are contiguous like it, and none has maxima."""
        n = segments.order.shape[0]
        sorted_scale = None
        if scale is not None:
            sorted_scale = torch.empty(n, dtype=torch.float32, device=grad.device)
            gather = kernel(self._recipe, "scale_gather", *self._update)
            gather(blocks_for(n, THREADS, MOST_BLOCKS), THREADS, segments.order, n, scale, sorted_scale)
        parts = torch.empty((2 * segments.longs.shape[0], hot.weight.shape[1]), dtype=torch.float32, device=grad.device)
        rows = (hot.weight, hot.state, overflow.weight, overflow.state, _address(overflow.records), hot.dirty)
        draws = self._drawn(hot, overflow)
        short = kernel(
            self._recipe, "segments_update",
            *self._update, *overflow.flags, *self._alignment(grad),
        )  # fmt: skip
        short(
            blocks_for(n * self._lanes, THREADS, UPDATE_BLOCKS), THREADS, segments.work, segments.items, n,
            segments.sorted_bag, max(1, grad.shape[0]) if tables is None else 0, self.space.column, grad,
            _address(grads), grad.shape[0], grad.shape[1], _address(sorted_scale), segments.order, _address(argmax),
            self.space.mode, *rows, rate, numbers, _address(tables), parts, _address(past), _address(steps), draws,
        )  # fmt: skip
        long = kernel(self._recipe, "long_segments_update", *self._update, *overflow.flags)
        long(
            blocks_for(segments.longs.shape[0] * self._lanes, THREADS, 132), THREADS, segments.work, segments.longs,
            parts, *rows, rate, numbers, _address(tables), _address(past), _address(steps), draws,
        )  # fmt: skip

    def addresses(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where they begin, int64 (K,) on their device, by launches alone."""
        found = torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)
        set_addresses = kernel(self._recipe, "addresses_set", *self._update)
        given = struct_type(self._recipe, "Addresses")
        for start in range(0, len(tensors), MOST_ADDRESSES):
            some = [each.data_ptr() for each in tensors[start : start + MOST_ADDRESSES]]
            set_addresses(
                1, MOST_ADDRESSES, found[start:], len(some), given(at=[*some, *[0] * (MOST_ADDRESSES - len(some))])
            )
        return found

    def begin(
        self,
        options: torch.Tensor,
        steps: torch.Tensor,
        faults: torch.Tensor,
        scaling: Scaling,
        work: torch.Tensor,
        past: torch.Tensor | None = None,
        tables: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts an update: increments `steps` (int64 (T,)); returns the features' rates and the other numbers, with a
        row for each table with separate steps: those of `tables`, int32 (K,).

        `options`: float64 (`MOST_NUMBERS`,), see `set_options` · `faults`: int64 (3 K,), the `Fault`s of the calls.
        After a fault, or if `scaling` says so, `work` is set to none and no step is counted. `past`: of a dense
        optimizer, see `DeviceHistory`.
        """
        rate = torch.empty(steps.shape[0], dtype=torch.float32, device=steps.device)
        rows = steps.shape[0] if self._separate else 1
        numbers = torch.empty(rows * MOST_NUMBERS, dtype=torch.float32, device=steps.device)
        begin = kernel(self._recipe, "step_begin", *self._update)
        n_faults, n_tables = faults.shape[0] // words_of("Fault"), (steps if tables is None else tables).shape[0]
        begin(
            1, THREADS, options, steps, _address(tables), n_tables, faults, n_faults, _address(scaling.found_inf),
            _address(scaling.grad_scale), _address(scaling.factors), rate, numbers, work, _address(past),
        )  # fmt: skip
        return (rate if self.space.table is None else rate.index_select(0, self.space.table)), numbers

    def end(
        self,
        options: torch.Tensor,
        steps: torch.Tensor,
        rate: torch.Tensor,
        numbers: torch.Tensor,
        past: torch.Tensor,
        tables: torch.Tensor | None = None,
    ) -> None:
        """Ends an update of a dense optimizer: adds the step to the history. Arguments as in `begin`."""
        blocks = 1 if tables is None else tables.shape[0]
        end = kernel(self._recipe, "step_end", *self._update)
        end(blocks, THREADS, options, steps, _address(tables), rate, numbers, past)

    def catch_up(
        self,
        hot: HotTensors,
        overflow: OverflowRows,
        segments: Segments,
        fault: torch.Tensor,
        past: torch.Tensor,
        steps: torch.Tensor,
        *,
        only: int = -1,
        tables: torch.Tensor | None = None,
    ) -> None:
        """For dense optimizers: brings every row of `segments` to the current `steps` (int64 (T,)) and marks changed
        rows dirty; none after a fault. `past`: of their history · `only`: if not negative, of separate features the one
        whose rows catch up · `tables`: see `update`."""
        launch = kernel(self._recipe, "segments_catch_up", *self._update, *overflow.flags)
        launch(
            blocks_for(segments.order.shape[0] * self._lanes, THREADS, UPDATE_BLOCKS), THREADS, segments.work,
            segments.items, segments.longs, fault, only, _address(tables), past, steps, hot.weight, hot.state,
            overflow.weight, overflow.state, _address(overflow.records), hot.dirty, self._drawn(hot, overflow),
        )  # fmt: skip

    def set_options(self, target: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Writes the numbers of a param group to `target`, float64 (`MOST_NUMBERS`,)."""
        setting = kernel(self._recipe, "options_set", *self._update)
        setting(1, 1, target, *device_numbers(self._optimizer, group))

    def limit_norms(
        self,
        hot: HotTensors,
        overflow: OverflowRows,
        segments: Segments,
        fault: torch.Tensor,
        max_norm: float,
        norm_type: float,
    ) -> None:
        """Scales every row of `segments` whose norm exceeds `max_norm` down to it, as `torch.embedding_renorm_` does,
        and marks it dirty; none after a fault."""
        limit = kernel(self._recipe, "segments_limit_norm", *self._update, *overflow.flags)
        limit(
            blocks_for(segments.order.shape[0] * self._lanes, THREADS, MOST_BLOCKS), THREADS, segments.work,
            segments.items, segments.longs, fault, max_norm, norm_type, hot.weight, hot.state, overflow.weight,
            overflow.state, _address(overflow.records), hot.dirty, self._drawn(hot, overflow),
        )  # fmt: skip

    def _drawn(self, hot: HotTensors, overflow: OverflowRows) -> StructValue:
        """What rows are rounded by, as kernels take it."""
        if self._draws is None:
            return self._nearest
        return self._draws.of(self._recipe, cast("KeyedTensors", hot).key, overflow.names)

    def _alignment(self, outputs: torch.Tensor) -> tuple[str, ...]:
        """What kernels are compiled with to read or write `outputs` (B, ΣD) in vectors, or where those do not fit."""
        fits = self._columns_fit and outputs.shape[1] % self._vector == 0 and outputs.data_ptr() % 16 == 0
        return () if fits else UNALIGNED


def frequency_scale(homes: torch.Tensor) -> torch.Tensor:
    """One over how often each occurrence's row occurs in the batch: float32 (N,). Does not synchronise."""
    ordered = torch.sort(homes).values
    count = torch.searchsorted(ordered, homes, right=True) - torch.searchsorted(ordered, homes)
    return 1 / count.to(torch.float32)


def _address(tensor: torch.Tensor | None) -> torch.Tensor | int:
    return 0 if tensor is None else tensor
