"""One forward in one group of tables on a GPU: it only launches. The host waits for the device over staged tiers
alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.cache.device.plan import NO_OVERFLOW, Beside, OverflowRows
from tieredemb.cache.tickets import TicketShare
from tieredemb.config import Mode
from tieredemb.kernels.constants import DROPPED
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.row_format import RowFormat
from tieredemb.kernels.spread import RowSpread
from tieredemb.kernels.streams import current_stream, on_device
from tieredemb.lookup.bags import rows_space
from tieredemb.lookup.device_bags import DeviceBags, DeviceKeySpace
from tieredemb.lookup.device_lookup import DeviceLookup, HotTensors, Segments, frequency_scale
from tieredemb.shallow import shallow_copy
from tieredemb.step.stack import PooledBags, Stack
from tieredemb.tables.group import DeviceGroup

if TYPE_CHECKING:
    from tieredemb.cache.device.ticket import DeviceTicket
    from tieredemb.lookup.options import LookupOptions
    from tieredemb.step.program import CallContext

T = TypeVar("T")


@dataclass
class ReadRows:
    """Rows read for a lookup, (N, D), in place of the slots; lookups read nothing else of it."""

    weight: torch.Tensor
    state: torch.Tensor
    dirty: torch.Tensor


class DeviceGroupCall:
    """One forward in one group: its bags, its ticket, and what its gradient needs. `segments`, `trained`: memory for
    them, if they are found with the plan · `own_bag`: see `CallMemory` · `bag`: of each occurrence, among the rows of
    the outputs, `samples` a feature."""

    ticket: DeviceTicket

    def __init__(
        self,
        group: DeviceGroup,
        bags: DeviceBags,
        options: LookupOptions,
        segments: Segments | None,
        trained: torch.Tensor | None,
        own_bag: torch.Tensor | None,
        samples: int,
    ) -> None:
        self.group = group
        self.bags = bags
        self.options = options
        self._segments = segments
        self.bag = bags.bag if own_bag is None else own_bag
        self.samples = samples
        self.stack: Stack | None = None  # set with the lookup, if the output has one
        # homes of the occurrences that gradients reach: without planned rows of padding
        self.trained = bags.homes if trained is None else trained
        self.weights: torch.Tensor | None = None
        self.argmax: torch.Tensor | None = None
        self.forward_rows: torch.Tensor | None = None
        self._found: Segments | None = None  # found by the forward
        self._is_caught_up = False  # whether the rows of a dense optimizer are at the current step

    def of_client(self, place: int, mine: slice, context: CallContext) -> DeviceGroupCall:
        """The slice of the plan for one of the tables that plan as one, that at `place`. `mine`: its occurrences ·
        `context`: of the module that looks up in it. The caller uses the ticket."""
        self.join()
        (group,) = context.tables.placed.now.groups
        assert isinstance(group, DeviceGroup)
        bags, batch = self.bags, self.bags.batch
        edges = bags.offsets[place * batch : (place + 1) * batch + 1]
        trained = None if self.trained is bags.homes else self.trained[mine]
        own = DeviceBags(
            keys=bags.keys[mine],
            homes=bags.homes[mine],
            offsets=edges - edges[0],
            bag=bags.bag[mine] - place * batch,
            position=None,
            batch=batch,
        )
        part = DeviceGroupCall(group, own, context.options, None, trained, None, own.batch)
        part.ticket = cast("DeviceTicket", TicketShare(self.ticket, homes=own.homes))
        return part

    def plan(self, ids: torch.Tensor, kind: PlanKind, given: torch.cuda.Event | None) -> None:
        """Plans the bags, which were found in `ids`. `given`: an event to wait for before they are read, if any."""
        group, bags, segments = self.group, self.bags, self._segments
        trained = None if self.trained is bags.homes else self.trained
        beside: Beside | None = None  # runs while rows move
        if segments is not None:
            beside = functools.partial(group.lookup.find_segments, segments, bags.homes, self.bag, self.samples)
        elif trained is not None:
            beside = functools.partial(_mask_padding, group.device_space, ids, bags, trained)
        self.ticket = group.cache.plan(
            bags.keys, bags.homes, kind, client=group.device_client, given=given, beside=beside
        )
        self.ticket.kept = (*vars(bags).values(), *(() if segments is None else vars(segments).values()), trained)
        self._ids = None if trained is None else ids  # a side stream may still read them

    def complete(self) -> bool:
        """Finishes its plan, if it is unfinished; returns False if it failed. See `DeviceCache.complete`."""
        return self.group.cache.complete(self.ticket)

    def join(self) -> None:
        """Has the current stream wait for work beside the lookup."""
        if self.ticket.side_done is not None:
            self.ticket.side_done.wait(current_stream())
            self.ticket.side_done = None
        self._ids = None

    def segments(self) -> Segments:
        """The trained occurrences by row."""
        return self._segments or self._found or self.group.lookup.segments(self.trained, self.bag, self.samples)

    def held(self) -> list[torch.Tensor]:
        """The tensors that the forward keeps for the update."""
        return [value for value in (self.weights, self.argmax) if value is not None]

    @property
    def is_as_planned(self) -> bool:
        """Whether an update reads only results of the plan, and nothing that the forward has made or was given, as the
        bags of a mean."""
        takes_means = self.stack is not None and any("mean" in pooled.modes for pooled in self.stack.pooled)
        return self.weights is None and self.argmax is None and self._found is None and not takes_means

    def without_ticket(self) -> DeviceGroupCall:
        """A copy without the ticket, for `rebind`."""
        call = shallow_copy(self)
        del call.ticket
        return call

    def rebind(self, ticket: DeviceTicket) -> DeviceGroupCall:
        """A call for `ticket`, whose plan a replay has made in this one's memory."""
        call = shallow_copy(self)
        call.ticket = ticket
        call.weights = call.argmax = call.forward_rows = call.stack = None
        call._found, call._is_caught_up = None, False
        return call

    def catch_up(self, fault: torch.Tensor, only: int | None = None) -> None:
        """With a dense optimizer: brings the rows of this forward to the current step. `only`: of separate tables, the
        number of the one whose rows are brought there."""
        self.join()
        group, cache, past = self.group, self.group.cache, self.group.past
        assert past is not None
        with cache.using(self.ticket):
            segments = self._looked_up()
            overflow = cache.overflow([self.ticket])
            group.lookup.catch_up(
                cache.hot, overflow, segments, fault, past, group.device_steps, only=-1 if only is None else only,
                tables=group.tables,
            )  # fmt: skip
        self._is_caught_up = only is None

    def _looked_up(self) -> Segments:
        """All occurrences by row, including planned padding."""
        known = self._segments or self._found
        if known is not None:
            return known
        segments = self.group.lookup.segments(self.ticket.homes, self.bag, self.samples)
        if self.trained is self.bags.homes:
            self._found = segments  # the update needs them, too
        return segments

    def limit_norms(self, fault: torch.Tensor, max_norm: float) -> None:
        """Scales rows of this forward that are longer than `max_norm` down to it."""
        self.join()
        cache = self.group.cache
        with cache.using(self.ticket):
            cache.rows_version += 1
            segments = self._looked_up()
            overflow = cache.overflow([self.ticket])
            self.group.lookup.limit_norms(cache.hot, overflow, segments, fault, max_norm, self.options.norm_type)

    def pool(self, out: torch.Tensor, weights: torch.Tensor | None, *, keep_argmax: bool, keep_rows: bool) -> None:
        """Pools into `out` (B, ΣD); keeps winners of maxima or rows, if a backward needs them."""
        group, bags = self.group, self.bags
        if keep_argmax and group.lookup.has_max:
            self.argmax = torch.full(out.shape, -1, dtype=torch.int32, device=out.device)
        with group.cache.using(self.ticket):
            if weights is not None:
                self.weights = _of_occurrences(weights, bags)
            hot, overflow, homes = self._rows_now()
            if group.config.pooled:
                group.lookup.pool(hot, overflow, homes, bags, self.weights, out, self.argmax)
            else:
                self._gather(hot, overflow, homes, out)
            if keep_rows:
                self.forward_rows = group.lookup.gather(hot, overflow, homes)

    def _gather(
        self,
        hot: HotTensors,
        overflow: OverflowRows,
        homes: torch.Tensor,
        out: torch.Tensor,
        picked: torch.Tensor | None = None,
    ) -> None:
        """Writes rows to `out`; see `DeviceLookup.gather`."""
        if out.dtype == hot.weight.dtype:
            self.group.lookup.gather(hot, overflow, homes, out, picked)
        else:
            out.copy_(self.group.lookup.gather(hot, overflow, homes, picked=picked))

    def _rows_now(self) -> tuple[HotTensors, OverflowRows, torch.Tensor]:
        """Rows at the current step, and the homes of the occurrences among them. The caller uses the ticket."""
        group = self.group
        hot: HotTensors = group.cache.hot
        overflow, homes = group.cache.overflow([self.ticket]), self._read
        if group.past is not None and not self._is_caught_up:
            rows, homes = group.lookup.read_current(
                hot, overflow, homes, group.past, group.device_steps, bag=self.bags.bag, batch=self.bags.batch,
                tables=group.tables,
            )  # fmt: skip
            hot, overflow = ReadRows(rows, hot.state, hot.dirty), NO_OVERFLOW
        return hot, overflow, homes

    @property
    def _read(self) -> torch.Tensor:
        """The homes of the occurrences that the output reads: without padding that adds nothing to its bag."""
        is_left_out = self.options.padding_is_dropped and self.options.plans_padding
        return self.trained if is_left_out else self.ticket.homes

    def pool_stack(
        self,
        stack: Stack,
        bags: torch.Tensor,
        picked: torch.Tensor | RowSpread,
        every: torch.Tensor | None,
        weights: torch.Tensor | None,
        *,
        keep_argmax: bool,
    ) -> None:
        """Pools into `bags`, and writes the rows of the picked ids to `picked` (·, D), and the rows of all ids
        to `every`."""
        self.weights = weights
        if keep_argmax and self.group.lookup.has_max:
            shape = stack.rows, bags.shape[1]
            self.argmax = torch.full(shape, -1, dtype=torch.int32, device=bags.device)
        with self.group.cache.using(self.ticket):
            hot, overflow, homes = self._rows_now()
            for pooled in stack.pooled:
                rows, shape = slice(*pooled.rows), (pooled.samples, len(pooled.modes) * bags.shape[1])
                argmax = None if self.argmax is None else self.argmax[rows].view(shape)
                lookup = self._lookup_of(pooled, bags.dtype)
                lookup.pool(hot, overflow, homes, self._bags_of(pooled), weights, bags[rows].view(shape), argmax)
            if isinstance(picked, RowSpread):
                self.group.lookup.spread(hot, overflow, homes, stack.picked, picked)
            else:
                self._gather(hot, overflow, homes, picked, stack.picked)
            if every is not None:
                self.group.lookup.gather(hot, overflow, homes, every)

    def _bags_of(self, pooled: PooledBags) -> DeviceBags:
        return replace(self.bags, offsets=pooled.edges, position=None, batch=pooled.samples, have_ends=True)

    def _lookup_of(self, pooled: PooledBags, dtype: torch.dtype | None = None) -> DeviceLookup:
        """The kernels that pool such bags, into outputs of a `dtype`, by default the rows'."""
        space, row = self.group.space, self.group.cache.cold.layout.format
        return _pooling(space.width, pooled.modes, row, dtype or row.device_dtype, self.bags.keys.device)

    def tables_of_rows(self) -> torch.Tensor:
        """See `Call`."""
        feature = torch.div(self.bags.bag, max(1, self.bags.batch), rounding_mode="floor")
        table = self.group.device_space.table
        tables = feature.to(torch.int64) if table is None else table[feature]
        if self.stack is None:
            return tables
        of = torch.zeros(self.samples + 1, dtype=torch.int64, device=tables.device)  # of an empty bag 0
        # from the plan's own memory: the rows of the stack may be those of a later forward by now
        row = self.bag.to(torch.int64).remainder(max(1, self.samples))
        row = torch.where(self.ticket.homes == DROPPED, self.samples, row)
        return of.scatter_(0, row, tables)[:-1]

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the gradient of the per-sample weights to `out`, float32 (N,), at their positions."""
        assert self.forward_rows is not None
        homes, bags = self._read, self.bags
        gradient = self.group.lookup.weights_gradient(self.forward_rows, homes, bags, grad)
        if bags.position is None:
            out += gradient[: out.shape[0]]  # there may be memory for more occurrences
        else:  # occurrences of other groups have no position, and a gradient of zero
            out.index_add_(0, bags.position, gradient)

    def scale(self) -> torch.Tensor | None:
        """The factor of each occurrence's share of the gradient, float32 (N,), or None for ones."""
        scale = self.weights
        if self.stack is not None:
            for pooled in self.stack.pooled:
                if "mean" in pooled.modes:
                    share = self._lookup_of(pooled).mean_scale(self._read, self._bags_of(pooled))
                    scale = share if scale is None else scale * share
        elif scale is None and self.group.lookup.has_mean:
            scale = self.group.lookup.mean_scale(self._read, self.bags)
        if self.options.scale_grad_by_freq:
            share = frequency_scale(self.trained)
            scale = share if scale is None else scale * share
        return scale


