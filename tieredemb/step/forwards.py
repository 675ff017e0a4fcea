"""Forwards of tables of related pools, known ahead: planned and looked up as one call, of which each forward has a
slice. An update of all tables of a pool is also done as that of one batch.

Each table has one forward, all of as many samples. Its ids, output and gradient follow those of the table before it in
its pool.

The plan: each pool is a block with ids, edges, faults and outputs of its own; all blocks have one plan, on a GPU one
recording. Shapes and dtypes are checked once for each form of a batch (`batch_form`). On a GPU one launch joins ids and
edges. What concerns one forward alone, as per-sample weights, is a call over its slice of the plan (`Call.alone`).

The lookup: the first forward that starts looks up for all. Each forward returns its own output, unless a row has
changed since; then it looks up by itself. All outputs belong to one autograd node, so Python runs once in forward and
backward, not once for each table on two threads that would compete for CPU caches.

The update: if it reaches all forwards of a block, and their tables by no other call, it is that of one batch
(`by_call`), on a GPU for all blocks one recording; any other is put together from slices. In a graph and on the CPU it
reads the gradients in place. On the CPU, a dense optimizer also needs tables that have taken the same steps.

Rows of a dense optimizer are read at the current step. Rows of forwards that never start stay behind, as without the
plan. Rows of forwards that have started catch up once it is known which forwards start, in one pass if all do, and at
the latest before the next step (`catch_up_lagging`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tieredemb.step.program import LOOKUP, NUMBERS, BackwardPass, Call, CallContext, Calls, Collected
from tieredemb.tables.pool import Member, Pool, Selection

if TYPE_CHECKING:
    from tieredemb.lookup.options import LookupOptions
    from tieredemb.step.batch import Given
    from tieredemb.tables.row_optimizer import RowOptimizer
    from tieredemb.tables.table_set import TableSet

MOST_SELECTIONS = 16  # sets of tables of related pools that are looked up as one: a GPU keeps arrays for each


LAGGING: set[weakref.ref[Forwards]] = set()  # those with rows that have yet to catch up


def catch_up_lagging(*tables: TableSet) -> None:
    """Before a step of these tables: brings the rows of started forwards to the current step, if that was deferred
    (`Forwards._defer_catch_up`). The forwards may be of other threads."""
    stepping = {(each.pool, each.number) for each in tables if isinstance(each, Member)}
    for known in list(LAGGING):
        forwards = known()
        if forwards is None:
            LAGGING.discard(known)
            continue
        tables_of_all = forwards.call.context.tables
        assert isinstance(tables_of_all, Selection)
        if any((pool(), number) in stepping for pool, numbers in tables_of_all.of_pools for number in numbers):
            forwards.catch_up_deferred()


class _Nobody:
    """The updater of tables that are looked up as one: it has no optimizer, as each table has its own."""

    optimizer = None


def _never(_: object) -> None:
    raise AssertionError("a call of several forwards has no gradient of its own")


Tables = Sequence[tuple[Pool, tuple[int, ...]]]  # of related pools, by their numbers there


def context_of(tables: Tables, options: LookupOptions, *, make: bool = True) -> CallContext | None:
    """The context of calls over these tables. If there is none yet, it is made, unless `make` is false, or there are
    so many others that a model is unlikely to use them again: then None."""
    contexts, key = tables[0][0].related.contexts, (*[(pool.order, numbers) for pool, numbers in tables], options)
    found: CallContext | None = contexts.get(key)
    if found is None and make and len(contexts) < MOST_SELECTIONS:
        found = contexts[key] = CallContext(Selection(tables), options, _Nobody(), BackwardPass(), _never)
        for pool, _ in tables:  # dropped with any of these, whose caches it keeps alive
            weakref.finalize(pool, contexts.pop, key, None).atexit = False
    return found


class Forwards:
    """The forwards of one `call`, of batches of its `form`. `contexts`: of each forward's module · `is_dense`: whether
    rows have steps to catch up with. Each of the call's `parts` is the plan of one pool: a block of the form."""

    def __init__(self, call: Call, contexts: Sequence[CallContext]) -> None:
        assert call.form is not None
        self.call, self.form, self.contexts = call, call.form, contexts
        every = range(len(self.form.counts))
        self.is_dense = call.context.is_dense
        self._in_flight: set[object] = set(every)  # forwards that are not released
        self._rows: Sequence[torch.Tensor] = ()  # the outputs of all forwards, once they are looked up
        self._rows_of: list[Hashable] = []  # for each block the version of rows, and how they were looked up
        # of their autograd node, once there is one: its calls, which are the started forwards, and the outputs of the
        # others, which keep the node and so its calls alive
        self._node: tuple[weakref.ref[Calls], dict[int, torch.Tensor]] | None = None
        self.expected = set(every)  # forwards that have not started
        self._lagging: list[Forward] = []  # started forwards whose rows have yet to catch up
        self._taking = threading.Lock()  # one thread takes these

    def share(self, number: int, given: Given) -> Forward | None:
        """The call of forward `number` with the inputs `given`; None if these are known to differ by now from the
        planned ones."""
        if self.call.planned_inputs is not None:
            for planned, now in zip(self.call.planned_inputs[number], given, strict=False):
                if planned is None or not isinstance(now, torch.Tensor):
                    continue
                if now.dim() != 1:
                    now = now.reshape(-1)
                if not torch.equal(now if now.dtype is torch.int64 else now.to(torch.int64), planned):
                    return None
        return Forward(self, number)

    # --- as they start ------------------------------------------------------------------------------------------------

    def rows_of(self, position: int) -> torch.Tensor | None:
        """The output of one of the forwards, (B, D); None if rows have changed since the first forward, or it ran on
        another stream, or in another inference mode."""
        # for autograd no view: users may change it in place
        return self._looked_up()[position].data if self._is_as_looked_up(self.form.where[position][0]) else None

    def output_of(self, forward: Forward, hook: torch.Tensor) -> torch.Tensor | None:
        """Starts a forward that is to be trained; returns its output as `rows_of` does, of the autograd node that it
        shares with the others. `hook`: see `LookupFunction`."""
        forward.number, output = next(NUMBERS), None
        if self.call.number < 0:
            self.call.start(trains=False)
        if self._is_as_looked_up(forward.block):
            if self._node is None:
                calls, leaf = Calls(), hook.detach().requires_grad_()  # a new leaf, as in `Engine.lookup`
                outputs = dict(enumerate(LOOKUP(leaf, None, calls, self._outputs)))
                for position in outputs.keys() - self._in_flight:
                    del outputs[position]
                self._node = weakref.ref(calls), outputs
            of_node, outputs = self._node
            node_calls = of_node()
            if node_calls is not None:
                output = outputs.pop(forward.position, None)
            if output is not None and node_calls is not None:
                node_calls[forward.position] = forward
        if self.is_dense:
            if output is None:
                forward.catch_up()
            else:
                self._defer_catch_up(forward)
        return output

    def _defer_catch_up(self, forward: Forward) -> None:
        """Has the rows of a started forward, and no others, brought to the current step of their table: once it is
        known which forwards start, and at the latest before the next step."""
        self._lagging.append(forward)
        if self.expected:
            LAGGING.add(weakref.ref(self))
        else:
            self.catch_up_deferred()

    def catch_up_deferred(self) -> None:
        """See `_defer_catch_up`. Any thread may call it, while others release forwards."""
        mine = object()
        self._in_flight.add(mine)  # so that the plan does not end meanwhile
        try:
            with self._taking:
                lagging, self._lagging = self._lagging, []
            LAGGING.discard(weakref.ref(self))
            of_block: dict[int, list[Forward]] = {}
            for forward in lagging:
                of_block.setdefault(forward.block, []).append(forward)
            for block, members in of_block.items():
                is_whole = len(members) == len(self.form.blocks[block].positions)
                if not (is_whole and self.call.catch_up_block(block, self._is_as_looked_up)):
                    for forward in members:
                        forward.catch_up()
        finally:
            self.forget(mine)

    def _is_as_looked_up(self, block: int) -> bool:
        """Whether a lookup in one pool would now find what the first forward found, or is the first one."""
        gpu = self.call.gpu
        stream = 0 if gpu < 0 else torch._C._cuda_getCurrentRawStream(gpu)
        is_inference = torch.is_inference_mode_enabled()
        if not self._rows_of:
            self._rows_of = [(part.group.cache.rows_version, stream, is_inference) for part in self.call.parts]
        return (self.call.parts[block].group.cache.rows_version, stream, is_inference) == self._rows_of[block]

    def _looked_up(self) -> Sequence[torch.Tensor]:
        """The output of each forward, (B, D)."""
        if not self._rows:
            found: list[torch.Tensor] = []
            for block, out in zip(self.form.blocks, self.call.pool_blocks(), strict=True):
                found += out.view(len(block.positions), self.form.size, -1).unbind()
            self._rows = found
        return self._rows

    def _outputs(self) -> list[torch.Tensor]:
        """The output of each forward; for autograd no views either."""
        return [each.data for each in self._looked_up()]

    # --- as they end --------------------------------------------------------------------------------------------------

    def release_each(self, forwards: Sequence[Forward]) -> None:
        """As `release_part`, for forwards that have started."""
        for forward in forwards:
            forward.lasts = False
        self.release_part(*[forward.position for forward in forwards])

    def release_part(self, *positions: int) -> None:
        """Ends the forwards at these positions; with the last one the plan ends."""
        self.expected.difference_update(positions)
        if self._lagging and not self.expected:
            self.catch_up_deferred()
        self.forget(*positions)

    def forget(self, *holders: Any) -> None:
        """Ends forwards, by position, or other holders of the plan; with the last one the plan ends."""
        self._in_flight.difference_update(holders)
        node = self._node  # a forward that ends with it may forget it meanwhile
        if node is not None:
            for each in holders:
                node[1].pop(each, None)
        if not self._in_flight:
            self._rows, self._node = (), None
            self.call.release()


