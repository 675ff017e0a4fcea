"""Forwards of tables of related pools, known before they come: planned as one call and looked up as one, of which each
has its slice. Where an update is of all tables of a pool, it is that of one batch, too.

Of each table there is one forward, of as many samples. Its ids, output and gradient follow those of the table before it
in its pool.

What is planned as one: blocks have ids, edges, faults and outputs of their own, and one plan, on a GPU one recording.
Shapes and dtypes are checked once for each form of a batch (`batch_form`). On a GPU one launch puts ids and edges
together. What is asked of one forward alone, as weights of its samples, is a call over its slice of the plan
(`Call.alone`).

The first forward that comes looks up for all. Each is handed its own output, while no row has changed since; else it
looks up by itself. All outputs are those of one autograd node: what Python does in forward and backward it does once,
and not for each table and on two threads, between whose caches it would go back and forth.

An update that reaches all forwards of a block, and no table of theirs by another call, is that of one batch
(`by_call`), on a GPU those of all blocks one recording; any other is put together from slices. In a graph and on the
CPU it reads the gradients where they lie. On the CPU that of a dense optimizer needs tables that have taken the same
steps.

Rows of a dense optimizer are read as they are at the steps that were taken. Rows that no forward asks for stay behind,
as without the plan. Those of forwards that have come are brought there once it is known which forwards come, in one
pass if all do, and at the latest before the next step (`catch_up_lagging`).
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

MOST_SELECTIONS = 16  # choices of tables of related pools that are looked up as one: for each a GPU keeps some arrays


LAGGING: set[weakref.ref[Forwards]] = set()  # those with rows that are yet to be brought forward


def catch_up_lagging(*tables: TableSet) -> None:
    """Before a step of these tables: brings the rows of forwards that have come to the current step, where that was put
    off (`Forwards._catch_up_later`). The forwards may be those of other threads."""
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
    """Whose optimizer updates the tables as one: each has its own."""

    optimizer = None


def _never(_: object) -> None:
    raise AssertionError("a call of several forwards has no gradient of its own")


Tables = Sequence[tuple[Pool, tuple[int, ...]]]  # of related pools, by their numbers there


def context_of(tables: Tables, options: LookupOptions, *, make: bool = True) -> CallContext | None:
    """What calls over these tables need, as it was made before. None where it was not: unless it is to be made, and not
    so many others were asked for that a model is not likely to come back to them."""
    contexts, key = tables[0][0].related.contexts, (*[(pool.order, numbers) for pool, numbers in tables], options)
    found: CallContext | None = contexts.get(key)
    if found is None and make and len(contexts) < MOST_SELECTIONS:
        found = contexts[key] = CallContext(Selection(tables), options, _Nobody(), BackwardPass(), _never)
        for pool, _ in tables:  # with any of these it goes, and lets the caches of that go
            weakref.finalize(pool, contexts.pop, key, None).atexit = False
    return found


class Forwards:
    """The forwards of one `call`, of batches of its `form`. `contexts`: of who makes each forward ·
    `is_dense`: whether tables have steps to catch up with. Of the call's `parts` each is what one pool has
    planned: a block of the form."""

    def __init__(self, call: Call, contexts: Sequence[CallContext]) -> None:
        assert call.form is not None
        self.call, self.form, self.contexts = call, call.form, contexts
        every = range(len(self.form.counts))
        self.is_dense = call.context.is_dense
        self._in_flight: set[object] = set(every)  # forwards that were not released
        self._rows: Sequence[torch.Tensor] = ()  # the outputs of all forwards, once they are looked up
        self._rows_of: list[Hashable] = []  # of each block, of what version of rows, and how they were looked up
        # of their autograd node, once there is one: those that have come, as it knows them, and the outputs of those
        # that have yet to come, which keep it and so the calls that it keeps
        self._node: tuple[weakref.ref[Calls], dict[int, torch.Tensor]] | None = None
        self.expected = set(every)  # forwards that have yet to come
        self._lagging: list[Forward] = []  # those that have come, whose rows are to be brought to the current step
        self._taking = threading.Lock()  # of those by one thread

    def share(self, number: int, given: Given) -> Forward | None:
        """The call of the forward of that number, which is `given` these inputs; None where these are known to be
        others by now than those that were planned."""
        if self.call.planned_inputs is not None:
            for planned, now in zip(self.call.planned_inputs[number], given, strict=False):
                if planned is None or not isinstance(now, torch.Tensor):
                    continue
                if now.dim() != 1:
                    now = now.reshape(-1)
                if not torch.equal(now if now.dtype is torch.int64 else now.to(torch.int64), planned):
                    return None
        return Forward(self, number)

    # --- as they come -------------------------------------------------------------------------------------------------

    def rows_of(self, position: int) -> torch.Tensor | None:
        """The output of one of the forwards, (B, D), while the rows are what they were when the first one came; else,
        and where that was on another stream or in inference mode, None."""
        # no view to autograd: who has it may change it in place
        return self._looked_up()[position].data if self._is_as_looked_up(self.form.where[position][0]) else None

    def output_of(self, forward: Forward, hook: torch.Tensor) -> torch.Tensor | None:
        """Starts one that is to be trained; returns the same of it, of one autograd node with the others. `hook`: see
        `LookupFunction`."""
        forward.number, output = next(NUMBERS), None
        if self.call.number < 0:
            self.call.start(trains=False)
        if self._is_as_looked_up(forward.block):
            if self._node is None:
                calls, leaf = Calls(), hook.detach().requires_grad_()  # of its own, as in `Engine.lookup`
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
        """The rows of a forward that has come, and of no other, are brought to the steps that their table has taken:
        once it is known which forwards come, and at the latest before the next step."""
        self._lagging.append(forward)
        if self.expected:
            LAGGING.add(weakref.ref(self))
        else:
            self.catch_up_deferred()

    def catch_up_deferred(self) -> None:
        """See `_defer_catch_up`. By any thread, while others release what has come."""
        mine = object()
        self._in_flight.add(mine)  # so that the plan is not over meanwhile
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
        """Whether a lookup in one pool now finds what that of the first forward has found, or is the first one."""
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
        """That of each, no views to autograd either."""
        return [each.data for each in self._looked_up()]

    # --- as they end --------------------------------------------------------------------------------------------------

    def release_each(self, forwards: Sequence[Forward]) -> None:
        """As `release_part`, of forwards that have come."""
        for forward in forwards:
            forward.lasts = False
        self.release_part(*[forward.position for forward in forwards])

    def release_part(self, *positions: int) -> None:
        """Forwards are over; with the last one the plan is."""
        self.expected.difference_update(positions)
        if self._lagging and not self.expected:
            self.catch_up_deferred()
        self.forget(*positions)

    def forget(self, *holders: Any) -> None:
        """Ends forwards, by position, or what has kept the plan in flight beside them; with the last one the plan
        ends."""
        self._in_flight.difference_update(holders)
        node = self._node  # which a forward that ends with it forgets meanwhile
        if node is not None:
            for each in holders:
                node[1].pop(each, None)
        if not self._in_flight:
            self._rows, self._node = (), None
            self.call.release()


class Forward:
    """One of several `forwards`, that at `position`: a `Call` to whom it is handed. By itself it is a call over its
    slice of the plan only where something is asked that does not concern all: weights of its samples, or an update
    without the others."""

    number = -1  # in the order of forwards, once it has started
    consumed = False
    keeps_rows = False
    requested: Collected | None = None  # see `Call`
    within: Any = None
    recorded = None  # an update of it alone is launched

    def __init__(self, forwards: Forwards, position: int) -> None:
        self.forwards, self.position = forwards, position
        self.block, self.place = forwards.form.where[position]  # of which pool, and where there
        self.context, self.batch = forwards.contexts[position], forwards.form.size
        self.ids = forwards.form.counts[position]
        self.device_type = forwards.call.device_type
        self.lasts = True
        self._alone: Call | None = None
        forwards.expected.discard(position)

    @property
    def alone(self) -> Call:
        """As a call of this forward alone, over its slice of the plan."""
        if self._alone is None:
            self._alone = self.forwards.call.alone(self.block, self.place, self.context)
        return self._alone

    @property
    def parts(self) -> list[Any]:
        """What its table holds of the plan."""
        return self.alone.parts

    @property
    def memory(self) -> Any:
        """Where the plan of all lies, on a GPU."""
        return self.forwards.call.memory  # type: ignore[attr-defined]

    @property
    def rows(self) -> int:
        """Those of its output."""
        return self.batch if self.context.tables.placed.now.config.pooled else self.ids

    def start(self, *, trains: bool) -> None:
        """The forward has come."""
        self.number = next(NUMBERS)
        forwards = self.forwards
        if forwards.call.number < 0:
            forwards.call.start(trains=False)
        if trains and forwards.is_dense:
            self.catch_up()

    def catch_up(self) -> None:
        """Brings its rows to the steps that its table has taken, of a dense optimizer."""
        self.forwards.call.catch_up_slice(self)

    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        """Its output, (B, D)."""
        forwards = self.forwards
        if not self.keeps_rows and weights is None:
            rows = forwards.rows_of(self.position)
            if rows is not None:
                return rows
        forwards.call.begin_alone()
        if self.keeps_rows:  # the plan of all, too: nobody plans to where it is
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
        """Keeps none of its rows in their slots any more."""
        self.lasts = False
        self.forwards.release_part(self.position)

    def __del__(self) -> None:
        if getattr(self, "lasts", False):  # no forward whose rows lag behind: the others hold these
            self.forwards.forget(self.position)

    @property
    def is_over(self) -> bool:
        """Whether no backward of it can come any more."""
        return self.consumed or not self.lasts


def take_one_step(optimizers: Sequence[RowOptimizer | None]) -> bool:
    """Whether all take a step by the same numbers, and nothing else concerns one of them alone."""
    first = optimizers[0]
    if first is None or first.stepping is None:
        return False
    return len({id(None if each is None else each.stepping) for each in optimizers}) == 1


def by_call(collected: Collected) -> tuple[list[tuple[Forwards, Collected]], list[Collected]]:
    """Parts the calls of an update. First those forwards that are all that a call has in one pool, in the order of the
    tables there: where none is a call alone, and no table has another one. Then the rest, each set of tables by
    itself."""
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
