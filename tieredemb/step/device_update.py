"""Updates on a GPU: the calls of one backward pass, or of several before a step, as one batch; launches alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tieredemb.cache.changes import HalfWritten
from tieredemb.errors import InvalidInputError
from tieredemb.kernels.streams import on_device, side_by_side
from tieredemb.lookup.bags import MAX_BAGS
from tieredemb.lookup.device_lookup import DeviceLookup, Segments
from tieredemb.lookup.spoilt import Scaling, refuse_spoilt
from tieredemb.step.device_call import DeviceCall
from tieredemb.step.device_group_call import DeviceGroupCall
from tieredemb.step.forwards import Forwards, by_call, take_one_step
from tieredemb.step.program import Call, CallContext, Collected, in_forward_order
from tieredemb.step.recorded_updates import ALIGNMENT, replay_update
from tieredemb.tables.group import DeviceGroup, device_groups
from tieredemb.tables.pool import Selection
from tieredemb.tables.row_optimizer import RowOptimizer

if TYPE_CHECKING:
    from tieredemb.cache.device.cache import DeviceCache
    from tieredemb.cache.device.plan import OverflowRows
    from tieredemb.cache.device.ticket import DeviceTicket
    from tieredemb.tables.table_set import TableSet


def apply(collected: Collected) -> None:
    """Takes one optimizer step for the calls of one backward pass, which are in forward order."""
    shared, rest = by_call(collected) if len(collected) > 1 else ([], [collected])
    of_call: dict[Forwards, list[Collected]] = {}
    for forwards, calls in shared:
        of_call.setdefault(forwards, []).append(calls)
    updates = _by_launch(rest)  # raises if one is too large, before anything changes
    for forwards, of_blocks in of_call.items():
        updates += _by_launch(_update_forwards(forwards, of_blocks))
    for alike in updates:
        if len(alike) == 1:
            _update(alike[0])
        else:
            _update_grouped(alike)


def _by_launch(sets: Sequence[Collected]) -> list[list[Collected]]:
    """The calls over sets of tables, grouped by the launch that updates them: one launch serves sets that share a cache
    and have equal hyperparameters."""
    of_whole: dict[TableSet, list[Collected]] = {}
    for calls in sets:
        of_whole.setdefault(calls[0][0].context.tables.whole, []).append(calls)
    found: dict[Hashable, list[Collected]] = {}
    for whole, sets_of_whole in of_whole.items():
        is_alone = len(sets_of_whole) < 2 or _is_large(sets_of_whole)
        for number, calls in enumerate(sets_of_whole):
            key = number if is_alone else calls[0][0].context.check_trainable().alike()
            found.setdefault((whole, is_alone, key), []).append(calls)
    return list(found.values())


def _is_large(sets: Sequence[Collected]) -> bool:
    """Whether the calls are too large for one update. Raises `InvalidInputError` if those over one set are."""
    whole = sets[0][0][0].context.tables.whole
    if sum(call.rows for collected in sets for call, _ in collected) * whole.n_features <= MAX_BAGS:
        return False
    for collected in sets:
        check_bags(collected[0][0].context.tables, [call for call, _ in collected])
    return True


def _update(collected: Collected) -> None:
    """One optimizer step for calls over one set of tables, in forward order: all its groups side by side."""
    context = collected[0][0].context
    tables, calls, grads = context.tables, [call for call, _ in collected], [grad.contiguous() for _, grad in collected]
    check_bags(tables, calls)
    with tables.placed.now.rows.held(), on_device(tables.config.device):
        # inside the locks, as it writes whether the step is skipped
        scaling, stays = scaling_of([context.check_trainable()], tables, grads)
        recurs = stays and len(calls) == 1  # only updates of one call, as in every step, are recorded
        faults, groups = _faults(calls), device_groups(tables.groups)
        updates = [
            _Update(group, faults, [call.parts[g] for call in calls], [context], scaling, recurs)
            for g, group in enumerate(groups)
        ]
        _launch(tables, calls, updates, [grads])


def _update_forwards(forwards: Forwards, of_blocks: Sequence[Collected]) -> list[Collected]:
    """One optimizer step for all forwards of a call in some pools, in the order of the tables there, as of one batch
    for each pool. Returns the calls, one by one, of pools whose tables' hyperparameters differ."""
    call, updates, rest, grads_of = forwards.call, list[_Update](), list[Collected](), list[Sequence[torch.Tensor]]()
    assert isinstance(call, DeviceCall)
    assert isinstance(call.context.tables, Selection)
    for collected in of_blocks:
        contexts = [forward.context for forward, _ in collected]
        optimizers = [own for context in contexts if (own := context.updater.optimizer) is not None]
        is_one = take_one_step(optimizers)
        if not is_one and len({optimizer.alike() for optimizer in optimizers}) > 1:
            rest += [[pair] for pair in collected]
            continue
        block, grads, tables = collected[0][0].block, [grad for _, grad in collected], contexts[0].tables.whole
        whole = device_groups(tables.groups)[0]
        taken = whole.numbered(call.context.tables.of_pools[block][1])
        with on_device(tables.config.device):
            scaled = optimizers[:1] if is_one else optimizers
            scaling, stays = scaling_of(scaled, tables, grads, None if is_one else taken)
        faults, parts = [call.memory.faults[block]], [call.parts[block]]
        of_block = _Update(whole, faults, parts, contexts, scaling, stays, taken, of_features=taken, block=len(updates))
        updates.append(of_block)
        grads_of.append(grads)
    if updates:
        _launch(call.context.tables, [call], updates, grads_of)
    return rest


