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
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Any, NamedTuple, Protocol

import torch

from tieredemb.config import TableConfig, features_of
from tieredemb.errors import BackwardError, InvalidInputError, StorageError, UnsupportedError, shown
from tieredemb.kernels.streams import outside_capture
from tieredemb.step.call import Call, Collected, in_forward_order
from tieredemb.step.gradient_norms import OverRanks, gradient_norms
from tieredemb.step.gradient_rows import GradientRows, TableRows, rows_of_calls, sums_of_calls
from tieredemb.step.owned_gradients import OwnedGradients
from tieredemb.step.table_gradient import TRACE, Known, TableGradient, of_rows
from tieredemb.step.whole_gradient import WholeGradient, WholeUse, rows_of
from tieredemb.step.whole_table import Rows
from tieredemb.tables.table_set import TableSet


class Parameter(Protocol):
    """A table, as gradients come to it."""

    hooks: Any
    post_hooks: Any

    def through_hooks(self, rows: GradientRows) -> GradientRows:
        """What its hooks make of a gradient."""

    def call_post_hooks(self) -> None:
        """After a backward has brought it a gradient."""


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


@dataclass(frozen=True, eq=False)
class Member:
    """The tables of one module, among those that share caches: `numbers` there, in their order. `over_ranks`: see
    `gradient_norms`."""

    numbers: Sequence[int]
    tables: weakref.ref[TableSet]
    parameters: Sequence[Parameter]
    owner: Owner
    over_ranks: OverRanks | None

    @property
    def here(self) -> TableSet:
        """Its tables. Raises `StorageError` where they are gone."""
        found = self.tables()
        if found is None:
            raise StorageError("the tables of this gradient are gone, with the module that has had them")
        return found


class _Taken(NamedTuple):
    """What a step applies: of members whose gradients are known by row these, some at a time, the calls that they are
    of, and whether they reach all rows · `calls` of others · those that take a step `alone`, without a gradient ·
    `counted`: calls of each member, by its first table."""

    by_row: list[tuple[Member, Iterator[list[TableRows]], Collected, bool]]
    calls: Collected
    alone: list[Member]
    counted: Counter[int]


