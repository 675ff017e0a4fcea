"""Calls that wait for the step of a torch optimizer, and what of their gradient is known meanwhile.

They are kept as `accumulate()` keeps them: their rows stay in their slots, and the update is that of one backward over
all of them as one batch. Of the gradient nothing is computed but each table's norm, when somebody reads it. What
others multiply it by meanwhile is multiplied into the gradients that are there then, as torch would multiply the
gradient that it has; what a later backward brings is added to that.

A gradient that reaches all rows, as of a loss that uses a table as a whole, is kept as what it is made of
(`WholeGradient`), and joins the calls' in the update, chunk by chunk.

A gradient whose elements somebody sets, or that a hook has seen, is an object of its own from there on
(`OwnedGradients`). The update is then that of a call that looks up the rows of all tables' gradients once, and whose
output has them as its gradient.

As a parameter's, a table's `.grad` is there from a backward until it is set to None, and a step of the optimizer is
one of the table then. After a step zeros are left of it, as after `zero_grad(set_to_none=False)`: the next step has no
gradient, unless a backward comes before.
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
    """Who has the rows of the tables, and updates them."""

    def update(self, collected: Collected) -> None:
        """Applies calls, which are in forward order, as one update, and releases them."""

    def step_alone(self) -> None:
        """Takes a step in which no row has a gradient."""

    def update_rows(self, rounds: Iterator[list[TableRows]], calls: Sequence[Call], *, reaches_all: bool) -> None:
        """Takes a step that is given the gradients of rows of tables, some at a time: each row in one of them. Releases
        the `calls` that they are of: where a GPU has refused one of these, it refuses the step. `reaches_all`: whether
        all rows of a table are."""


class PendingGradients:
    """What one set of tables has collected since the last step. `parameters`: the tables · `over_ranks`: see
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
        self.has_hooks = any(each.hooks or each.post_hooks for each in parameters)  # or has had
        self._over_ranks = over_ranks
        self.owner = owner
        self._count = len(tables.config.tables)
        self._calls: Collected = []
        # of tables whose gradient reaches all rows, beside what the calls say
        self.whole: dict[int, WholeGradient] = {}
        self._owned = OwnedGradients()  # of these tables the whole gradient, whatever the calls say
        self._is_applied = False  # what is owned, by the last step
        self.copies: list[weakref.ref[Known]] = []  # see `Source`
        self.is_there = False  # whether the tables have a gradient, if of zeros, as after a step
        self.applied_calls = 0  # how many the last step has applied
        self._zeros: list[torch.Tensor] | None = None  # what it is then, float32 (2,) for each table
        self._zeros_on: torch.device | None = None
        self._read: list[torch.Tensor] | None = None  # of each table float32 (2,): its norm and the trace
        self._norms: tuple[object, torch.Tensor] | None = None  # float32 (T,), and of what they are
        self._spoilt: torch.Tensor | None = None  # by what was multiplied in before; see `spoilt`
        self.applied: torch.Tensor | None = None  # the same of what is applied
        self._dropped: set[int] = set()
        self._zeroed: set[int] = set()  # by hand, of calls that are collected
        self._gradients: dict[int, TableGradient] = {}
        self._epoch = 0  # how often the gradients have become others, so that norms of before are no longer theirs
        self._is_fresh = True  # whether nothing was left of the step before when the first backward came
        self._has_warned = self._has_warned_of_zeros = False
        self._table_of_column: torch.Tensor | None = None

    @property
    def waiting(self) -> bool:
        """Whether anything waits for a step."""
        return bool(self._calls or self.whole) or (bool(self._owned) and not self._is_applied)

    @staticmethod
    def add_all(those: Mapping[PendingGradients, Collected]) -> None:
        """Adds what a backward pass has brought to each: its calls, and uses of whole tables. Where nothing but calls
        waits they are appended here: a model may have many sets of tables, and a Python call for each costs more."""
        for mine, collected in those.items():
            is_plain = not (mine.whole or mine._owned or mine._dropped or mine._zeroed or mine.copies or mine.has_hooks)
            for call, _ in collected:
                is_plain = is_plain and not isinstance(call, WholeUse)
            if not is_plain or mine._read is not None:
                mine._add(collected)
                continue
            mine.is_there, mine._is_applied = True, False  # first: `zero_grad()` finds what an interruption leaves
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
        """What calls bring to gradients that are owned: those of tables with hooks are from here on."""
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
        """Before the gradients become others: copies of what they are find their rows, if these can be found."""
        copies, self.copies = self.copies, []
        for each in filter(None, [copy() for copy in copies]):
            if each.own is not None:
                each.materialise()

    def _end(self, table: int) -> None:
        """The gradient of a table becomes another one. If anybody has the old one, that stays what it was."""
        if table in self._gradients and _is_kept(self._gradients, table):
            known = self._gradients.pop(table).known
            if known.is_bound:
                known.materialise()

    # --- what is found in `.grad` ------------------------------------------------------------------------------------

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
        """What says what is known of the gradient of a table that is not owned."""
        config = self._tables.placed.now.config
        found = self._gradients.get(table)
        if found is None:
            shape = (config.tables[table].num_embeddings, config.tables[table].embedding_dim)
            found = self._gradients[table] = TableGradient(shape, config.device, Known(self, table))
        return found

    def write(self, table: int, value: torch.Tensor | None) -> None:
        """Replaces it; None drops the table's gradient. Raises `InvalidInputError` for what is no gradient of it."""
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
                else:  # what is left of a step
                    self.is_there, self._dropped = False, set()
            return
        self._check_assigned(table, value)
        if not isinstance(value, TableGradient):
            self._take(table, value)
            return
        known = value.known
        is_here = self.is_there and table not in self._dropped and table not in self._owned
        if known.is_of(self, table) and is_here:
            if known.own is not None:  # a multiple of what it is
                now = self._values()[table]
                self._replace_bound(table, value, now)
                now.copy_(known.own)
                known.own = None
        elif known.is_bound:
            self._take(table, of_rows(known.rows()))  # that of another table
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
        """`value`, which is known by numbers, is the gradient from here on. Who has the old one has a copy."""
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
        """`value` is the gradient of a table from here on."""
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
        """Raises `UnsupportedError` where gradients lie on several ranks."""
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
            self._is_fresh = True  # where somebody zeroes by hand
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
            # what is collected is dropped, and zeros are left of it
            dropped = set(self._dropped)
            self._drop()
            self.is_there, self._dropped = True, dropped

    def norms(self, norm_type: float) -> torch.Tensor:
        """The norms of the tables' gradients as they are now, float32 (T,); zero for those dropped. Does not
        synchronise, but where gradients are owned or reach all rows."""
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
        """Those of what is not owned. Does not synchronise but where a gradient reaches all rows."""
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
        """Multiplies what others have multiplied the gradients by into them. Does not synchronise."""
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
                # where the norm is zero now nothing is left of the gradient, infinities included
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
        """Float32 (T,): NaN for a table whose gradient others have multiplied by what is not finite, else 0; or None.
        As zeros times such a factor are NaN, no row of the table is a number after a step, in torch. Does not
        synchronise."""
        if self._read is None:
            return self._spoilt
        with torch.no_grad():
            values = torch.stack(self._read)
            return self._spoilt_by(values[:, 1], values[:, 0] == 0)

    def _columns(self, device: torch.device) -> torch.Tensor:
        """The table of each column of the outputs, int64 (ΣD,). Kept: a capture could not bring it to a GPU."""
        if self._table_of_column is None or self._table_of_column.device != device:
            tables = torch.tensor([feature.table for feature in features_of(self._tables.config.tables)], device="cpu")
            widths = torch.tensor([table.embedding_dim for table in self._tables.config.tables], device="cpu")
            columns = torch.repeat_interleave(tables, widths[tables])
            self._table_of_column = columns.to(device)
        return self._table_of_column

    @staticmethod
    def check(those: Sequence[PendingGradients]) -> list[torch.Tensor | None]:
        """Raises `BackwardError` where some tables of a set have lost their gradient and others not. Warns where torch
        would have added to the gradient of the step before. Returns what is `spoilt` of each."""
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
        if self._tables.config.device.type == "cuda":  # one alone was checked when it came
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
        """Applies what they have collected as one update; of those that have collected nothing, a step without a
        gradient. Interrupted before that has begun, it is dropped."""
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
            # of a step without a gradient zeros are left, as in torch
            each._is_fresh, each.is_there = not (each._calls or each.whole), True
            each.applied, each._is_applied = each._spoilt, bool(each._owned)
            each.applied_calls = len(each._calls)
        for each in by_row:
            rounds, reaches_all = each._rounds(), bool(each.whole)
            each.owner.update_rows(rounds, [call for call, _ in each._taken([each])], reaches_all=reaches_all)
        calls = PendingGradients._taken(those)  # which the others have left
        if calls:
            those[0].owner.update(in_forward_order(calls))
        for each in alone:
            each.owner.step_alone()

    def _rounds(self) -> Iterator[list[TableRows]]:
        """The gradients of rows, some at a time. What calls have found is found now, the rest when it is asked for."""
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
        """Drops what is collected, and gives its rows free."""
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
        """The calls that they have collected, which wait no longer."""
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
    """Whether anybody else has one of them, or a view of it. What runs in each step tests it without a call."""
    return getrefcount(gradients[table]) > _ALONE or getrefcount(gradients[table].known) > _ALONE


_A_GRADIENT = {0: TableGradient((1, 1), torch.device("cpu"), Known())}
_ALONE = getrefcount(_A_GRADIENT[0])  # references that are counted of what nobody else has


def _without_views(values: torch.Tensor) -> list[torch.Tensor]:
    """The rows of `values`, in its memory, and yet no views, which have no `detach_()`."""
    return [each.data for each in values.unbind()]