def _update_grouped(sets: Sequence[Collected]) -> None:
    """One optimizer step for the calls over several tables that share a cache and have equal hyperparameters, in the
    launches of one table."""
    contexts = [calls[0][0].context for calls in sets]
    tables = contexts[0].tables.whole
    whole = device_groups(tables.groups)[0]
    collected = in_forward_order([pair for calls in sets for pair in calls])
    calls, grads = [call for call, _ in collected], [grad for _, grad in collected]
    parts = [call.parts[0] for call in calls]
    with on_device(tables.config.device):
        taken = whole.numbered([context.tables.groups[0].own.start for context in contexts])
        in_order = sorted(contexts, key=lambda context: context.tables.groups[0].own.start)
        optimizers = [context.check_trainable() for context in in_order]
        scaling, stays = scaling_of(optimizers, in_order[0].tables, grads, taken)

    features, counts = [part.group.own.start for part in parts], [len(grad) for grad in grads]
    update = _Update(whole, _faults(calls), parts, contexts, scaling, stays, taken, features=features, counts=counts)
    _launch(tables, calls, [update], [grads])


class Prepared(NamedTuple):
    """What an update reads. `batch`: its calls as one · `places`: addresses of gradients that are read in place, int64
    (K,) · `segments`: the occurrences by row · `faults`: int64 (3 K,), of the calls."""

    batch: Combined
    places: torch.Tensor | None
    segments: Segments
    faults: torch.Tensor