@functools.cache
def _pooling(
    width: int, modes: tuple[Mode, ...], row: RowFormat, dtype: torch.dtype, device: torch.device
) -> DeviceLookup:
    """The kernels that pool bags of rows of any tables into outputs of a dtype. `modes`: of each feature."""
    with no_inference(), on_device(device):
        space = rows_space(width, *modes)
        return DeviceLookup(DeviceKeySpace(space, [-1] * len(space), device), row, None, dtype)


def _of_occurrences(weights: torch.Tensor, bags: DeviceBags) -> torch.Tensor:
    """The weights of the ids, float32 (N,), for each occurrence that `bags` have memory for; 0 for unused ones."""
    if bags.position is not None:
        return weights[bags.position]
    rest = bags.homes.shape[0] - weights.shape[0]
    return weights if rest == 0 else torch.nn.functional.pad(weights, (0, rest))


def _mask_padding(space: DeviceKeySpace, ids: torch.Tensor, bags: DeviceBags, trained: torch.Tensor) -> None:
    """Fills `trained` with the homes of all ids but the padding."""
    if len(space.space.features) == 1:
        is_padding = ids == int(space.space.padding[0])
    else:
        feature = torch.div(bags.bag, max(1, bags.batch), rounding_mode="floor")
        is_padding = (ids if bags.position is None else ids[bags.position]) == space.padding[feature]
    trained.copy_(bags.homes).masked_fill_(is_padding, DROPPED)
