"""One forward of a module on the CPU, and its update: on numpy arrays; a method is done when it returns."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tieredemb.cache.base import Cache, PlanKind
from tieredemb.cache.changes import Change, Changed
from tieredemb.cache.host.clients import Planners
from tieredemb.cache.locks import Locks
from tieredemb.cache.tickets import Ticket, TicketShare
from tieredemb.config import MODES
from tieredemb.errors import InvalidInputError
from tieredemb.kernels.parallel_cpu import Pass
from tieredemb.kernels.rounding_cpu import NEAREST
from tieredemb.kernels.row_format import CARRIERS
from tieredemb.kernels.segments_cpu import Segments, segments_of, segments_of_homes
from tieredemb.kernels.tracing import ranged
from tieredemb.lookup.bags import EqualBags, rows_space
from tieredemb.lookup.bags_cpu import Bags, checked_edges, join_edges, make_bags, one_by_one
from tieredemb.lookup.embedding_bag_cpu import NO_ARGMAX, NO_WEIGHTS, mean_scale, pool, weights_gradient
from tieredemb.lookup.history import CopiedRows, DenseStep, History
from tieredemb.lookup.optimizer import Hyperparameters
from tieredemb.lookup.optimizer_cpu import CountedPass, Gradient, catch_up, limit_norms, put_back, update
from tieredemb.lookup.options import LookupOptions
from tieredemb.step.batch import Batch
from tieredemb.step.forwards import Forward, Forwards, by_call, take_one_step
from tieredemb.step.program import Call, CallContext, Collected, StackRows
from tieredemb.step.reading import read
from tieredemb.step.stack import PooledBags, Stack
from tieredemb.tables.group import Group, HostGroup
from tieredemb.tables.row_optimizer import RowOptimizer
from tieredemb.tables.table_set import TableSet

if TYPE_CHECKING:
    from tieredemb.step.batch import Given

    Array = np.ndarray[Any, Any]


_NO_OFFSETS = torch.empty((0, 0), dtype=torch.int64, device="cpu")


class RowPass(Change):
    """A pass over the hot rows of a group. If it is an optimizer step of all its tables, or of those that plan as one,
    `numbers` are its hyperparameters. If it is interrupted, recovery completes it, provided that any of its passes had
    begun."""

    def __init__(self, group: HostGroup, rows: Pass, numbers: Hyperparameters | None = None) -> None:
        self.rows, self.cache, self.kept, self.numbers = rows, group.cache, group.kept, numbers
        self.among: Sequence[Pass] = (rows,)  # the passes of which all are run, or none,
        self.done: list[Pass] = []  # and those that were run, of which some had no rows
        self.steps: dict[int, int] = {}  # each table's count of steps afterwards, by its number in cold storage
        if numbers is not None:
            taken = self.cache.cold.metadata.steps
            self.steps = {table: taken[table] + 1 for table in group.stepping}

    def recover(self, cache: Changed) -> None:
        if self.done or any(each.begun for each in self.among):
            cache.rows_version += 1
            self.rows.run()
            note_steps([self])


def note_steps(passes: Sequence[RowPass]) -> None:
    """Counts the steps that tables have taken, and with dense optimizers keeps what rows without a gradient need to
    catch up. A second call does nothing."""
    alike: dict[tuple[Cache, DenseStep], list[int]] = {}
    for each in passes:
        step = each.numbers.dense_step if each.numbers is not None and each.numbers.terms is not None else None
        if step is not None:
            alike.setdefault((each.cache, step), []).extend(each.steps)
    for (cache, step), tables in alike.items():
        cache.cold.history.append(tables, step)
    for each in passes:
        taken = each.cache.cold.metadata.steps
        for table, count in each.steps.items():
            taken[table] = count


def carry_out(passes: Sequence[RowPass]) -> None:
    """Runs all of these passes or none: after an exception in between, the next user of the rows completes them, if one
    had begun. The caller holds the locks of the groups' rows, and has checked them."""
    records, among, done = [], [each.rows for each in passes], list[Pass]()
    for each in passes:  # in this frame, which the intent log remembers
        each.among, each.done = among, done
        records.append(each.cache.changes.begin(each))
    for each in passes:
        each.cache.rows_version += 1
        each.rows.run()
        done.append(each.rows)
    note_steps(passes)
    for each, record in zip(passes, records, strict=True):
        each.cache.changes.clear(record)
    for each in passes:
        if isinstance(each.rows, CountedPass) and each.kept is not None:
            each.kept.replayed += each.rows.replayed