@dataclass
class _Update:
    """The step of a `group` of tables, or of those with the numbers `taken`, int32 (K,), that share its cache.
    `faults`, `parts`: of their calls · `contexts`: of the tables · `stays`: whether `scaling` has the same addresses as
    at the last step · `of_features`: the table of each feature, int32 (K,), if one plan is of some of the cache's
    tables · `features`, `counts`: see `Combined` · `block`: index of its gradients among those of the update."""

    group: DeviceGroup
    faults: Sequence[torch.Tensor]
    parts: Sequence[DeviceGroupCall]
    contexts: Sequence[CallContext]
    scaling: Scaling
    stays: bool
    taken: torch.Tensor | None = None
    of_features: torch.Tensor | None = None
    features: Sequence[int] | None = None
    counts: Sequence[int] | None = None
    block: int = 0

    @property
    def past(self) -> torch.Tensor | None:
        """The history of a dense optimizer."""
        return self.group.past if self.taken is None else self.group.pasts

    def begin(self) -> torch.Tensor:
        """The options on the device. The caller holds the locks of the rows."""
        self.group.cache.rows_version += 1
        options = self.contexts[0].check_trainable().options_on(self.group)
        if self.past is not None:  # `options_on` noted it for the first table
            for context in self.contexts[1:]:
                device_groups(context.tables.groups)[0].note_step()
        return options

    @property
    def tickets(self) -> list[DeviceTicket]:
        """The tickets of its calls."""
        return [part.ticket for part in self.parts]

    def prepare(self, grads: Sequence[torch.Tensor]) -> Prepared:
        """Computes what the update reads, from `grads`, in place or joined. Changes no row, but may run out of
        memory."""
        places, faults = None, self.faults
        if self.of_features is not None and len(grads) > 1:
            places = self.group.lookup.addresses(grads) if _may_stay(grads) else None
            grads = [torch.cat([*grads])] if places is None else grads[:1]
        batch = Combined(self.parts, grads, self.group.lookup, self.features, self.counts)
        return Prepared(batch, places, batch.segments(), faults[0] if len(faults) == 1 else torch.cat([*faults]))

    def launch(self, options: torch.Tensor, overflow: OverflowRows, prepared: Prepared) -> None:
        """Changes the rows. `overflow`: where rows without a slot are."""
        group, past, (batch, places, segments, faults) = self.group, self.past, prepared
        rate, numbers = group.lookup.begin(
            options, group.device_steps, faults, self.scaling, segments.work, past, self.taken
        )
        group.lookup.update(
            group.cache.hot, overflow, segments, batch.grad, batch.scale, batch.argmax, rate, numbers, past,
            group.device_steps, tables=self.of_features, grads=places,
        )  # fmt: skip
        if past is not None:
            group.lookup.end(options, group.device_steps, rate, numbers, past, self.taken)