class Forward:
    """One of several `forwards`, that at `position`, with the methods of a `Call`. It makes a call over its slice of
    the plan only for what does not concern all: per-sample weights, or an update without the others."""

    number = -1  # in the order of forwards, once it has started
    consumed = False
    keeps_rows = False
    requested: Collected | None = None  # see `Call`
    within: Any = None
    recorded = None  # an update of this forward alone is launched

    def __init__(self, forwards: Forwards, position: int) -> None:
        self.forwards, self.position = forwards, position
        self.block, self.place = forwards.form.where[position]  # its pool, and its position there
        self.context, self.batch = forwards.contexts[position], forwards.form.size
        self.ids = forwards.form.counts[position]
        self.device_type = forwards.call.device_type
        self.lasts = True
        self._alone: Call | None = None
        forwards.expected.discard(position)

    @property
    def alone(self) -> Call:
        """A call of this forward alone, over its slice of the plan."""
        if self._alone is None:
            self._alone = self.forwards.call.alone(self.block, self.place, self.context)
        return self._alone

    @property
    def parts(self) -> list[Any]:
        """The part of the plan of its table."""
        return self.alone.parts

    @property
    def memory(self) -> Any:
        """On a GPU: the memory of the whole plan."""
        return self.forwards.call.memory  # type: ignore[attr-defined]

    @property
    def rows(self) -> int:
        """Rows of its output."""
        return self.batch if self.context.tables.placed.now.config.pooled else self.ids

    def start(self, *, trains: bool) -> None:
        """See `Call.start`."""
        self.number = next(NUMBERS)
        forwards = self.forwards
        if forwards.call.number < 0:
            forwards.call.start(trains=False)
        if trains and forwards.is_dense:
            self.catch_up()

    def catch_up(self) -> None:
        """With a dense optimizer: brings its rows to the current step of its table."""
        self.forwards.call.catch_up_slice(self)

    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        """Its output, (B, D)."""
        forwards = self.forwards
        if not self.keeps_rows and weights is None:
            rows = forwards.rows_of(self.position)
            if rows is not None:
                return rows
        forwards.call.begin_alone()
        if self.keeps_rows:  # the whole plan, too: its memory is not planned into
            forwards.call.keeps_rows = self.alone.keeps_rows = True
        return self.alone.pool(weights, differentiable=differentiable)

    def weights_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """See `Call`."""
        return self.alone.weights_gradient(grad)

    def tables_of_rows(self) -> torch.Tensor:
        """See `Call`."""
        return self.alone.tables_of_rows()

    def record_stream(self, *more: torch.Tensor) -> None:
        """See `DeviceCall`."""
        self.alone.record_stream(*more)  # type: ignore[attr-defined]

    def release(self) -> None:
        """See `Call.release`."""
        self.lasts = False
        self.forwards.release_part(self.position)

    def __del__(self) -> None:
        if getattr(self, "lasts", False):  # not one whose rows have yet to catch up: `_lagging` holds those
            self.forwards.forget(self.position)

    @property
    def is_over(self) -> bool:
        """Whether no backward can reach it any more."""
        return self.consumed or not self.lasts