class HostGroupCall:
    """One forward in one group: its bags, its ticket, and what its gradient needs."""

    def __init__(
        self, group: HostGroup, bags: Bags, options: LookupOptions, ticket: Ticket, stack: Stack | None = None
    ) -> None:
        self.group = group
        self.bags = bags
        self.options = options
        self.ticket = ticket
        self.weights: Array = NO_WEIGHTS
        self.argmax: Array = NO_ARGMAX
        self.forward_rows: Array | None = None
        self.is_caught_up = False  # whether the rows of a dense optimizer are at the current step
        # copies of rows at the current step, made for reading, and how many steps each table has replayed
        self._copies: tuple[CopiedRows, list[int]] | None = None
        self.stack = stack
        self.outputs = bags  # whose rows are the output
        if stack is not None:
            self.outputs = replace(bags, sample=stack.row.numpy(), batch=stack.rows)
        elif not group.config.pooled:
            self.outputs = one_by_one(bags)

    def of_client(self, place: int, mine: slice, context: CallContext) -> HostGroupCall:
        """The slice of the plan for one of the tables that plan as one, that at `place`. `mine`: its occurrences ·
        `context`: of the module that looks up in it."""
        batch, bags, ticket = self.bags.batch, self.bags, self.ticket
        first, end = int(ticket.uniques[:place].sum()), int(ticket.uniques[: place + 1].sum())
        edges = bags.offsets[place * batch : (place + 1) * batch + 1]
        own = Bags(
            keys=bags.keys[mine],
            offsets=edges - edges[0],
            sample=bags.sample[mine],
            feature=np.zeros(mine.stop - mine.start, np.int32),
            position=None,
            batch=batch,
        )
        share = TicketShare(
            ticket,
            homes=ticket.homes[mine],
            inverse=np.maximum(ticket.inverse[mine] - np.int32(first), np.int32(-1)),  # padding stays −1
            unique_keys=ticket.unique_keys[first:end],
            unique_slots=ticket.unique_slots[first:end],
        )
        (group,) = context.tables.placed.now.groups
        assert isinstance(group, HostGroup)
        return HostGroupCall(group, own, context.options, cast("Ticket", share))

    def catch_up(self) -> Pass:
        """With a dense optimizer: the pass that brings the rows of this forward to the current step."""
        cache = self.group.cache
        cache.check_rows(self.ticket)
        assert self.group.kept is not None
        return catch_up(cache.hot, self.ticket.unique_slots, self.group.kept, rounding_of(self.group, cache.hot.key))

    def limit_norms(self, max_norm: float) -> Pass:
        """The pass that scales rows of this forward that are longer than `max_norm` down to it."""
        self.group.cache.check_rows(self.ticket)
        hot, rounding = self.group.cache.hot, rounding_of(self.group, self.group.cache.hot.key)
        return limit_norms(hot, self.ticket.unique_slots, max_norm, self.options.norm_type, rounding)

    def pool(self, out: Array, weights: Array | None, *, keep_argmax: bool, keep_rows: bool) -> None:
        """Pools into `out` (carrier (B, ΣD)); keeps the winners of maxima or the rows, if a backward needs them."""
        space = self.group.space
        if not self.group.config.pooled:
            space = rows_space(space.width, "sum")
        if weights is not None:
            position = self.bags.position
            self.weights = weights[: len(self.bags.keys)] if position is None else weights[position]
        if keep_argmax and space.has_max:
            self.argmax = np.full(out.shape, -1, np.int32)
        with self.group.cache.lock:  # else half of another thread's update could be read
            weight, homes = self._rows_now()
            pool(weight, homes, self.outputs, space, self.weights, out, self.argmax)
            if keep_rows:
                self.forward_rows = weight[np.maximum(homes, 0)]

    def pool_below(self, out: Array) -> None:
        """Pools the bags of each feature into rows of `out`, carrier (F·B, D), below those of the feature before it; or
        writes the rows of the ids there, (N, D)."""
        space, bags = self.group.space, self.outputs
        runs = [("sum", bags.batch)]
        if self.group.config.pooled:
            runs = [
                (MODES[mode], bags.batch * len(list(modes))) for mode, modes in itertools.groupby(space.mode.tolist())
            ]
        with self.group.cache.lock:
            (weight, homes), first = self._rows_now(), 0
            for mode, rows in runs:
                end = first + rows
                edges = bags.offsets[first : end + 1]
                of = Bags(bags.keys[edges[0] : edges[-1]], edges, bags.sample, bags.feature, None, rows)
                pool(weight, homes, of, rows_space(space.width, mode), NO_WEIGHTS, out[first:end], NO_ARGMAX)
                first = end

    def _pick(self, weight: Array, homes: Array, ids: Array, out: Array) -> None:
        """Writes the rows of some occurrences, `ids` int64 (K,), to `out`, carrier (K, D)."""
        bags, n = self.bags, len(ids)
        of = Bags(ids, np.arange(n + 1), bags.sample, bags.feature, None, n)
        pool(weight, homes[ids], of, rows_space(self.group.space.width, "sum"), NO_WEIGHTS, out, NO_ARGMAX)

    def pool_stack(
        self, stack: Stack, bags: Array, rows: Array, every: Array | None, weights: Array | None, *, keep_argmax: bool
    ) -> None:
        """Pools into `bags`, and writes the rows of the picked ids to `rows`, carriers (·, D), and the rows of
        all ids to `every`."""
        width = self.group.space.width
        if weights is not None:
            self.weights = weights
        if keep_argmax and self.group.space.has_max:
            self.argmax = np.full((stack.rows, width), -1, np.int32)
        with self.group.cache.lock:
            weight, homes = self._rows_now()
            for pooled in stack.pooled:
                span, shape = slice(*pooled.rows), (pooled.samples, len(pooled.modes) * width)
                out = bags[span].reshape(shape)  # a view
                argmax = self.argmax[span].reshape(shape) if len(self.argmax) else self.argmax
                space = rows_space(width, *pooled.modes)
                pool(weight, homes, self._bags_of(pooled), space, self.weights, out, argmax)
            self._pick(weight, homes, stack.picked.numpy(), rows)
            if every is not None:
                space = rows_space(width, "sum")
                pool(weight, homes, one_by_one(self.bags), space, NO_WEIGHTS, every, NO_ARGMAX)

    def _bags_of(self, pooled: PooledBags) -> Bags:
        bags = self.bags
        return Bags(bags.keys, pooled.edges.numpy(), bags.sample, bags.feature, None, pooled.samples, have_ends=True)

    def _rows_now(self) -> tuple[Array, Array]:
        """Rows at the current step, carrier (·, D), and the index among them of each occurrence's row. The caller holds
        the cache's lock."""
        cache, homes = self.group.cache, self._read(self.ticket.homes)
        cache.check_rows(self.ticket)
        if self.group.is_dense and not self.is_caught_up:
            return self._caught_up()
        return cache.hot.weight, homes

    def _read(self, homes: Array) -> Array:
        """`homes`, int32 (N,), with −1 for padding that adds nothing to its bag."""
        is_left_out = self.options.padding_is_dropped and self.options.plans_padding
        return _only(self.is_trained(), homes) if is_left_out else homes

    def _caught_up(self) -> tuple[Array, Array]:
        """Copies of the rows of this forward at the current step, carrier (U, D), and the index among them of each
        occurrence's row. The hot rows themselves catch up only as far as `kept_until`, to save a second replay."""
        hot, slots = self.group.cache.hot, self.ticket.unique_slots
        histories, starts = self.group.histories, np.cumsum(self.ticket.uniques) - self.ticket.uniques
        if len(histories) == 1:  # of one table, or of several that have taken the same steps
            parts = [(histories[0], slice(None), starts if self.group.clients else None)]
        else:
            ends = starts + self.ticket.uniques
            parts = [(each, slice(*part), None) for each, *part in zip(histories, starts, ends, strict=True)]
        for history, part, cuts in parts:
            until = self.group.kept_until(history)
            if until is not None:
                self.group.catch_up_to(until, hot, slots[part], history, cuts)
        rows = CopiedRows(hot.weight[slots], hot.state[slots], np.zeros(len(slots), np.uint8))
        numbers, rounding = np.arange(len(slots), dtype=np.int32), rounding_of(self.group, hot.key[slots])
        replayed: list[int] = []
        for history, part, cuts in parts:
            found = catch_up(rows, numbers[part], history, rounding, starts=cuts)
            found.run()
            replayed += [found.replayed] if cuts is None else found.replayed_by(cuts)
        if self.group.clients:
            self._copies = rows, replayed
        return rows.weight, self._read(self.ticket.inverse)

    def keep_caught_up(self) -> bool:
        """Of tables that plan as one: overwrites the rows with the copies at the current step that the last lookup
        read; returns False if there are none. The caller holds the locks of the rows."""
        copies, self._copies = self._copies, None
        if copies is None:
            return False
        rows, replayed = copies
        carry_out([RowPass(self.group, put_back(self.group.cache.hot, self.ticket.unique_slots, rows))])
        self.group.count_replayed(replayed)
        self.is_caught_up = True
        return True

    def update_below(self, grads: Sequence[torch.Tensor], numbers: Hyperparameters, history: History | None) -> Pass:
        """One optimizer step, given for each feature in turn the gradient of its output of `pool_below`, float32 (B,
        D), read in place. `history`: of a dense optimizer. The caller holds the lock."""
        first = min(grads, key=torch.Tensor.data_ptr)
        space = copy.copy(self.group.space)
        # all gradients as one array that begins with the first in memory: a column is a distance from there
        space.column = np.array([(grad.data_ptr() - first.data_ptr()) // grad.itemsize for grad in grads])
        segments, gradient = gather(self.group, [self], [first])
        gradient, hot = replace(gradient, sample=self.bags.sample), self.group.cache.hot
        rounding = rounding_of(self.group, hot.key, ahead=1)
        made = update(hot, segments, gradient, space, numbers, history, rounding)
        made.held = grads
        return made

    def tables_of_rows(self) -> torch.Tensor:
        """See `Call`."""
        found = np.zeros(self.outputs.batch, np.int64)  # of an empty bag 0
        found[self.outputs.sample] = self.group.space.tables[self.group.space.table[self.bags.feature]]
        return torch.from_numpy(found)

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the gradient of the per-sample weights to their positions in `out`, float32 (N,)."""
        assert self.forward_rows is not None
        read = self._read(self.ticket.homes)
        homes = np.where(read < 0, read, np.arange(len(read), dtype=np.int32))
        gradient = weights_gradient(self.forward_rows, homes, self.bags, self.group.space, grad.numpy())
        out.numpy()[slice(len(gradient)) if self.bags.position is None else self.bags.position] = gradient

    def gradient(self, grad: Array) -> Gradient:
        """The gradient of the rows, given the gradient of the outputs, float32 (B, ΣD)."""
        scale = self.weights
        if self.stack is not None:
            scale = self._with_means(self.stack, scale)
        elif len(scale) == 0 and self.group.space.has_mean:
            scale = mean_scale(self.bags, self.group.space, self._read(self.ticket.homes))
        if self.options.scale_grad_by_freq:
            inverse = self.ticket.inverse
            counts = np.maximum(np.bincount(inverse[inverse >= 0], minlength=1), 1)  # padding has no count
            share = np.where(inverse >= 0, 1 / counts[inverse].astype(np.float32), 0).astype(np.float32)
            scale = share if len(scale) == 0 else scale * share
        return Gradient(grad, self.outputs.sample, self.bags.feature, scale, self.argmax)

    def _with_means(self, stack: Stack, scale: Array) -> Array:
        """The `scale` of a stack's occurrences, multiplied by their shares in means."""
        means = [pooled for pooled in stack.pooled if "mean" in pooled.modes]
        if not means:
            return scale
        homes, width = self._read(self.ticket.homes), self.group.space.width
        scale = np.ones(len(homes), np.float32) if len(scale) == 0 else scale.copy()
        for pooled in means:
            mean_scale(self._bags_of(pooled), rows_space(width, *pooled.modes), homes, scale)
        return scale

    def is_trained(self) -> Array | None:
        """Which occurrences a gradient may reach, bool (N,): all but planned rows of padding. None for all."""
        padding = self.group.space.padding
        if not self.options.plans_padding or (padding < 0).all():
            return None
        keys: Array = np.where(padding < 0, -1, self.group.space.first + padding)
        trained: Array = self.bags.keys != (keys[0] if len(keys) == 1 else keys[self.bags.feature])
        return trained


class HostCall(Call):
    """One forward of a module on the CPU, or several."""

    device_type = "cpu"
    parts: list[HostGroupCall]
    read = staticmethod(read)

    def plan(
        self,
        batch: Batch,
        kind: PlanKind,
        *,
        may_exceed_bags: bool = False,
        memory: Any = None,
    ) -> None:
        options, groups = self.context.options, self.context.tables.placed.now.groups
        blocks = self.blocks_of(batch, groups)
        bags, dropped, places = [], not options.plans_padding, batch.places
        for group, (ids, edges, _) in zip(groups, blocks, strict=True):  # all ids are checked before any group plans
            bags.append(make_bags(ids, edges, group.space, batch.size, padding_is_dropped=dropped, places=places))
        self.ids = len(batch.ids)
        ages = kind.ages
        kinds = [kind] * len(groups) if isinstance(ages, bool) else [kind._replace(ages=age) for age in ages]
        try:
            for group, group_bags, (_, _, client), group_kind in zip(groups, bags, blocks, kinds, strict=True):
                assert isinstance(group, HostGroup)
                ticket = group.cache.plan(group_bags.keys, group_kind, client=client)
                self.parts.append(HostGroupCall(group, group_bags, options, ticket, batch.stack))
        except BaseException:
            self.release()
            raise

    def blocks_of(self, batch: Batch, groups: Sequence[Group]) -> list[tuple[Array, Array, int | Planners | None]]:
        """For each group its ids, int64 (N,), the checked edges of their bags, int64, and the clients that plan them:
        the whole batch, or of several forwards those in its pool."""
        ids = batch.ids.numpy()
        if self.form is not None:
            found: list[tuple[Array, Array, int | Planners | None]] = []
            for block, group in zip(self.form.blocks, groups, strict=True):
                if isinstance(batch.offsets, torch.Tensor):  # checked when they were joined
                    edges = batch.offsets.numpy()[block.edges]
                else:
                    assert block.bags is not None
                    edges = block.bags.edges()
                found.append((ids[block.ids], edges, Planners(group.clients, np.array(block.starts))))
            return found
        if isinstance(batch.offsets, EqualBags):
            edges = batch.offsets.edges()
        else:
            edges = checked_edges(batch.offsets.numpy(), len(ids), batch.edges, exact=batch.exact)
        return [(ids, edges, group.client) for group in groups]

    def catch_up(self) -> None:
        with self.context.tables.placed.now.rows.held():
            carry_out([RowPass(part.group, part.catch_up()) for part in self.parts])
            for part in self.parts:
                part.is_caught_up = True

    def limit_norms(self, max_norm: float) -> None:
        with self.context.tables.placed.now.rows.held():
            carry_out([RowPass(part.group, part.limit_norms(max_norm)) for part in self.parts])

    @property
    def rows(self) -> int:
        return self.parts[0].outputs.batch

    @ranged("lookup")
    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        dtype, columns = self.context.tables.placed.now.config.output_dtype, self.context.tables.columns
        # numpy's memory comes in huge pages: faulting 27 MB in by 4 KiB pages costs as much as the lookup
        out = np.empty((self.rows, int(columns[-1])), CARRIERS[dtype])
        array = None
        if weights is not None:  # the backward reads them, and loaders reuse their buffers
            array = weights.detach().to(torch.float32, copy=differentiable).contiguous().numpy()
        for part in self.parts:
            part.pool(out, array, keep_argmax=differentiable, keep_rows=self.keeps_rows)
        return torch.from_numpy(out).view(dtype)

    @ranged("lookup")
    def pool_stack(
        self, weights: torch.Tensor | None, dtype: torch.dtype, *, differentiable: bool, all_rows: bool
    ) -> StackRows:
        (part,) = self.parts
        stack, width, own = part.stack, part.group.space.width, self.context.tables.placed.now.config.output_dtype
        assert stack is not None
        # numpy's memory, as in `pool`
        bags = np.empty((stack.bags, width), CARRIERS[dtype])
        rows = np.empty((len(stack.picked), width), CARRIERS[own])
        every = np.empty((self.ids, width), CARRIERS[own]) if all_rows else None
        array = None if weights is None else weights.numpy()
        part.pool_stack(stack, bags, rows, every, array, keep_argmax=differentiable)
        tensors = torch.from_numpy(bags).view(dtype), torch.from_numpy(rows).view(own)
        return StackRows(*tensors, None if every is None else torch.from_numpy(every).view(own))

    def weigh(self, scale: torch.Tensor) -> None:
        (part,) = self.parts
        part.weights = scale.numpy()

    # --- of several forwards ------------------------------------------------------------------------------------------

    def join(self, forwards: Sequence[Given]) -> Batch:
        form, offsets, edges = self.form, dict[int, torch.Tensor](), None
        assert form is not None
        own = [each.reshape(-1) for inputs in forwards if isinstance(each := inputs[0], torch.Tensor)]
        ids = torch.cat(own).to(torch.int64)
        if not form.is_equal:
            given = [each for k in form.with_offsets if isinstance(each := forwards[k][1], torch.Tensor)]
            differ = {id(each): each for each in given}  # many tables may be given the same tensor
            numbers = {key: number for number, key in enumerate(differ)}
            which = [numbers[id(each)] for each in given]
            inputs = torch.cat([*differ.values()]).to(torch.int64).view(-1, form.size) if given else _NO_OFFSETS
            copies = inputs.unbind()
            offsets.update(zip(form.with_offsets, [copies[number] for number in which], strict=True))
            found = np.empty(form.edges, np.int64)
            parts, counts = form.arrays
            if not join_edges(inputs.numpy(), np.array(which, np.int64), parts, counts, form.size, found):
                raise InvalidInputError("offsets of one of the tables, which says itself what is wrong with them")
            edges = torch.from_numpy(found)
        of_each = torch.split(ids, form.counts)
        self.planned_inputs = [(each, offsets.get(number)) for number, each in enumerate(of_each)]
        return form.batch(ids, edges)

    @ranged("lookup")
    def pool_blocks(self) -> list[torch.Tensor]:
        assert self.form is not None
        dtype, found = self.context.tables.placed.now.config.output_dtype, []
        for part, block in zip(self.parts, self.form.blocks, strict=True):
            out = np.empty((len(block.positions) * self.batch, part.group.space.width), CARRIERS[dtype])
            part.pool_below(out)
            found.append(torch.from_numpy(out).view(dtype))
        return found

    def alone(self, block: int, place: int, context: CallContext) -> HostCall:
        assert self.form is not None
        call, starts = HostCall(context, self.batch), self.form.blocks[block].starts
        call.ids = starts[place + 1] - starts[place]
        call.parts = [self.parts[block].of_client(place, slice(*starts[place : place + 2]), context)]
        return call

    def catch_up_slice(self, forward: Forward) -> None:
        forward.alone.catch_up()

    def catch_up_block(self, block: int, is_as_looked_up: Callable[[int], bool]) -> bool:
        with self.context.tables.placed.now.rows.held():
            return is_as_looked_up(block) and self.parts[block].keep_caught_up()


# --- updates ----------------------------------------------------------------------------------------------------------


def apply(collected: Collected) -> None:
    """Takes one optimizer step for the calls of one backward pass, which are in forward order."""
    shared, rest = by_call(collected) if len(collected) > 1 else ([], [collected])
    tables = [forwards.call.context.tables for forwards, _ in shared]
    tables += [calls[0][0].context.tables for calls in rest]
    todo: list[RowPass] = []
    with _rows_of(tables):
        for forwards, shared_calls in shared:
            update = _shared_update(forwards, shared_calls)
            if update is None:
                rest += [[pair] for pair in shared_calls]
            else:
                todo.append(update)
        for calls in rest:
            for g, group in enumerate(calls[0][0].context.tables.placed.now.groups):
                for call, _ in calls:
                    group.cache.check_rows(call.parts[g].ticket)
        for calls in rest:
            grads = [grad for _, grad in calls]
            place, optimizer = calls[0][0].context.tables.placed.now, calls[0][0].context.updater.optimizer
            assert optimizer is not None  # checked in the backward
            for g, group in enumerate(place.groups):
                assert isinstance(group, HostGroup)
                numbers = optimizer.numbers(tuple(group.cache.cold.metadata.steps[group.own]), grads)
                if numbers is None:
                    break
                rows = prepare_update(group, [call.parts[g] for call, _ in calls], grads, numbers)
                todo.append(RowPass(group, rows, numbers))
        carry_out(todo)


def rounding_of(group: HostGroup, keys: Array, *, ahead: int = 0) -> Any:
    """See `Group.rounding`; without a call if rows are rounded to nearest."""
    return NEAREST if group.draws is None else group.rounding(keys, ahead=ahead)


def _rows_of(tables: Sequence[TableSet]) -> Locks:
    """The locks of the rows of all caches of these tables. Without its lock, a plan on another thread may replace the
    arrays of a cache."""
    if len(tables) == 1:
        return tables[0].placed.now.rows.held()
    return Locks({group.cache for each in tables for group in each.placed.now.groups}, plans=False)


def no_rows() -> Pass:
    return Pass(lambda *_: 0, [0])


def _shared_update(forwards: Forwards, collected: Collected) -> RowPass | None:
    """The update of all tables of a call in one pool, as of one batch; None if their optimizers' hyperparameters
    differ. The caller holds the locks of the rows."""
    whole, grads = forwards.call.parts[collected[0][0].block], [grad.contiguous() for _, grad in collected]
    history = whole.group.shared_history if forwards.is_dense else None
    if forwards.is_dense and history is None:  # the tables have taken different steps
        return None
    numbers = _shared_numbers(whole.group, [call.context.updater.optimizer for call, _ in collected], grads)
    if numbers is None:
        return None
    whole.group.cache.check_rows(whole.ticket)
    return RowPass(whole.group, whole.update_below(grads, numbers, history), numbers)


def _shared_numbers(
    group: HostGroup, optimizers: Sequence[RowOptimizer], grads: Sequence[torch.Tensor]
) -> Hyperparameters | None:
    """The hyperparameters of the next step of tables that plan as one `group`, each with an optimizer and a gradient;
    None if they differ."""
    taken, first = group.cache.cold.metadata.steps, optimizers[0]
    steps = [taken[table] for table in group.clients]
    if take_one_step(optimizers):
        return first.numbers(tuple(steps), grads)
    found = []
    for optimizer, step, grad in zip(optimizers, steps, grads, strict=True):
        taken_step = optimizer.numbers((step,), [grad])
        if taken_step is None:
            return None
        found.append(taken_step)
    if len({(each.recipe, each.numbers, each.scale, each.dense_step) for each in found}) > 1:
        return None
    return replace(found[0], rate=np.concatenate([each.rate for each in found]))


def prepare_update(
    group: HostGroup, parts: list[HostGroupCall], grads: list[torch.Tensor], numbers: Hyperparameters
) -> Pass:
    """One optimizer step of a group, for the calls of one backward pass in forward order. The caller holds the lock."""
    hot, rounding = group.cache.hot, rounding_of(group, group.cache.hot.key, ahead=1)
    segments, gradient = gather(group, parts, grads)
    return update(hot, segments, gradient, group.space, numbers, group.kept, rounding)


def gather(group: HostGroup, parts: list[HostGroupCall], grads: list[torch.Tensor]) -> tuple[Segments, Gradient]:
    """The calls of one backward pass as one batch: trained occurrences by row, and their gradient."""
    gradients = [part.gradient(grad.contiguous().numpy()) for part, grad in zip(parts, grads, strict=True)]
    if len(parts) == 1:
        inverse = _only(parts[0].is_trained(), parts[0].ticket.inverse)
        return segments_of(inverse, parts[0].ticket.unique_slots), gradients[0]
    homes = np.concatenate([_only(part.is_trained(), part.ticket.homes) for part in parts])
    return segments_of_homes(homes, len(group.cache.hot)), _concatenate(gradients)


def _only(trained: Array | None, occurrences: Array) -> Array:
    """`occurrences`, int32 (N,), with −1 for those that are not `trained`."""
    return occurrences if trained is None else np.where(trained, occurrences, np.int32(-1))


def _concatenate(gradients: list[Gradient]) -> Gradient:
    """Several batches as one: samples and winners are numbered across them."""
    samples = np.cumsum([0] + [len(g.grad) for g in gradients])
    occurrences = np.cumsum([0] + [len(g.sample) for g in gradients])
    scaled = any(len(g.scale) for g in gradients)
    scales = [g.scale if len(g.scale) else np.ones(len(g.sample), np.float32) for g in gradients]
    argmax = [np.where(g.argmax < 0, -1, g.argmax + first) for g, first in zip(gradients, occurrences, strict=False)]
    return Gradient(
        grad=np.concatenate([g.grad for g in gradients]),
        sample=np.concatenate([g.sample + first for g, first in zip(gradients, samples, strict=False)]).astype(
            np.int32
        ),
        feature=np.concatenate([g.feature for g in gradients]),
        scale=np.concatenate(scales) if scaled else NO_WEIGHTS,
        argmax=np.concatenate(argmax).astype(np.int32),
    )
