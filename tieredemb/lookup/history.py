"""The history of steps of a dense optimizer, which changes every row: a row takes missed steps when it is next used.

A row has the step that it last caught up to (`last`, its state's last word). A step in which it has no gradient depends
only on the row and on the step's numbers, so it can be taken later: replayed, as an update with a gradient of zero,
from what each step records; or all missed steps at once, if there is a closed form.

The closed form is that of a first moment m which falls by a factor a step, and of a second moment v likewise. From step
s to t the weight moves by

    w ← w · Π decay_j − m · Σ_j weight_j · Π first · Π decay / (√v · c_j + eps),      c_j = point_j · Π root_second

with the products over the steps after s (and, of decays in the sum, after j): scalars of (s, t), the same for all rows.
A sum over 1/(√v · c_j + eps) is that of its Taylor series about the weighted mean of the c_j, whose central moments are
such scalars, too. They are updated once a step for each s whose sum still grows: its terms fall by β1/√β2 a step,
until they are negligible. The series is used where its first term left out is below 1e-7, else the steps
are replayed, as far as the terms count: in the first few hundred steps of a table, where the corrections of the bias of
the moments change quickly, and for betas whose terms differ much. If moves do not depend on v (a point of 0), the sum
consists of weights and products alone, and v falls separately.

A row whose state is zeros, as before its first gradient, changes only by decays: their product suffices.

A step whose gradients were multiplied by NaN records NaN as its numbers, as torch's zero gradients become NaN then.

Steps whose decay is part of the gradient have no closed form: a row first takes them one by one, up to the last of them
(`replayed_until`), and then the rest in closed form. Taken one by one, steps round the same in several parts, so
float32 rows that are read stay at that last step: in their slots, and in cold storage, by kernels that write a row as a
whole, so that an interrupt leaves whole rows. The closed form is computed for the reader alone, because it rounds
differently in two parts; for rows of 16 bits all steps are. On a GPU a kernel does the same before rows are read
(`rows_keep_replayed`); if a row is read several times, the first reader to change its step writes it.

A step records about 100 bytes, for all rows. On a GPU a kernel does so after each update, also inside graphs. Files and
checkpoints contain rows unchanged, and the history (`histories`); a state dict contains rows at the current step, in
torch's form, and in addition the rows that lag.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tieredemb.config import Array, OptimizerConfig, StepTerms
from tieredemb.kernels.constants import ENTRY, LOGS, SUM_IS_SERIES, SUMS, TERMS, WINDOW

_FIRST_CAPACITY = 1024  # steps
_ARRAYS = ("rates", "numbers", "sums", "ends", "logs", "coupled")  # by step
_SHARED = (*_ARRAYS, "windows", "first", "steps", "base", "sharers")


class CopiedRows(NamedTuple):
    """Copies of rows, which catch up in place of the rows: weight carrier (K, D), state uint32 (K, S), and dirty marks
    uint8 (K,), not used."""

    weight: Array
    state: Array
    dirty: Array


class DenseStep(NamedTuple):
    """A step of a dense optimizer, as rows that missed it need it; see `History.append`."""

    step: int
    rate: float
    numbers: tuple[float, ...]
    terms: StepTerms


class History:
    """The steps of one table, or of tables that take all steps as one, from 1. `steps`: how many were taken · `base`:
    the earliest that a row may be at · `count_of_numbers`: N below · `sharers`: histories with the same arrays, of
    tables with separate but equal steps.

    Arrays by step less `base`, with a larger capacity: `rates`, float32 (·), and `numbers`, float32 (·, N), by which
    rows that missed the step replay it · `sums`, float32 (·, `SUMS`): total, mean point and moments of
    the moves since a step, whether they may be used, and eps · `ends`, int32: the step after which the sum grows no
    more, 0 while it does, and −1 where it never ends · `logs`, float64 (·, `LOGS`): sums of logarithms of the factors ·
    `coupled`, int32: how many steps had no closed form.
    """

    rates: Array
    numbers: Array
    sums: Array
    ends: Array
    logs: Array
    coupled: Array

    def __init__(self, recipe: type[OptimizerConfig], numbers: int) -> None:
        self.recipe = recipe
        self.count_of_numbers = numbers
        self.steps = self.base = 0
        self.replayed = 0  # steps that rows were made to take one by one
        self.first = [0, 0]  # the first step whose sum grows: after even steps, and after odd ones
        self.windows = np.zeros((2, WINDOW, ENTRY))  # as well: a step that is interrupted is taken again
        self._make(_FIRST_CAPACITY)
        self.sharers = weakref.WeakSet([self])

    def share(self, other: History) -> None:
        """Has the arrays of another one, which has taken the same steps."""
        before = self.sharers
        other.sharers.add(self)  # first: a sharer with other arrays does no harm
        self.__dict__.update({name: other.__dict__[name] for name in _SHARED})
        if before is not self.sharers:
            before.discard(self)

    def _leave(self) -> None:
        """Called once it has arrays of its own."""
        before, self.sharers = self.sharers, weakref.WeakSet([self])
        before.discard(self)

    def part(self) -> None:
        """Copies the arrays, if they are shared."""
        if len(self.sharers) > 1:
            self.windows, self.first = self.windows.copy(), [*self.first]
            self._make(len(self.rates), self.arrays())
            self._leave()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "sharers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.sharers = weakref.WeakSet([self])

    def _make(self, capacity: int, old: Mapping[str, Array] | None = None) -> None:
        """Makes new arrays with this capacity, beginning with the entries of `old` ones. All are replaced in one step,
        as after an interrupt kernels write to them."""
        made: dict[str, Array] = {
            "rates": np.zeros(capacity, np.float32),
            "numbers": np.zeros((capacity, self.count_of_numbers), np.float32),
            "sums": np.zeros((capacity, SUMS), np.float32),
            "ends": np.zeros(capacity, np.int32),
            "logs": np.zeros((capacity, LOGS)),
            "coupled": np.zeros(capacity, np.int32),
        }
        made["sums"][:, SUM_IS_SERIES] = 1.0
        for name, array in (old or {}).items():
            made[name][: len(array)] = array
        self.__dict__.update(made)

    def append(
        self,
        step: int,
        rate: float,
        numbers: Sequence[float],
        terms: StepTerms,
        *,
        others: Sequence[History] = (),
    ) -> None:
        """Records `step`, the next one: its rate, the `numbers` by which rows replay it, and its terms. A step that it
        already has is ignored. `others`: sharers of its arrays that take the step, too, and continue to share; the
        rest do not."""
        if step > self.steps:
            if len(self.sharers) > len(others) + 1:
                self.part()
            self._append(step, rate, numbers, terms)
        for each in others:
            each.share(self)

    def _append(self, step: int, rate: float, numbers: Sequence[float], terms: StepTerms) -> None:
        if step != self.steps + 1:
            raise ValueError(f"step {step} does not follow step {self.steps}")
        at = step - self.base
        if at == len(self.rates):
            self._grow()
        self.rates[at], self.numbers[at] = rate, numbers
        kernel, given = self.append_call(terms, at)
        self.first[at % 2] = kernel(*given)
        self.steps = step

    def append_call(self, terms: StepTerms, at: int = 1) -> tuple[Any, tuple[Any, ...]]:
        """The kernel that appends a step, and its arguments."""
        from tieredemb.lookup.history_cpu import step_append

        before, after = (at - 1) % 2, at % 2
        return step_append, (
            at, np.array(terms, np.float64), self.first[before], self.windows[before], self.windows[after],
            self.sums, self.ends, self.logs, self.coupled,
        )  # fmt: skip

    def _grow(self) -> None:
        self._make(2 * len(self.rates), self.arrays())

    def restart(self, step: int) -> None:
        """Forgets all steps: every row stands at `step`."""
        self.steps = self.base = step
        self.first = [0, 0]
        self.windows = np.zeros((2, WINDOW, ENTRY))
        self._make(_FIRST_CAPACITY)
        self._leave()

    def load(self, arrays: Mapping[str, Array], windows: Array, *, base: int, steps: int, first: Sequence[int]) -> None:
        """Takes over what `arrays()` and the attributes of another history were: `steps` − `base` + 1 entries."""
        taken = steps - base + 1
        self._make(max(_FIRST_CAPACITY, 2 * taken))
        self._leave()
        for name, array in arrays.items():
            getattr(self, name)[:taken] = array[:taken]
        self.windows = np.array(windows)
        self.base, self.steps, self.first = base, steps, list(first)

    def take(self, other: History) -> None:
        """Takes over all that another history of the same optimizer knows."""
        taken = other.steps - other.base + 1
        arrays = {name: array[:taken] for name, array in other.arrays().items()}
        self.load(arrays, other.windows, base=other.base, steps=other.steps, first=other.first)

    @property
    def replayed_until(self) -> int:
        """The last step that rows have to take one by one, as its decay is part of the gradient: float32 rows that
        catch up to it get the same later results. `base` if there is none."""
        taken = self.coupled[: self.steps - self.base + 1]
        return self.base + int(np.searchsorted(taken, taken[-1]))

    def past(self, until: int | None = None) -> tuple[Array | int, ...]:
        """The history as kernels take it. `until`: the step that rows catch up to, by default the last one."""
        stop = self.steps if until is None else until
        return stop, self.base, self.rates, self.numbers, self.sums, self.ends, self.logs, self.coupled

    def is_as(self, other: History) -> bool:
        """Whether it has taken the same steps as another one."""
        if self.rates is other.rates:
            return self.steps == other.steps
        if (self.steps, self.base, self.first) != (other.steps, other.base, other.first):
            return False
        taken = self.steps - self.base + 1
        pairs = [(self.windows, other.windows)]
        pairs += [(getattr(self, name)[:taken], getattr(other, name)[:taken]) for name in _ARRAYS]
        return all(np.array_equal(one.view(np.uint8), two.view(np.uint8)) for one, two in pairs)

    def arrays(self) -> dict[str, Array]:
        """All arrays by step."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def size_bytes(self) -> int:
        return self.windows.nbytes + sum(array.nbytes for array in self.arrays().values())


assert len(StepTerms._fields) == TERMS