def take_one_step(optimizers: Sequence[RowOptimizer | None]) -> bool:
    """Whether all take a step with the same hyperparameters, without anything particular to one of them."""
    first = optimizers[0]
    if first is None or first.stepping is None:
        return False
    return len({id(None if each is None else each.stepping) for each in optimizers}) == 1


def by_call(collected: Collected) -> tuple[list[tuple[Forwards, Collected]], list[Collected]]:
    """Splits the calls of an update. First, for each call and pool, the forwards of all its tables there, in their
    order: if none of them was made a call alone, and no table has another call. Then the rest, by set of tables."""
    of: dict[tuple[Any, int], Collected] = {}
    for pair in collected:
        of.setdefault((pair[0].forwards, pair[0].block), []).append(pair)
    times = Counter([call.context.tables for call, _ in collected]) if len(of) > 1 else Counter()
    twice = {tables for tables, count in times.items() if count > 1}
    found = dict[tuple[Any, int], Collected]()
    for (forwards, block), pairs in of.items():
        if forwards is None or len(pairs) < len(forwards.form.blocks[block].positions):
            continue
        if not [forward for forward, _ in pairs if forward._alone or forward.context.tables in twice]:
            positions = [forward.position for forward, _ in pairs]
            found[forwards, block] = [pairs[at] for at in sorted(range(len(pairs)), key=positions.__getitem__)]
    rest: dict[Any, Collected] = {}
    for pair in collected if len(found) < len(of) else ():
        if (pair[0].forwards, pair[0].block) not in found:
            rest.setdefault(pair[0].context.updater, []).append(pair)
    return [(forwards, pairs) for (forwards, _), pairs in found.items()], [*rest.values()]
