"""Forwards of tables of related pools, known before they come: planned as one and looked up as one, of which each
forward has its part. Where an update is of all tables of a pool, it is that of one batch, too.

Of each table there is one forward, of as many samples. Its ids, output and gradient follow those of the table before it
in its pool.
"""

from __future__ import annotations

import abc
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from tieredemb.step.call import LOOKUP, NUMBERS, BackwardPass, Call, CallContext, Calls, Collected
from tieredemb.step.joint_form import JointForm, JointForms
from tieredemb.tables.pool import Member, Pool, Together

if TYPE_CHECKING:
    from tieredemb.lookup.options import LookupOptions
    from tieredemb.step.batch import Batch, Given
    from tieredemb.tables.row_optimizer import RowOptimizer
    from tieredemb.tables.table_set import TableSet

MOST_TOGETHER = 16  # choices of tables of related pools that are looked up as one: for each a GPU keeps some arrays


LAGGING: set[weakref.ref[JointCall]] = set()  # those with rows that are yet to be brought forward


def catch_up_lagging(*tables: TableSet) -> None:
    """Before a step of these tables: brings the rows of forwards that have come to the current step, where that was put
    off (`JointCall._catch_up_later`). The joint calls may be those of other threads."""
    stepping = {(each.pool, each.number) for each in tables if isinstance(each, Member)}
    for known in list(LAGGING):
        joint = known()
        if joint is None:
            LAGGING.discard(known)
            continue
        of_pools = cast("Together", joint.context.tables).of_pools
        if any((pool(), number) in stepping for pool, numbers in of_pools for number in numbers):
            joint.catch_up_those_that_came()


class _Nobody:
    """Whose optimizer updates the tables as one: each has its own."""

    optimizer = None


def _never(_: object) -> None:
    raise AssertionError("a joint call has no gradient of its own")


class JointContext(CallContext):
    """What joint calls over some tables of related pools need."""

    @functools.cached_property
    def forms(self) -> JointForms:
        """Of the batches that were looked up."""
        return JointForms()

    def form_of(self, shown: Any) -> JointForm | None:
        """That of batches whose tensors show that, if such were looked up before."""
        return self.forms.get(shown, self.tables.placed.now)

    def keep_form(self, shown: Any, form: JointForm) -> None:
        """For batches of as much to come."""
        self.forms.put(shown, self.tables.placed.now, form)


Tables = Sequence[tuple[Pool, tuple[int, ...]]]  # of related pools, by their numbers there


def key_of(tables: Tables, options: LookupOptions) -> tuple[object, ...]:
    """What tells lookups in these tables from others in related pools."""
    return *[(pool.order, numbers) for pool, numbers in tables], options


def known_context(tables: Tables, options: LookupOptions) -> JointContext | None:
    """What joint calls over these tables have needed before, if there were any."""
    found: JointContext | None = tables[0][0].related.contexts.get(key_of(tables, options))
    return found


def joint_context(tables: Tables, options: LookupOptions) -> JointContext | None:
    """What joint calls over these tables need; None where so many others were asked for that they are no habit of a
    model."""
    found, contexts = known_context(tables, options), tables[0][0].related.contexts
    if found is None and len(contexts) < MOST_TOGETHER:
        found = JointContext(Together(tables), options, _Nobody(), BackwardPass(), _never)
        key = key_of(tables, options)
        contexts[key] = found
        for pool, _ in tables:  # with any of these it goes, and lets the caches of that go
            weakref.finalize(pool, contexts.pop, key, None).atexit = False
    return found


