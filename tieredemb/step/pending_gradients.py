"""Calls that wait for the step of a torch optimizer, and their gradients until then.

Calls are kept as `accumulate()` keeps them: their rows stay in their slots, and the update is that of one backward over
all of them as one batch. Of the gradient only each table's norm is computed, when it is read. A factor that code
multiplies the gradient by is multiplied into the gradients collected so far, as torch would do; gradients of later
backwards are added.

A gradient that reaches all rows, as of a loss over a whole table, is kept as terms (`WholeGradient`), and added to the
calls' gradients in the update, chunk by chunk.

If code sets elements of a gradient, or a hook has seen it, it becomes an object of its own (`OwnedGradients`). The
update is then that of a call that looks up the rows of all tables' gradients once, with these as gradient of its
output.

As for a parameter, a table's `.grad` exists from a backward until it is set to None, and meanwhile a step of the
optimizer is a step of the table. After a step it is zeros, as after `zero_grad(set_to_none=False)`: the next step has
no gradient, unless a backward runs before.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Protocol

import torch

from tieredemb.config import features_of
from tieredemb.errors import BackwardError, InvalidInputError, UnsupportedError, shown
from tieredemb.kernels.streams import outside_capture
from tieredemb.step.gradient_norms import OverRanks, gradient_norms
from tieredemb.step.gradient_rows import GradientRows, RowSums, TableRows, rows_of_calls, sums_of_calls
from tieredemb.step.owned_gradients import OwnedGradients
from tieredemb.step.program import Call, Collected, in_forward_order
from tieredemb.step.table_gradient import TRACE, Known, TableGradient, of_rows
from tieredemb.step.whole_gradient import WholeGradient, WholeUse, rows_of, with_whole
from tieredemb.step.whole_table import Rows
from tieredemb.tables.table_set import TableSet

if TYPE_CHECKING:
    from tieredemb.step.table_parameter import TableParameter


class Owner(Rows, Protocol):
    """Has the rows of the tables, and updates them."""

    def update(self, collected: Collected) -> None:
        """Applies calls, given in forward order, as one update, and releases them."""

    def step_alone(self) -> None:
        """Takes a step in which no row has a gradient."""

    def update_rows(self, rounds: Iterator[list[TableRows]], calls: Sequence[Call], *, reaches_all: bool) -> None:
        """Takes a step from gradients of rows, given in `rounds`, each row in one of them. Releases the `calls` that
        they are of: if a GPU has refused one of these, it refuses the step. `reaches_all`: whether they are of all rows
        of a table."""


class PendingGradients:
    """The gradients of one set of tables since the last step. `parameters`: the tables · `over_ranks`: see
    `gradient_norms`."""

    def __init__(
        self,
        tables: TableSet,
        parameters: Sequence[TableParameter],
        owner: Owner,
        over_ranks: OverRanks | None = None,
    ) -> None:
        self._tables = tables
        self._parameters = parameters
        self.has_hooks = any(each.hooks or each.post_hooks for each in parameters)  # or had
        self._over_ranks = over_ranks
        self.owner = owner
        self._count = len(tables.config.tables)
        self._calls: Collected = []
        # of tables whose gradient reaches all rows, in addition to the calls'
        self.whole: dict[int, WholeGradient] = {}
        self._owned = OwnedGradients()  # for these tables the complete gradient
        self._is_applied = False  # whether the last step applied the owned gradients
        self.copies: list[weakref.ref[Known]] = []  # see `Source`
        self.is_there = False  # whether the tables have a gradient, perhaps of zeros, as after a step
        self.applied_calls = 0  # calls that the last step has applied
        self._zeros: list[torch.Tensor] | None = None  # the gradient then, float32 (2,) for each table
        self._zeros_on: torch.device | None = None
        self._read: list[torch.Tensor] | None = None  # for each table float32 (2,): its norm and the trace
        self._norms: tuple[object, torch.Tensor] | None = None  # float32 (T,), and of which gradients
        self._spoilt: torch.Tensor | None = None  # by earlier factors; see `spoilt`
        self.applied: torch.Tensor | None = None  # the same for the applied gradients
        self._dropped: set[int] = set()
        self._zeroed: set[int] = set()  # tables zeroed by hand, while calls are collected
        self._gradients: dict[int, TableGradient] = {}
        self._epoch = 0  # counts changes of the gradients, which make earlier norms invalid
        self._is_fresh = True  # whether no gradient of the step before was left at the first backward
        self._has_warned = self._has_warned_of_zeros = False
        self._table_of_column: torch.Tensor | None = None

    @property
    def waiting(self) -> bool:
        """Whether gradients wait for a step."""
        return bool(self._calls or self.whole) or (bool(self._owned) and not self._is_applied)

    @staticmethod
    def add_all(those: Mapping[PendingGradients, Collected]) -> None:
        """Adds the calls of a backward pass, and uses of whole tables, to each. If only calls wait, they are appended
        here: a model may have many sets of tables, and a Python call for each costs more."""
        for mine, collected in those.items():
            is_plain = not (mine.whole or mine._owned or mine._dropped or mine._zeroed or mine.copies or mine.has_hooks)
            for call, _ in collected:
                is_plain = is_plain and not isinstance(call, WholeUse)
            if not is_plain or mine._read is not None:
                mine._add(collected)
                continue
            mine.is_there, mine._is_applied = True, False  # first, so that `zero_grad()` also clears after an interrupt
            mine._epoch += 1
            mine._calls += collected

    def _add(self, collected: Collected) -> None:
        if not (self._calls or self.whole or self._owned):
            self._dropped = set()  # of zeros
        if self._dropped:
            self._refuse_dropped()
        if self._zeroed or self._read is not None:
            self._fold()
        come = self._through_hooks(collected) if self._owned or self.has_hooks else {}
        self._dropped = set()
        if self.copies:
            self._materialise_copies()
        self.is_there, self._is_applied = True, False  # first, as above
        self._epoch += 1
        for table, rows in come.items():
            self._owned.add(table, rows)
        for call, grad in collected:
            if not isinstance(call, WholeUse):
                self._calls.append((call, grad))
            elif call.table not in come:
                self.whole.setdefault(call.table, WholeGradient(self._tables, call.table)).add(grad)
        if self.has_hooks:
            for each in self._parameters:
                each.call_post_hooks()

    def _through_hooks(self, collected: Collected) -> dict[int, GradientRows]:
        """The calls' gradients for tables whose gradients are owned, as those of tables with hooks become here."""
        hooked = {table for table, each in enumerate(self._parameters) if each.hooks or each.post_hooks}
        if not hooked and not self._owned:
            return {}
        come, before = rows_of(self._tables, collected), None
        found = {}
        for table in sorted(hooked | set(self._owned)):
            found[table] = self._parameters[table].through_hooks(come[table])
            self._check_one_rank()
        for table in hooked - set(self._owned):
            before = before or with_whole(rows_of_calls(self._tables, self._calls), self.whole)
            self._bound(table).known.set_rows(before[table])
        return found

    def _materialise_copies(self) -> None:
        """Called before the gradients change: has copies of them find their rows, if possible."""
        copies, self.copies = self.copies, []
        for each in filter(None, [copy() for copy in copies]):
            if each.own is not None:
                each.materialise()

    def _end(self, table: int) -> None:
        """Ends the gradient of a table. If other code has it, it keeps its value."""
        if table in self._gradients and _is_kept(self._gradients, table):
            known = self._gradients.pop(table).known
            if known.is_bound:
                known.materialise()

    # --- the value of `.grad` ----------------------------------------------------------------------------------------

    def read(self, table: int) -> torch.Tensor | None:
        """The `.grad` of a table's parameter; None where it has no gradient."""
        if not self.is_there or table in self._dropped:
            return None
        if table in self._owned:
            return self._owned[table]
        known = self._gradients.get(table)
        return self._bound(table) if known is None else known

    def move(self) -> None:
        """Follows the tables to another device."""
        self._gradients = {}

    def _bound(self, table: int) -> TableGradient:
        """The object for a table's gradient that is not owned."""
        config = self._tables.placed.now.config
        found = self._gradients.get(table)
        if found is None:
            shape = (config.tables[table].num_embeddings, config.tables[table].embedding_dim)
            found = self._gradients[table] = TableGradient(shape, config.device, Known(self, table))
        return found

    def write(self, table: int, value: torch.Tensor | None) -> None:
        """Sets `.grad`; None drops the table's gradient. Raises `InvalidInputError` if `value` is no gradient of it."""
        if value is None:
            self._is_fresh = True
            if table in self._gradients and (
                getrefcount(self._gradients[table]) > _ALONE or getrefcount(self._gradients[table].known) > _ALONE
            ):
                self._end(table)
            self._owned.pop(table, None)
            self._dropped.add(table)
            if len(self._dropped) == self._count:
                if self._calls or self.whole or self.copies:
                    self._drop()
                else:  # the zeros after a step
                    self.is_there, self._dropped = False, set()
            return
        self._check_assigned(table, value)
        if not isinstance(value, TableGradient):
            self._take(table, value)
            return
        known = value.known
        is_here = self.is_there and table not in self._dropped and table not in self._owned
        if known.is_of(self, table) and is_here:
            if known.own is not None:  # a multiple of itself
                now = self._values()[table]
                self._replace_bound(table, value, now)
                now.copy_(known.own)
                known.own = None
        elif known.is_bound:
            self._take(table, of_rows(known.rows()))  # another table's gradient
        elif value is not self._owned.get(table):
            known.become(known.rows())
            self._take(table, value)

    def _check_assigned(self, table: int, value: object) -> None:
        config = self._tables.placed.now.config
        shape = (config.tables[table].num_embeddings, config.tables[table].embedding_dim)
        is_known = isinstance(value, TableGradient) or type(value) in (torch.Tensor, torch.nn.Parameter)
        if not isinstance(value, torch.Tensor) or not is_known or tuple(value.shape) != shape:
            raise InvalidInputError(
                f"the gradient of a table of shape {shape} can be replaced by a tensor of that shape, or by None; got "
                f"{shown(value)}"
            )
        allowed = {torch.float32, self._tables.weight_dtype(table)}
        if value.dtype not in allowed or value.device != config.device:
            raise InvalidInputError(
                f"the gradient of a table is float32, or of the dtype of its rows, on {config.device}; got "
                f"{shown(value)} on {value.device}"
            )

    def _replace_bound(self, table: int, value: TableGradient, now: torch.Tensor) -> None:
        """Makes `value`, known by numbers, the gradient. Other code that has the old one has a copy."""
        if table in self._gradients and _is_kept(self._gradients, table):
            kept = self._gradients[table].known
            kept.own = now.clone()
            self.copies.append(weakref.ref(kept))
        self._gradients[table] = value

    def take(self, table: int, known: Known, rows: GradientRows) -> None:
        """See `Source`."""
        bound = self._gradients.get(table)
        if bound is None or bound.known is not known:
            bound = TableGradient((rows.count, rows.values.shape[1]), rows.values.device, known)
        self._take(table, bound)

    def _take(self, table: int, value: torch.Tensor) -> None:
        """Makes `value` the gradient of a table."""
        self._check_one_rank()
        if not self.is_there:
            self._dropped = set(range(self._count))
        if self.copies:
            self._materialise_copies()
        if self._gradients.get(table) is value:
            del self._gradients[table]
        else:
            self._end(table)
        if self._read is not None:
            self._read[table].copy_(self._read[table].new_tensor([0.0, TRACE]))
        self._epoch += 1
        self._owned[table] = value
        self.whole.pop(table, None)
        self._dropped.discard(table)
        self.is_there, self._is_applied = True, False

    def rows(self, table: int, values: torch.Tensor | None = None) -> GradientRows:
        """See `Source`."""
        self._check_one_rank()
        numbers = self.values(table) if values is None else values
        rows = rows_of_calls(self._tables, self._calls)[table]
        if table in self.whole:
            rows = self.whole[table].by_row(rows)
        with torch.no_grad():
            scaled = (rows.values * (numbers[1] / TRACE)).masked_fill_(numbers[0] == 0, 0.0)
        return rows.with_values(scaled)

    def _check_one_rank(self) -> None:
        """Raises `UnsupportedError` if gradients are spread over several ranks."""
        if self._over_ranks is not None:
            raise UnsupportedError(
                "the gradient of a sharded table lies on several ranks, and this operation needs its elements; it can "
                "be multiplied by a number, and clipped by a norm"
            )

    def values(self, table: int) -> torch.Tensor:
        """See `Source`."""
        if not self.is_there or table in self._dropped:
            raise UnsupportedError("this gradient of a table was dropped; read .grad of its parameter anew")
        if not (self._calls or self.whole):
            if not self._is_fresh and not self._has_warned_of_zeros:
                self._has_warned_of_zeros = True
                warnings.warn(
                    "the gradient of a table is read after the step that has applied it, where torch would still have "
                    "it and zeros are left of it here; read it between backward() and step()",
                    stacklevel=2,
                )
            self._is_fresh = True  # if code zeroes it by hand
        return self._values()[table]

    def zero(self, table: int) -> None:
        """See `Source`."""
        if not (self._calls or self.whole):
            self._is_fresh, self._zeros = True, None
            return
        self._zeroed.add(table)
        if self._read is not None:
            self._read[table].zero_()
        if len(self._zeroed | self._dropped) == self._count and not self._owned:
            # collected calls are dropped, and the gradient is zeros
            dropped = set(self._dropped)
            self._drop()
            self.is_there, self._dropped = True, dropped

    def norms(self, norm_type: float) -> torch.Tensor:
        """The norms of the tables' present gradients, float32 (T,); zero for dropped ones. Does not synchronise, unless
        gradients are owned or reach all rows."""
        if not (self._calls or self.whole or self._owned):
            return torch.zeros(len(self._tables.config.tables), device=self._tables.config.device)
        self._fold()
        now = (norm_type, self._epoch, frozenset(self._dropped))
        if self._norms is None or self._norms[0] != now:  # computed once for all tables
            norms = self._collected_norms(norm_type)
            for table in self._owned:
                norms[table].copy_(self._owned.norm(table, norm_type))
            for table in self._dropped:
                norms[table].zero_()  # an assignment would copy the zero from the host, and wait
            self._norms = now, norms
        return self._norms[1]

    def _collected_norms(self, norm_type: float) -> torch.Tensor:
        """The norms of gradients that are not owned. Does not synchronise, unless a gradient reaches all rows."""
        if self._calls:
            norms = gradient_norms(self._tables, self._calls, norm_type, self._over_ranks)
        else:
            norms = torch.zeros(self._count, device=self._tables.config.device)
        rows = sums_of_calls(self._tables, self._calls) if self.whole else []
        for table, whole in self.whole.items():
            norms[table].copy_(whole.norm(norm_type, rows[table]))
        return norms

    def _values(self) -> list[torch.Tensor]:
        if not (self._calls or self.whole):
            device = self._tables.placed.now.config.device
            if self._zeros is None or self._zeros_on is not device:
                with torch.no_grad(), outside_capture(device) if device.type == "cuda" else contextlib.nullcontext():
                    self._zeros, self._zeros_on = _without_views(torch.zeros((self._count, 2), device=device)), device
            return self._zeros
        if self._read is None:
            with torch.no_grad():
                norms = self._collected_norms(2.0)
                self._read = _without_views(torch.stack([norms, torch.full_like(norms, TRACE)], 1))
                for table in self._zeroed:
                    self._read[table].zero_()
        return self._read

    # --- factors ----------------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        """Multiplies factors that code has applied into the gradients. Does not synchronise."""
        if self._zeroed:
            self._values()
        if self._read is None:
            return
        if self.copies:
            self._materialise_copies()
        self._epoch += 1
        with torch.no_grad():
            values = torch.stack(self._read)
            if values.device.type != "cpu" or bool((values[:, 1] != TRACE).any()):
                factors, zeroed = values[:, 1] / TRACE, values[:, 0] == 0
                # a norm of zero means zeros, even in place of infinities
                scaled = []
                for call, grad in self._calls:
                    of = self._columns(values.device) if self._tables.config.pooled else call.tables_of_rows()[:, None]
                    scaled.append((call, (grad * factors[of]).masked_fill_(zeroed[of], 0.0)))
                for table, whole in self.whole.items():
                    whole.scale(factors[table], zeroed[table])
                self._calls, self._spoilt = scaled, self._spoilt_by(factors, zeroed)
        self._read, self._zeroed = None, set()

    def _spoilt_by(self, factors: torch.Tensor, zeroed: torch.Tensor) -> torch.Tensor:
        spoilt = factors * 0.0 if self._spoilt is None else factors * 0.0 + self._spoilt
        return spoilt.masked_fill_(zeroed, 0.0)

    def spoilt(self) -> torch.Tensor | None:
        """Float32 (T,): NaN for a table whose gradient was multiplied by a factor that is not finite, else 0; or None.
        In torch, zeros times such a factor are NaN, so after a step all rows of the table are. Does not
        synchronise."""
        if self._read is None:
            return self._spoilt
        with torch.no_grad():
            values = torch.stack(self._read)
            return self._spoilt_by(values[:, 1], values[:, 0] == 0)

    def _columns(self, device: torch.device) -> torch.Tensor:
        """The table of each column of the outputs, int64 (ΣD,). Kept, as a capture could not copy it to a GPU."""
        if self._table_of_column is None or self._table_of_column.device != device:
            tables = torch.tensor([feature.table for feature in features_of(self._tables.config.tables)], device="cpu")
            widths = torch.tensor([table.embedding_dim for table in self._tables.config.tables], device="cpu")
            columns = torch.repeat_interleave(tables, widths[tables])
            self._table_of_column = columns.to(device)
        return self._table_of_column

    @staticmethod
    def check(those: Sequence[PendingGradients]) -> list[torch.Tensor | None]:
        """Raises `BackwardError` if some tables of a set have lost their gradient and others not. Warns where torch
        would have added to the gradient of the last step. Returns for each what is `spoilt`."""
        for mine in those:
            if mine._dropped or mine.whole or len(mine._calls) > 1 or not mine._is_fresh:
                mine._check()
        return [mine._spoilt if mine._read is None else mine.spoilt() for mine in those]

    def _check(self) -> None:
        if self._dropped:
            self._refuse_dropped()
        for whole in self.whole.values():
            whole.check()
        if len(self._calls) > 1:
            self._check_size()
        if not self._is_fresh and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "no zero_grad() came between two steps: torch would go on with the gradient of the step before, and "
                "tables do not; call optimizer.zero_grad() in each step",
                stacklevel=9,  # where step() is called
            )

    def _check_size(self) -> None:
        if self._tables.config.device.type == "cuda":  # a single call was checked at its backward
            from tieredemb.step.device_update import check_bags

            check_bags(self._tables, [call for call, _ in self._calls])

    def _refuse_dropped(self) -> None:
        names = ", ".join(repr(self._tables.config.tables[table].name) for table in sorted(self._dropped))
        raise BackwardError(
            f"the gradients of some tables of one module were set to None and others not ({names}); tables of one "
            f"module step together: zero all of them, or give them modules of their own"
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    @staticmethod
    def apply(those: Sequence[PendingGradients]) -> None:
        """Applies what they have collected as one update; those that have collected nothing take a step without a
        gradient. If it is interrupted before the update begins, the gradients are dropped."""
        by_row, alone = list[PendingGradients](), list[PendingGradients]()
        for each in those:
            if each._zeroed or each._read is not None:
                each._fold()
            for table in range(each._count):
                if table in each._gradients and (
                    getrefcount(each._gradients[table]) > _ALONE or getrefcount(each._gradients[table].known) > _ALONE
                ):
                    each._end(table)
            if each.whole or each._owned:
                by_row.append(each)
            elif not each._calls:
                alone.append(each)
            # after a step without a gradient it is zeros, as in torch
            each._is_fresh, each.is_there = not (each._calls or each.whole), True
            each.applied, each._is_applied = each._spoilt, bool(each._owned)
            each.applied_calls = len(each._calls)
        for each in by_row:
            rounds, reaches_all = each._rounds(), bool(each.whole)
            each.owner.update_rows(rounds, [call for call, _ in each._taken([each])], reaches_all=reaches_all)
        calls = PendingGradients._taken(those)  # the remaining ones
        if calls:
            those[0].owner.update(in_forward_order(calls))
        for each in alone:
            each.owner.step_alone()

    def _rounds(self) -> Iterator[list[TableRows]]:
        """The gradients of rows, in rounds. Those of calls are computed now, the rest when they are requested."""
        whole, first = dict(self.whole), list[TableRows]()
        sums: Sequence[RowSums]
        if len(whole) == self._count:
            sums = sums_of_calls(self._tables, self._calls)
        else:
            rows = rows_of_calls(self._tables, self._calls)
            rows = [self._owned.rows(table) if table in self._owned else rows[table] for table in range(self._count)]
            first = [
                TableRows(t, part.ids, part.values) for t, part in enumerate(rows) if t not in whole and len(part.ids)
            ]
            sums = rows

        def found() -> Iterator[list[TableRows]]:
            if first:
                yield first
            for table, gradient in whole.items():
                for start, values in gradient.chunks(sums[table]):
                    ids = torch.arange(start, start + len(values), device=values.device)
                    yield [TableRows(table, ids, values, start)]

        return found()

    def drop(self) -> None:
        """Drops what is collected, and releases its rows."""
        for table in range(self._count):
            self._end(table)
        self._drop()

    def _drop(self) -> None:
        self._owned.clear()
        self.is_there, self._is_fresh = False, True
        for call, _ in self._taken([self]):
            call.release()

    @staticmethod
    def _taken(those: Sequence[PendingGradients]) -> Collected:
        """Takes the calls that they have collected."""
        calls = Collected()
        for each in those:
            if each.copies:
                each._materialise_copies()
            each._epoch += 1
            calls += each._calls
            each._calls, each.whole = [], {}
            each._read = each._norms = each._spoilt = None
            each._dropped, each._zeroed = set(), set()
        return calls


def _is_kept(gradients: dict[int, TableGradient], table: int) -> bool:
    """Whether other code has the gradient, or a view of it. Code of each step tests this without a call."""
    return getrefcount(gradients[table]) > _ALONE or getrefcount(gradients[table].known) > _ALONE


_A_GRADIENT = {0: TableGradient((1, 1), torch.device("cpu"), Known())}
_ALONE = getrefcount(_A_GRADIENT[0])  # the count of references without other users


def _without_views(values: torch.Tensor) -> list[torch.Tensor]:
    """The rows of `values`, in its memory, but not as views, which have no `detach_()`."""
    return [each.data for each in values.unbind()]