def _launch(
    tables: TableSet, calls: Sequence[DeviceCall], updates: Sequence[_Update], grads: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Launches updates of several caches as one, for `tables`. `grads`: of the `calls`; or for each block of the single
    call, which is of several forwards."""
    with tables.placed.now.rows.held(), on_device(tables.config.device), contextlib.ExitStack() as used:
        if len(calls) == 1:
            calls[0].record_stream(*[grad for of_block in grads for grad in of_block])
        else:
            for call, grad in zip(calls, grads[0], strict=True):
                call.record_stream(grad)
        options = [each.begin() for each in updates]
        for each in updates:
            used.enter_context(each.group.cache.using(*each.tickets))
        overflow = [each.group.cache.overflow(each.tickets) for each in updates]

        def launch(grads: Sequence[Sequence[torch.Tensor]]) -> None:
            if torch.cuda.is_current_stream_capturing():  # each on a branch of the graph

                def branch(each: _Update, own_options: torch.Tensor, rows: OverflowRows) -> None:
                    each.launch(own_options, rows, each.prepare(grads[each.block]))

                todo = zip(updates, options, overflow, strict=True)
                side_by_side(tables.config.device, [functools.partial(branch, *given) for given in todo])
                return
            prepared = [each.prepare(grads[each.block]) for each in updates]
            with _suspect_if_interrupted(each.group.cache for each in updates):
                for each, own_options, rows, given in zip(updates, options, overflow, prepared, strict=True):
                    each.launch(own_options, rows, given)

        kept = [*options]
        for each in updates:
            kept += [*([] if each.taken is None else [each.taken]), *each.scaling.tensors()]
        recurs = all(each.stays and _is_plain(each.parts) for each in updates)
        if not (recurs and replay_update(tables, calls, grads, overflow, kept, launch)):
            launch(grads)


def scaling_of(
    optimizers: Sequence[RowOptimizer],
    tables: TableSet,
    grads: list[torch.Tensor],
    taken: torch.Tensor | None = None,
) -> tuple[Scaling, bool]:
    """What the gradients of an update are multiplied by, and whether it has the same addresses as at the last one.
    `optimizers`: of `tables`; or of several sets that share their caches and take separate steps, in order, with the
    numbers `taken`, int32 (T,)."""
    found_inf, grad_scale = optimizers[0].scaling(grads)
    stays = found_inf is None and grad_scale is None
    found = [optimizer.spoilt() for optimizer in optimizers]
    some = next((each for each in found if each is not None), None)
    if some is None:
        return Scaling(found_inf, grad_scale), stays
    spoilt = some
    if taken is not None:
        spoilt, tables = torch.cat([torch.zeros_like(some) if each is None else each for each in found]), tables.whole
    skipped = optimizers[0].on_device.skipped
    factors = refuse_spoilt(
        spoilt, taken, found_inf, skipped, tables.placed.now.faults.address,
        is_dense=any(group.is_dense for group in tables.groups), separate=taken is not None,
    )  # fmt: skip
    return Scaling(skipped, grad_scale, factors), stays


def _may_stay(grads: Sequence[torch.Tensor]) -> bool:
    """Whether an update may read several gradients in place, without joining them: in a captured step, where their
    addresses stay the same."""
    return torch.cuda.is_current_stream_capturing() and all(
        grad.data_ptr() % ALIGNMENT == 0 and grad.is_contiguous() for grad in grads
    )


def _is_plain(parts: Sequence[DeviceGroupCall]) -> bool:
    """Whether an update reads only results of recorded plans, hyperparameters and gradients."""
    return all(part.group.past is None and part.is_as_planned for part in parts)


def step_alone(tables: TableSet, optimizer: RowOptimizer) -> None:
    """Takes an optimizer step in which no row has a gradient."""
    device = tables.config.device
    with tables.placed.now.rows.held(), on_device(device), contextlib.ExitStack() as used:
        scaling = Scaling(*optimizer.scaling([]))
        groups = [group for group in tables.groups if isinstance(group, DeviceGroup)]
        todo = [(group, optimizer.options_on(group)) for group in groups]
        for group in groups:
            used.enter_context(group.cache.using())
        no_faults = torch.empty(0, dtype=torch.int64, device=device)
        with _suspect_if_interrupted(group.cache for group in groups):
            for group, options in todo:
                work = group.lookup.new_segments(0, device).work
                rate, numbers = group.lookup.begin(options, group.device_steps, no_faults, scaling, work, group.past)
                if group.past is not None:
                    group.lookup.end(options, group.device_steps, rate, numbers, group.past)


def _faults(calls: Sequence[Any]) -> list[torch.Tensor]:
    """The fault words of these `DeviceCall`s on the device."""
    return [call.memory.faults[call.block] for call in calls]


def faults_of(calls: Sequence[Any]) -> torch.Tensor:
    """The same, joined: `Fault`s, int64 (3 K,)."""
    found = _faults(calls)
    return found[0] if len(found) == 1 else torch.cat(found)


@contextlib.contextmanager
def _suspect_if_interrupted(caches: Iterable[DeviceCache]) -> Iterator[None]:
    """Inside, an update is launched: if that is interrupted, rows are suspect. In a capture nothing is run."""
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    logs, change = [cache.changes for cache in caches], HalfWritten("an update")
    records = []
    for log in logs:
        records.append(log.begin(change, up=3))
    change.has_begun = True
    try:
        yield
    except BaseException as error:
        for log in logs:
            log.note(error)
        raise
    for log, record in zip(logs, records, strict=True):
        log.clear(record)


class Combined:
    """The calls of one update in one group, as one batch: samples and winners are numbered across them. `homes`, `bag`:
    int32 (N,), of the trained occurrences · `samples`: bags a feature.

    `lookup`, `features`: for calls over several tables that share a cache: the kernels that update them as one, and the
    feature of each call there · `counts`: samples of each call, if `grads` are joined already.
    """

    def __init__(
        self,
        parts: Sequence[DeviceGroupCall],
        grads: Sequence[torch.Tensor],
        lookup: DeviceLookup | None = None,
        features: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        self._lookup = lookup or parts[0].group.lookup
        scales = [part.scale() for part in parts]
        if len(parts) == 1 and features is None:
            part = parts[0]
            self.grad, self.scale, self.argmax = grads[0].contiguous(), scales[0], part.argmax
            self.homes, self.bag, self.samples = part.trained, part.bag, part.samples
            self._part: DeviceGroupCall | None = part
            return
        counts = [len(grad) for grad in grads] if counts is None else counts
        self.bag = torch.cat(_bags(parts, counts) if features is None else _bags_of(parts, features, counts))
        argmax, first = [], 0
        has_argmax = any(part.argmax is not None for part in parts)
        for part, count in zip(parts, counts, strict=True):
            if part.argmax is not None:
                winners = part.argmax[:count]
                argmax.append(torch.where(winners < 0, winners, winners + first))
            elif has_argmax:  # of another mode: not read
                argmax.append(torch.full_like(grads[len(argmax)], -1, dtype=torch.int32))
            first += part.trained.shape[0]
        self.grad = torch.cat(list(grads)) if len(grads) > 1 else grads[0].contiguous()  # one, or joined already
        self.argmax = torch.cat(argmax) if argmax else None
        self.scale = None
        if any(scale is not None for scale in scales):
            ones = [torch.ones(p.trained.shape[0], device=p.trained.device, dtype=torch.float32) for p in parts]
            filled = [one if scale is None else scale for one, scale in zip(ones, scales, strict=True)]
            self.scale = torch.cat(filled)
        self.homes, self.samples = torch.cat([part.trained for part in parts]), sum(counts)
        self._part = None

    def segments(self) -> Segments:
        """The occurrences by row."""
        return (
            self._lookup.segments(self.homes, self.bag, self.samples) if self._part is None else self._part.segments()
        )


def _bags(parts: Sequence[DeviceGroupCall], counts: Sequence[int]) -> list[torch.Tensor]:
    """The bags of the occurrences of each call, numbered across them. `counts`: samples of each call."""
    bags, first, samples = [], 0, sum(counts)
    for part, count in zip(parts, counts, strict=True):
        feature = torch.div(part.bag, max(1, part.samples), rounding_mode="floor")
        bags.append(part.bag + feature * (samples - part.samples) + first)
        first += count
    return bags


def _bags_of(parts: Sequence[DeviceGroupCall], features: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor]:
    """The same for calls over one feature each, with the numbers `features`."""
    shifts, first, samples = [], 0, sum(counts)
    for feature, count in zip(features, counts, strict=True):
        shifts.append(feature * samples + first)
        first += count
    return list(torch._foreach_add([part.bag for part in parts], shifts))


def check_bags(tables: TableSet, calls: Sequence[Call]) -> None:
    """Raises `InvalidInputError` for calls that are too large for one update."""
    samples, features = sum(call.rows for call in calls), tables.n_features
    if features * samples > MAX_BAGS:
        raise InvalidInputError(
            f"one update is of {len(calls)} forwards of {samples} samples in all; with {features} features these are "
            f"more than {MAX_BAGS} bags: call backward for each, and step() where a torch optimizer is followed"
        )


def combined(collected: Collected, g: int) -> tuple[Combined, list[DeviceTicket]]:
    """The calls as one batch in group number `g`, and their tickets. The caller holds the locks of the rows."""
    calls, grads = [call for call, _ in collected], [grad for _, grad in collected]
    for call, grad in zip(calls, grads, strict=True):
        call.record_stream(grad)
    parts = [call.parts[g] for call in calls]
    return Combined(parts, grads), [part.ticket for part in parts]