class JointCall(Call):
    """The forwards of several tables as one call, of batches of one `form`. `contexts`: of who makes each forward ·
    `count`: how many forwards these are · `is_dense`: whether tables have steps to catch up with · `gpu`: the number of
    the one that they are on, or −1. Of its `parts` each is what one pool has planned: a block of the form."""

    gpu = -1

    def __init__(self, context: JointContext, form: JointForm, contexts: Sequence[CallContext]) -> None:
        super().__init__(context, form.size)
        self.contexts = contexts
        self.form, self.count = form, len(form.counts)
        self.is_dense = context.is_dense
        self._forget_parts()

    def _forget_parts(self) -> None:
        self._in_flight: set[object] = set(range(self.count))  # forwards that were not released
        self._rows: Sequence[torch.Tensor] = ()  # the outputs of all forwards, once they are looked up
        self._rows_of: list[Hashable] = []  # of each block, of what version of rows, and how they were looked up
        # of their autograd node, once there is one: those that have come, as it knows them, and the outputs of those
        # that have yet to come, which keep it and so the calls that it keeps
        self._node: tuple[weakref.ref[Calls], dict[int, torch.Tensor]] | None = None
        self._awaited = set(range(self.count))  # forwards that have yet to come
        self._lagging: list[PartCall] = []  # those that have come, whose rows are to be brought to the current step
        self._taking = threading.Lock()  # of those by one thread

    @abc.abstractmethod
    def join(self, forwards: Sequence[Given]) -> Batch:
        """What the forwards are given, as one batch to be planned. Raises `InvalidInputError` for what is wrong with
        one of them, or leaves that to the plan."""

    def begin_alone(self) -> None:
        """One of the forwards is about to be looked up by itself."""

    def rows_of(self, position: int) -> torch.Tensor | None:
        """The output of one of the forwards, (B, D), while the rows are what they were when the first one came; else,
        and where that was on another stream or in inference mode, None."""
        # no view to autograd: who has it may change it in place
        return self._looked_up()[position].data if self._is_as_looked_up(self.form.where[position][0]) else None

    def output_of(self, call: PartCall, hook: torch.Tensor) -> torch.Tensor | None:
        """Starts one that is to be trained; returns the same of it, of one autograd node with the others. `hook`: see
        `LookupFunction`."""
        call.number, output = next(NUMBERS), None
        if self.number < 0:
            self.start(trains=False)
        if self._is_as_looked_up(call.block):
            if self._node is None:
                came, leaf = Calls(), hook.detach().requires_grad_()  # of its own, as in `Engine.lookup`
                outputs = dict(enumerate(LOOKUP(leaf, None, came, self._outputs_apart)))
                for position in outputs.keys() - self._in_flight:
                    del outputs[position]
                self._node = weakref.ref(came), outputs
            of_node, outputs = self._node
            came_there = of_node()
            if came_there is not None:
                output = outputs.pop(call.position, None)
            if output is not None and came_there is not None:
                came_there[call.position] = call
        if self.is_dense:
            if output is None:
                call.catch_up()
            else:
                self._catch_up_later(call)
        return output

    def _catch_up_later(self, call: PartCall) -> None:
        """The rows of a forward that has come, and of no other, are brought to the steps that their table has taken:
        once it is known which forwards come, and at the latest before the next step."""
        self._lagging.append(call)
        if self._awaited:
            LAGGING.add(weakref.ref(self))
        else:
            self.catch_up_those_that_came()

    def catch_up_those_that_came(self) -> None:
        """See `_catch_up_later`. By any thread, while others release what has come."""
        mine = object()
        self._in_flight.add(mine)  # so that the plan is not over meanwhile
        try:
            with self._taking:
                calls, self._lagging = self._lagging, []
            LAGGING.discard(weakref.ref(self))
            of_block: dict[int, list[PartCall]] = {}
            for call in calls:
                of_block.setdefault(call.block, []).append(call)
            for block, its in of_block.items():
                if len(its) < len(self.form.blocks[block].positions) or not self._catch_up_all(block):
                    for call in its:
                        call.catch_up()
        finally:
            self._forget(mine)

    @abc.abstractmethod
    def _catch_up_all(self, block: int) -> bool:
        """The same of all forwards in one pool, as one; returns False where that cannot be."""

    def _is_as_looked_up(self, block: int) -> bool:
        """Whether a lookup in one pool now finds what that of the first forward has found, or is the first one."""
        stream = 0 if self.gpu < 0 else torch._C._cuda_getCurrentRawStream(self.gpu)
        is_inference = torch.is_inference_mode_enabled()
        if not self._rows_of:
            self._rows_of = [(part.group.cache.rows_version, stream, is_inference) for part in self.parts]
        return (self.parts[block].group.cache.rows_version, stream, is_inference) == self._rows_of[block]

    @abc.abstractmethod
    def pool_blocks(self) -> Sequence[torch.Tensor]:
        """The outputs of the forwards in each pool, (F·B, D)."""

    def _looked_up(self) -> Sequence[torch.Tensor]:
        """The output of each forward, (B, D)."""
        if not self._rows:
            found: list[torch.Tensor] = []
            for block, out in zip(self.form.blocks, self.pool_blocks(), strict=True):
                found += out.view(len(block.positions), self.batch, -1).unbind()
            self._rows = found
        return self._rows

    def _outputs_apart(self) -> list[torch.Tensor]:
        """That of each, no views to autograd either."""
        return [each.data for each in self._looked_up()]

    @staticmethod
    def in_order(collected: Collected) -> Collected:
        """Its parts and their gradients in the order of the tables."""
        positions = [cast("PartCall", call).position for call, _ in collected]
        return [collected[at] for at in sorted(range(len(positions)), key=positions.__getitem__)]

    def release_parts(self, parts: Sequence[PartCall]) -> None:
        """The same of forwards that have come."""
        for part in parts:
            part._lasts = False
        self.release_part(*[part.position for part in parts])

    def release_part(self, *positions: int) -> None:
        """Forwards are over; with the last one the plan is."""
        self._awaited.difference_update(positions)
        if self._lagging and not self._awaited:
            self.catch_up_those_that_came()
        self._forget(*positions)

    def _forget(self, *those: Any) -> None:
        """Ends forwards, by position, or what has kept the plan in flight beside them; with the last one the plan
        ends."""
        self._in_flight.difference_update(those)
        node = self._node  # which a forward that ends with it forgets meanwhile
        if node is not None:
            for each in those:
                node[1].pop(each, None)
        if not self._in_flight:
            self._rows, self._node = (), None
            self.release()