class PendingGradients:
    """What tables that share caches have collected since their last steps. Tables are known by their numbers among
    these. `there`: those that have a gradient, if of zeros, as after a step · `whole`: of tables whose gradient reaches
    all rows, beside what calls say · `has_hooks`: whether any table has hooks, or has had · `copies`: see `Source`."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}  # by each of their tables
        self.has_hooks = False
        self._calls: Collected = []
        self.whole: dict[int, WholeGradient] = {}
        self._owned = OwnedGradients()  # of these tables the whole gradient, whatever the calls say
        self._applied_owned: set[int] = set()  # what is owned of these the last step has applied
        self.copies: list[weakref.ref[Known]] = []
        self.there: set[int] = set()
        # of these something was left of the step before when the first backward came, or is yet
        self._stale: set[int] = set()
        self._zeros: dict[int, torch.Tensor] = {}  # what is left by a step, float32 (2,)
        self._read: dict[int, torch.Tensor] = {}  # float32 (2,): its norm and the trace; of all tables of a member
        self._norms: dict[
            int, tuple[object, torch.Tensor]
        ] = {}  # of a member, by its first table: of what, float32 (T,)
        self._spoilt: dict[int, torch.Tensor] = {}  # by what was multiplied in before; see `spoilt`
        self._applied: dict[int, torch.Tensor] = {}  # the same of what is applied
        self._zeroed: set[int] = set()  # by hand, of calls that are collected
        self._gradients: dict[int, TableGradient] = {}
        self._lock = threading.RLock()  # several threads may train tables of their own
        self._epoch = 0  # how often gradients have become others, so that norms of before are no longer theirs
        self._has_warned = self._has_warned_of_zeros = False
        self._table_of_column: dict[tuple[int, torch.device], torch.Tensor] = {}  # of a member, by its first table

    def join(
        self, tables: TableSet, parameters: Sequence[Parameter], owner: Owner, over_ranks: OverRanks | None = None
    ) -> None:
        """The gradients of `tables`, those of one module, come here from now on, until nobody has the tables."""
        mine, numbers = weakref.ref(self), tables.numbers

        def leave(those: object) -> None:
            pending = mine()
            if pending is not None and pending._members[numbers[0]].tables is those:
                pending._leave(numbers)

        member = Member(numbers, weakref.ref(tables, leave), parameters, owner, over_ranks)
        self._members.update(dict.fromkeys(numbers, member))
        self.has_hooks = self.has_hooks or any(each.hooks or each.post_hooks for each in parameters)

    def _leave(self, numbers: Sequence[int]) -> None:
        self.there.difference_update(numbers)
        self._stale.difference_update(numbers)
        for number in numbers:
            for known in (self._members, self.whole, self._owned, self._zeros, self._gradients, self._applied):
                known.pop(number, None)  # type: ignore[attr-defined]

    def waits(self, numbers: Sequence[int] | None = None) -> bool:
        """Whether anything of these tables waits for a step, or of any."""
        those = self._members.keys() if numbers is None else set(numbers)
        if not those.isdisjoint(self.whole) or not (those & self._owned.keys()) <= self._applied_owned:
            return True
        return any(not those.isdisjoint(call.context.tables.numbers) for call, _ in self._calls)

    def owner_of(self, number: int) -> Owner:
        """Who has the rows of a table, by its place in its module."""
        return self._members[number].owner

    def _of(self, numbers: Iterable[int]) -> list[Member]:
        """The members that have these tables, each once."""
        return [*dict.fromkeys(self._members[number] for number in numbers)]

    def _calls_of(self, member: Member) -> Collected:
        tables = member.tables()
        return [pair for pair in self._calls if pair[0].context.tables is tables]

    def _reaches(self, member: Member) -> bool:
        """Whether calls have collected gradients of its tables, or uses of whole ones."""
        return not self.whole.keys().isdisjoint(member.numbers) or bool(self._calls_of(member))

    def add(self, collected: Collected) -> None:
        """Adds the calls of a backward pass, and uses of whole tables."""
        for call, _ in collected:
            its = call.context.tables.numbers
            if len(its) > 1 and not self.there.issuperset(its) and not self.there.isdisjoint(its):
                self._check_not_dropped(self._members[its[0]])
        if self._zeroed or self._read:
            self._fold()
        come = self._through_hooks(collected) if self._owned or self.has_hooks else {}
        if self.copies:
            self._materialise_copies()
        self._epoch += 1
        for number, rows in come.items():
            self._owned.add(number, rows)
        with self._lock:
            for call, grad in collected:
                tables = call.context.tables
                self.there.update(tables.numbers)
                if not isinstance(call, WholeUse):
                    self._calls.append((call, grad))
                elif (number := tables.numbers[call.table]) not in come:
                    if number not in self.whole:
                        self.whole[number] = WholeGradient.of(tables, call.table)
                    self.whole[number].add(grad)
        self._applied_owned.difference_update(come)
        if self.has_hooks:
            for member in self._reached_by(collected):
                for each in member.parameters:
                    each.call_post_hooks()

    def _check_not_dropped(self, member: Member) -> None:
        """Some of its tables have no gradient: where others have one of theirs, more cannot be added to it."""
        if self._reaches(member) or not self._owned.keys().isdisjoint(member.numbers):
            self._refuse_dropped(member)

    def _reached_by(self, collected: Collected) -> list[Member]:
        return self._of(call.context.tables.numbers[0] for call, _ in collected)

    def _by_row(self, member: Member) -> list[GradientRows]:
        """The gradient of each of its tables that is not owned, by row."""
        found = rows_of_calls(member.here, self._calls_of(member))
        for table, number in enumerate(member.numbers):
            if number in self.whole:
                found[table] = self.whole[number].by_row(found[table].sums())
        return found

    def _through_hooks(self, collected: Collected) -> dict[int, GradientRows]:
        """What calls bring to gradients that are owned: those of tables with hooks are from here on."""
        found = {}
        for member in self._reached_by(collected):
            hooked = {table for table, each in enumerate(member.parameters) if each.hooks or each.post_hooks}
            owned = {table for table, number in enumerate(member.numbers) if number in self._owned}
            if not hooked and not owned:
                continue
            tables = member.here
            come = rows_of(tables, [pair for pair in collected if pair[0].context.tables is tables])
            for table in sorted(hooked | owned):
                found[member.numbers[table]] = member.parameters[table].through_hooks(come[table])
                _check_one_rank(member)
            before = self._by_row(member) if hooked - owned else []
            for table in hooked - owned:
                self._bound(member.numbers[table]).known.set_rows(before[table])
        return found

    def _materialise_copies(self) -> None:
        """Before the gradients become others: copies of what they are find their rows, if these can be found."""
        copies, self.copies = self.copies, []
        for each in filter(None, [copy() for copy in copies]):
            if each.own is not None:
                each.materialise()

    def _end(self, number: int) -> None:
        """The gradient of a table becomes another one. If anybody has the old one, that stays what it was."""
        if number in self._gradients and _is_kept(self._gradients, number):
            known = self._gradients.pop(number).known
            if known.is_bound:
                known.materialise()

    # --- what is found in `.grad` ------------------------------------------------------------------------------------

    def read(self, number: int) -> torch.Tensor | None:
        """The `.grad` of a table's parameter; None where it has no gradient."""
        if number not in self.there:
            return None
        if number in self._owned:
            return self._owned[number]
        known = self._gradients.get(number)
        return self._bound(number) if known is None else known

    def move(self, numbers: Sequence[int]) -> None:
        """Follows tables to another device."""
        for number in numbers:
            self._gradients.pop(number, None)
            self._zeros.pop(number, None)

    def _config(self, number: int) -> tuple[TableConfig, torch.device]:
        """Of a table, and where it is."""
        member = self._members[number]
        config = member.here.placed.now.config
        return config.tables[member.numbers.index(number)], config.device

    def _bound(self, number: int) -> TableGradient:
        """What says what is known of the gradient of a table that is not owned."""
        found = self._gradients.get(number)
        if found is None:
            config, device = self._config(number)
            shape = config.num_embeddings, config.embedding_dim
            found = self._gradients[number] = TableGradient(shape, device, Known(self, number))
        return found

    def write(self, number: int, value: torch.Tensor | None) -> None:
        """Replaces it; None drops the table's gradient. Raises `InvalidInputError` for what is no gradient of it."""
        if value is None:
            its = self._members[number].numbers
            self._stale.difference_update(its)
            if number in self._gradients and (
                getrefcount(self._gradients[number]) > _ALONE or getrefcount(self._gradients[number].known) > _ALONE
            ):
                self._end(number)
            self._owned.pop(number, None)
            self.there.discard(number)
            if (self._calls or self.whole or self.copies) and self.there.isdisjoint(its):
                self._drop(its)
            return
        self._check_assigned(number, value)
        if not isinstance(value, TableGradient):
            self._take(number, value, GradientRows.of(value, value.shape, self._config(number)[1]))
            return
        known = value.known
        if known.is_of(self, number) and number in self.there and number not in self._owned:
            if known.own is not None:  # a multiple of what it is
                now = self._values(number)
                self._replace_bound(number, value, now)
                now.copy_(known.own)
                known.own = None
        elif known.is_bound:
            self._take(number, of_rows(rows := known.rows()), rows)  # that of another table
        elif value is not self._owned.get(number):
            rows = known.rows()
            known.become(rows)
            self._take(number, value, rows)

    def _check_assigned(self, number: int, value: object) -> None:
        (config, device), member = self._config(number), self._members[number]
        shape = config.num_embeddings, config.embedding_dim
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if (not isinstance(value, TableGradient) and not is_plain) or tuple(value.shape) != shape:  # type: ignore[attr-defined]
            raise InvalidInputError(
                f"the gradient of a table of shape {shape} can be replaced by a tensor of that shape, or by None; got "
                f"{shown(value)}"
            )
        allowed = {torch.float32, member.here.weight_dtype(member.numbers.index(number))}
        if value.dtype not in allowed or value.device != device:  # type: ignore[attr-defined]
            raise InvalidInputError(
                f"the gradient of a table is float32, or of the dtype of its rows, on {device}; got "
                f"{shown(value)} on {value.device}"  # type: ignore[attr-defined]
            )

    def _replace_bound(self, number: int, value: TableGradient, now: torch.Tensor) -> None:
        """`value`, which is known by numbers, is the gradient from here on. Who has the old one has a copy."""
        if number in self._gradients and _is_kept(self._gradients, number):
            kept = self._gradients[number].known
            kept.own = now.clone()
            self.copies.append(weakref.ref(kept))
        self._gradients[number] = value

    def take(self, number: int, known: Known, rows: GradientRows) -> None:
        """See `Source`."""
        bound = self._gradients.get(number)
        if bound is None or bound.known is not known:
            bound = TableGradient((rows.count, rows.values.shape[1]), rows.values.device, known)
        self._take(number, bound, rows)

    def _take(self, number: int, value: torch.Tensor, rows: GradientRows) -> None:
        """`value`, which is `rows`, is the gradient of a table from here on."""
        _check_one_rank(self._members[number])
        if self.copies:
            self._materialise_copies()
        if self._gradients.get(number) is value:
            del self._gradients[number]
        else:
            self._end(number)
        if number in self._read:
            self._read[number].copy_(self._read[number].new_tensor([0.0, TRACE]))
        self._epoch += 1
        self._owned[number] = value
        self._applied_owned.discard(number)
        self.whole.pop(number, None)
        self.there.add(number)

    def rows(self, number: int, values: torch.Tensor | None = None) -> GradientRows:
        """See `Source`."""
        member = self._members[number]
        _check_one_rank(member)
        numbers = self.values(number) if values is None else values
        rows = rows_of_calls(member.here, self._calls_of(member))[member.numbers.index(number)]
        if number in self.whole:
            rows = self.whole[number].by_row(rows.sums())
        with torch.no_grad():
            scaled = (rows.values * (numbers[1] / TRACE)).masked_fill_(numbers[0] == 0, 0.0)
        return rows.with_values(scaled)

    def values(self, number: int) -> torch.Tensor:
        """See `Source`."""
        if number not in self.there:
            raise UnsupportedError("this gradient of a table was dropped; read .grad of its parameter anew")
        member = self._members[number]
        if not self._reaches(member):
            if number in self._stale and not self._has_warned_of_zeros:
                self._has_warned_of_zeros = True
                warnings.warn(
                    "the gradient of a table is read after the step that has applied it, where torch would still have "
                    "it and zeros are left of it here; read it between backward() and step()",
                    stacklevel=2,
                )
            self._stale.difference_update(member.numbers)  # where somebody zeroes by hand
        return self._values(number)

    def zero(self, number: int) -> None:
        """See `Source`."""
        member = self._members[number]
        its = member.numbers
        if not self._reaches(member):
            self._stale.difference_update(its)
            for each in its:
                self._zeros.pop(each, None)
            return
        self._zeroed.add(number)
        if number in self._read:
            self._read[number].zero_()
        if self._zeroed.issuperset(self.there.intersection(its)) and self._owned.keys().isdisjoint(its):
            self._stale.difference_update(its)
            self._drop(its)  # what is collected is dropped, and zeros are left of it

    def norms(self, norm_type: float) -> torch.Tensor:
        """The norms of all tables' gradients as they are now, float32 (T,); zero for those that have none. Does not
        synchronise, but where gradients are owned or reach all rows."""
        return torch.cat([self._norms_of(member, norm_type) for member in self._of(sorted(self._members))])

    def norm(self, number: int, norm_type: float) -> torch.Tensor:
        """See `Source`."""
        member = self._members[number]
        return self._norms_of(member, norm_type)[member.numbers.index(number)]

    def _norms_of(self, member: Member, norm_type: float) -> torch.Tensor:
        its = member.numbers
        if not self._reaches(member) and self._owned.keys().isdisjoint(its):
            return torch.zeros(len(its), device=member.here.config.device)
        self._fold()
        now = norm_type, self._epoch, frozenset(self.there.intersection(its))
        known = self._norms.get(its[0])
        if known is None or known[0] != now:  # computed once for all tables
            norms = self._collected_norms(member, norm_type)
            for table, number in enumerate(its):
                if number not in self.there:
                    norms[table].zero_()  # an assignment would copy the zero from the host, and wait
                elif number in self._owned:
                    norms[table].copy_(self._owned.norm(number, norm_type))
            known = self._norms[its[0]] = now, norms
        return known[1]

    def _collected_norms(self, member: Member, norm_type: float) -> torch.Tensor:
        """Those of what is not owned. Does not synchronise but where a gradient reaches all rows."""
        tables, calls = member.here, self._calls_of(member)
        if calls:
            norms = gradient_norms(tables, calls, norm_type, member.over_ranks)
        else:
            norms = torch.zeros(len(member.numbers), device=tables.config.device)
        whole = {table: self.whole[number] for table, number in enumerate(member.numbers) if number in self.whole}
        rows = sums_of_calls(tables, calls) if whole else []
        for table, its in whole.items():
            norms[table].copy_(its.norm(norm_type, rows[table]))
        return norms

    def _values(self, number: int) -> torch.Tensor:
        """The two numbers of a table's gradient, float32 (2,), which stand for it."""
        member = self._members[number]
        if not self._reaches(member):
            if number not in self._zeros:
                device = member.here.placed.now.config.device
                with torch.no_grad(), outside_capture(device) if device.type == "cuda" else contextlib.nullcontext():
                    values = _apart(torch.zeros((len(member.numbers), 2), device=device))
                self._zeros.update(zip(member.numbers, values, strict=True))
            return self._zeros[number]
        if number not in self._read:
            with torch.no_grad():
                norms = self._collected_norms(member, 2.0)
                values = _apart(torch.stack([norms, torch.full_like(norms, TRACE)], 1))
            for each, its in zip(member.numbers, values, strict=True):
                self._read[each] = its
                if each in self._zeroed:
                    its.zero_()
        return self._read[number]

    # --- factors ----------------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        """Multiplies what others have multiplied gradients by into them. Does not synchronise."""
        for number in self._zeroed:
            self._values(number)
        if not self._read:
            return
        if self.copies:
            self._materialise_copies()
        self._epoch += 1
        for member in self._of(self._read):
            self._fold_in(member)
        self._read, self._zeroed = {}, set()

    def _fold_in(self, member: Member) -> None:
        its, tables = member.numbers, member.here
        with torch.no_grad():
            values = torch.stack([self._read[number] for number in its])
            if values.device.type == "cpu" and not bool((values[:, 1] != TRACE).any()):
                return
            factors, zeroed = values[:, 1] / TRACE, values[:, 0] == 0
            # where the norm is zero now nothing is left of the gradient, infinities included
            with self._lock:
                for at, (call, grad) in enumerate(self._calls):
                    if call.context.tables is tables:
                        is_wide = tables.config.pooled
                        of = self._columns(member, values.device) if is_wide else call.tables_of_rows()[:, None]
                        self._calls[at] = call, (grad * factors[of]).masked_fill_(zeroed[of], 0.0)
            for table, number in enumerate(its):
                if number in self.whole:
                    self.whole[number].scale(factors[table], zeroed[table])
            self._spoilt.update(zip(its, self._spoilt_by(its, factors, zeroed), strict=True))

    def _spoilt_by(self, numbers: Sequence[int], factors: torch.Tensor, zeroed: torch.Tensor) -> torch.Tensor:
        spoilt = factors * 0.0
        if numbers[0] in self._spoilt:
            spoilt += torch.stack([self._spoilt[number] for number in numbers])
        return spoilt.masked_fill_(zeroed, 0.0)

    def applied(self, numbers: Sequence[int]) -> torch.Tensor | None:
        """Of what the last step has applied of these tables, those of one module, float32 (T,): NaN for a table whose
        gradient others have multiplied by what is not finite, else 0; or None. As zeros times such a factor are NaN, no
        row of the table is a number after a step, in torch. Does not synchronise."""
        if numbers[0] not in self._applied:
            return None
        return torch.stack([self._applied[number] for number in numbers])

    def spoilt(self, numbers: Sequence[int]) -> torch.Tensor | None:
        """The same of what waits for a step."""
        if numbers[0] in self._read:
            with torch.no_grad():
                values = torch.stack([self._read[number] for number in numbers])
                return self._spoilt_by(numbers, values[:, 1], values[:, 0] == 0)
        if numbers[0] not in self._spoilt:
            return None
        return torch.stack([self._spoilt[number] for number in numbers])

    def _columns(self, member: Member, device: torch.device) -> torch.Tensor:
        """The table of each column of the outputs, int64 (ΣD,). Kept: a capture could not bring it to a GPU."""
        key = member.numbers[0], device
        if key not in self._table_of_column:
            config = member.here.config
            tables = torch.tensor([feature.table for feature in features_of(config.tables)], device="cpu")
            widths = torch.tensor([table.embedding_dim for table in config.tables], device="cpu")
            self._table_of_column[key] = torch.repeat_interleave(tables, widths[tables]).to(device)
        return self._table_of_column[key]

    def check(self, numbers: set[int]) -> bool:
        """Raises `BackwardError` where some tables of a module have lost their gradient and others not. Warns where
        torch would have added to the gradient of the step before. `numbers`: those whose gradients are to be applied,
        of modules. Returns whether any may be `spoilt`."""
        if not self.there.issuperset(numbers):
            for member in self._of(sorted(numbers)):
                if not self.there.issuperset(member.numbers):
                    self._refuse_dropped(member)
        for number, whole in self.whole.items():
            if number in numbers:
                whole.check()
        if len(self._calls) > 1:
            self._check_sizes(numbers)
        if not self._has_warned and not self._stale.isdisjoint(numbers):
            self._has_warned = True
            warnings.warn(
                "no zero_grad() came between two steps: torch would go on with the gradient of the step before, and "
                "tables do not; call optimizer.zero_grad() in each step",
                stacklevel=9,  # where step() is called
            )
        return bool(self._read or self._spoilt)

    def _check_sizes(self, numbers: set[int]) -> None:
        """Raises `InvalidInputError` for calls that are too large for one update; one alone was checked when it
        came."""
        if self._calls[0][0].context.tables.config.device.type != "cuda":
            return
        from tieredemb.step.device_update import check_bags

        of_tables: dict[TableSet, list[Call]] = {}
        for call, _ in self._calls:
            of_tables.setdefault(call.context.tables, []).append(call)
        for tables, calls in of_tables.items():
            if len(calls) > 1 and not numbers.isdisjoint(tables.numbers):
                check_bags(tables, calls)

    def _refuse_dropped(self, member: Member) -> None:
        tables = member.here.config.tables
        lost = [tables[table].name for table, number in enumerate(member.numbers) if number not in self.there]
        raise BackwardError(
            f"the gradients of some tables of one module were set to None and others not "
            f"({', '.join(map(repr, lost))}); tables of one module step together: zero all of them, or give them "
            f"modules of their own"
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    @staticmethod
    def apply(those: Mapping[PendingGradients, set[int]]) -> dict[PendingGradients, Counter[int]]:
        """Applies what is collected of some tables, all of some modules, as one update; of modules of which nothing is,
        a step without a gradient. `those`: their numbers. Returns how many calls it has applied of each module, by its
        first table. Interrupted before that has begun, it is dropped."""
        taken = {pending: pending._taken_for(numbers) for pending, numbers in those.items()}
        calls = Collected()
        for its in taken.values():
            for member, rounds, of_member, reaches_all in its.by_row:
                member.owner.update_rows(rounds, [call for call, _ in of_member], reaches_all=reaches_all)
            calls += its.calls
        if calls:
            pending, numbers = next(iter(those.items()))
            pending._members[next(iter(numbers))].owner.update(in_forward_order(calls))
        for its in taken.values():
            for member in its.alone:
                member.owner.step_alone()
        return {pending: its.counted for pending, its in taken.items()}

    def _taken_for(self, numbers: set[int]) -> _Taken:
        """What a step of these tables is to apply, which waits here no longer."""
        if self._zeroed or self._read:
            self._fold()
        for number in numbers:
            if number in self._gradients and (
                getrefcount(self._gradients[number]) > _ALONE or getrefcount(self._gradients[number].known) > _ALONE
            ):
                self._end(number)
        members, by_row = list[Member](), list[tuple[Member, Iterator[list[TableRows]], Collected, bool]]()
        if not self.whole.keys().isdisjoint(numbers) or not self._owned.keys().isdisjoint(numbers):
            its = self.whole.keys() | self._owned.keys()
            members = [member for member in self._of(sorted(numbers)) if not its.isdisjoint(member.numbers)]
        for member in members:
            reaches_all = not self.whole.keys().isdisjoint(member.numbers)
            by_row.append((member, self._rounds(member), self._calls_of(member), reaches_all))
        self._note_applied(numbers)
        calls = self._taken(numbers)
        counted = Counter([call.context.tables.numbers[0] for call, _ in calls])
        self._stale.difference_update(numbers)  # of a step without a gradient zeros are left, as in torch
        for call, _ in calls:
            self._stale.update(call.context.tables.numbers)
        for member, _, _, reaches_all in by_row:
            if reaches_all:
                self._stale.update(member.numbers)
        if members:
            tables = {member.tables() for member in members}
            calls = [pair for pair in calls if pair[0].context.tables not in tables]
        alone = list[Member]()
        if len(counted) + len(members) < len(numbers):
            found = self._of(sorted(numbers))
            alone = [each for each in found if each.numbers[0] not in counted and each not in members]
        return _Taken(by_row, calls, alone, counted)

    def _note_applied(self, numbers: set[int]) -> None:
        if self._owned:
            self._applied_owned |= self._owned.keys() & numbers
        for number in numbers if self._spoilt or self._applied else ():
            self._applied.pop(number, None)
            if number in self._spoilt:
                self._applied[number] = self._spoilt[number]

    def _rounds(self, member: Member) -> Iterator[list[TableRows]]:
        """The gradients of rows, some at a time. What calls have found is found now, the rest when it is asked for."""
        its, tables, calls = member.numbers, member.here, self._calls_of(member)
        whole = {table: self.whole[number] for table, number in enumerate(its) if number in self.whole}
        first = list[TableRows]()
        if len(whole) == len(its):
            sums = sums_of_calls(tables, calls)
        else:
            rows = rows_of_calls(tables, calls)
            rows = [self._owned.rows(n) if n in self._owned else rows[table] for table, n in enumerate(its)]
            first = [
                TableRows(t, each.ids, each.values) for t, each in enumerate(rows) if t not in whole and len(each.ids)
            ]
            sums = [each.sums() for each in rows]

        def found() -> Iterator[list[TableRows]]:
            if first:
                yield first
            for table, each in whole.items():
                for start, values in each.chunks(sums[table]):
                    ids = torch.arange(start, start + len(values), device=values.device)
                    yield [TableRows(table, ids, values, start)]

        return found()

    def drop(self, numbers: Sequence[int]) -> None:
        """Drops what is collected of these tables, all of some modules, and gives its rows free."""
        for number in numbers:
            self._end(number)
            self._owned.pop(number, None)
        self.there.difference_update(numbers)
        self._stale.difference_update(numbers)
        self._drop(numbers)

    def _drop(self, numbers: Sequence[int]) -> None:
        for call, _ in self._taken(set(numbers)):
            call.release()

    def _taken(self, numbers: set[int]) -> Collected:
        """The calls of these tables, which wait here no longer."""
        if self.copies:
            self._materialise_copies()
        self._epoch += 1
        with self._lock:
            if self.there <= numbers:
                calls, self._calls = self._calls, []
            else:
                calls, others = Collected(), Collected()
                for pair in self._calls:
                    (others if numbers.isdisjoint(pair[0].context.tables.numbers) else calls).append(pair)
                self._calls = others
        if self.whole or self._read or self._norms or self._spoilt or self._zeroed:
            for number in numbers:
                for known in (self.whole, self._read, self._norms, self._spoilt):
                    known.pop(number, None)  # type: ignore[attr-defined]
            self._zeroed -= numbers
        return calls


def _check_one_rank(member: Member) -> None:
    """Raises `UnsupportedError` where gradients lie on several ranks."""
    if member.over_ranks is not None:
        raise UnsupportedError(
            "the gradient of a sharded table lies on several ranks, and this operation needs its elements; it can "
            "be multiplied by a number, and clipped by a norm"
        )


def _is_kept(gradients: dict[int, TableGradient], table: int) -> bool:
    """Whether anybody else has one of them, or a view of it. What runs in each step tests it without a call."""
    return getrefcount(gradients[table]) > _ALONE or getrefcount(gradients[table].known) > _ALONE


_A_GRADIENT = {0: TableGradient((1, 1), torch.device("cpu"), Known())}
_ALONE = getrefcount(_A_GRADIENT[0])  # references that are counted of what nobody else has


def _apart(values: torch.Tensor) -> list[torch.Tensor]:
    """The rows of `values`, in its memory, and yet no views, which have no `detach_()`."""
    return [each.data for each in values.unbind()]