class PartCall(Call):
    """The forward of one table of a `joint` call, that at `position`. By itself it has a part only where something is
    asked that does not concern all: weights of its samples, or an update without the others."""

    def __init__(self, joint: JointCall, position: int) -> None:
        self.joint, self.position = joint, position  # what it is a part of
        self.block, self.place = joint.form.where[position]  # of which pool, and where there
        self.context, self.batch = joint.contexts[position], joint.batch
        joint._awaited.discard(position)
        self.ids = joint.form.counts[position]
        self._parts: list[Any] = []
        self._lasts = True

    @property
    def parts(self) -> list[Any]:  # type: ignore[override]
        if not self._parts:
            self._parts = [self._part()]
        return self._parts

    @parts.setter
    def parts(self, parts: list[Any]) -> None:
        self._parts = parts

    @abc.abstractmethod
    def _part(self) -> Any:
        """What its table holds of the plan."""

    def start(self, *, trains: bool) -> None:
        self.number = next(NUMBERS)
        joint = self.joint
        if joint.number < 0:
            joint.start(trains=False)
        if trains and joint.is_dense:
            self.catch_up()

    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        if not self.keeps_rows and weights is None:
            rows: torch.Tensor | None = self.joint.rows_of(self.position)
            if rows is not None:
                return rows
        self.joint.begin_alone()
        return super().pool(weights, differentiable=differentiable)  # type: ignore[safe-super]

    def release(self) -> None:
        self._lasts = False
        self.joint.release_part(self.position)

    def __del__(self) -> None:
        if getattr(self, "_lasts", False):  # no forward whose rows lag behind: the joint call holds these
            self.joint._forget(self.position)

    @property
    def is_over(self) -> bool:
        return self.consumed or not self._lasts


def take_one_step(optimizers: Sequence[RowOptimizer | None]) -> bool:
    """Whether all take a step by the same numbers, and nothing else concerns one of them alone."""
    first = optimizers[0]
    if first is None or first.stepping is None:
        return False
    return len({id(None if each is None else each.stepping) for each in optimizers}) == 1


def by_joint(collected: Collected) -> tuple[list[tuple[JointCall, Collected]], list[Collected]]:
    """Parts the calls of an update. First those that are all that a joint call has in one pool, in the order of the
    tables there, with the joint call: where none has a part of its own, and no table has another call. Then the rest,
    each set of tables by itself."""
    of: dict[tuple[Any, int], Collected] = {}
    for pair in collected:
        of.setdefault((pair[0].joint, pair[0].block), []).append(pair)
    times = Counter([call.context.tables for call, _ in collected]) if len(of) > 1 else Counter()
    twice = {tables for tables, count in times.items() if count > 1}
    found = dict[tuple[Any, int], Collected]()
    for (joint, block), its in of.items():
        if joint is None or len(its) < len(joint.form.blocks[block].positions):
            continue
        alone = [call for call, _ in its if call._parts or call.context.tables in twice]
        if not alone:
            found[joint, block] = joint.in_order(its)
    rest: dict[Any, Collected] = {}
    for pair in collected if len(found) < len(of) else ():
        if (pair[0].joint, pair[0].block) not in found:
            rest.setdefault(pair[0].context.updater, []).append(pair)
    return [(joint, its) for (joint, _), its in found.items()], [*rest.values()]
