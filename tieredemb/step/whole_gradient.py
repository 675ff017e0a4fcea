"""The gradient of a table that a loss has used as a whole, which reaches every row.

It is a sum of terms, one for each use, and is computed chunk by chunk: for a product of all rows with a matrix, or a
sum over all elements, never more than a chunk is in memory. A term may also be the complete gradient, as in torch.
Reading, norms and the update split a table into the same chunks (`spans`).
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tieredemb.errors import BackwardError
from tieredemb.lookup.bags import MAX_BAGS
from tieredemb.step.gradient_rows import GradientRows, RowSums, rows_of_calls
from tieredemb.step.program import NUMBERS, CallContext, Collected, inside_backward
from tieredemb.tables.followed_optimizer import FollowedOptimizer
from tieredemb.tables.table_set import TableSet

# bytes of float32 rows: a CPU's cache holds them; on a GPU few chunks, as the host launches each, but smaller ones if
# rows pass through the host, which needs buffers for a chunk on either side
CPU_BYTES, GPU_BYTES, STAGED_BYTES = 1 << 22, 1 << 28, 1 << 26
MOST_ROWS = 1 << 21  # a chunk takes some 50 bytes a row in addition to its elements


def chunk_rows(tables: TableSet, table: int) -> int:
    """How many rows of a table are read, or updated, at a time."""
    size = CPU_BYTES
    if tables.config.device.type == "cuda":
        size = GPU_BYTES if tables.locate(table)[0].cache.cold.device_readable else STAGED_BYTES
    most = min(MOST_ROWS, MAX_BAGS // tables.n_features)  # on a GPU each row is a bag of some feature
    return max(1, min(size // (4 * tables.config.tables[table].embedding_dim), most))


def spans(size: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The rows `start` … `stop` − 1 of a table in chunks of `size` rows: (first, one after the last). Inner edges are
    multiples of the size, for any start."""
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


class WholeUse:
    """A use of table number `table` as a whole, as a backward pass collects it beside calls."""

    forwards = None  # see `Call`

    def __init__(self, context: CallContext, table: int) -> None:
        self.context, self.number, self.table = context, next(NUMBERS), table
        self.requested: Any = None  # see `Call`
        self.within = context.backward_pass.touch() if inside_backward() else None
        self._made_at = self._version

    @property
    def _version(self) -> tuple[int, int]:
        """Differs once the rows have changed."""
        optimizer = self.context.optimizer
        return self.context.tables.writes, optimizer.steps_taken if isinstance(optimizer, FollowedOptimizer) else 0

    def check(self) -> None:
        """Raises `BackwardError` if the rows have changed since the use."""
        if self._version != self._made_at:
            raise BackwardError(
                "the rows of a table were updated or written to after a loss has used the table as a whole, and its "
                "gradient needs them as they were; compute the loss, call backward() and step(), and write to rows "
                "before or after all three"
            )

    def release(self) -> None:
        """See `Call.release`: it locks no rows."""


class Term(abc.ABC):
    """The term of one use in the gradient of the rows `first` … `stop` − 1. `held_bytes`: of the tensors it keeps."""

    first: int
    stop: int
    held_bytes = 0

    @abc.abstractmethod
    def chunk(self, start: int, stop: int) -> torch.Tensor:
        """The term for the rows `start` … `stop` − 1, within a chunk of `spans`: float32 (K, D), in new memory."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `BackwardError` if it can no longer be computed."""


class _OfGradient(Term):
    """A term that keeps a gradient tensor of autograd itself, without a copy, so that autograd does not reuse it."""

    def __init__(self, grad: torch.Tensor) -> None:
        self._grad, self._version = grad, grad._version

    def check(self) -> None:
        if self._grad._version != self._version:
            raise BackwardError(
                "the gradient that was passed to backward() was changed in place before the optimizer's step(), and "
                "that of a whole table is made of it there; pass a clone of it to backward()"
            )


class DenseTerm(_OfGradient):
    """The gradient `grad`, (K, D), of the rows from `first` on."""

    def __init__(self, first: int, grad: torch.Tensor) -> None:
        grad = grad if grad.layout is torch.strided else grad.to_dense()
        super().__init__(grad)
        self.first, self.stop, self.held_bytes = first, first + len(grad), grad.nbytes

    def chunk(self, start: int, stop: int) -> torch.Tensor:
        some = self._grad[start - self.first : stop - self.first]
        return some.to(torch.float32).clone(memory_format=torch.contiguous_format)


class ProductTerm(_OfGradient):
    """Term of `x @ rows.T`. `grad`: (M, K), of the product with the rows from `first` on · `x`: (M, D)."""

    def __init__(self, first: int, grad: torch.Tensor, x: torch.Tensor) -> None:
        super().__init__(grad)
        self.first, self.stop, self.held_bytes = first, first + grad.shape[1], grad.nbytes + x.nbytes
        # x may be a parameter, which the step changes before the table's gradient is computed
        self._x = x.to(grad.dtype, copy=True)

    def chunk(self, start: int, stop: int) -> torch.Tensor:
        found: torch.Tensor = self._grad[:, start - self.first : stop - self.first].T @ self._x
        return found.to(torch.float32)


class _OfRows(Term):
    """A term that is computed from the rows `first` … `stop` − 1, unchanged since `use`. `read(start, stop)`: reads
    them."""

    def __init__(self, use: WholeUse, rows: tuple[int, int], read: Callable[[int, int], torch.Tensor]) -> None:
        self.first, self.stop = rows
        self._use, self._read = use, read

    def check(self) -> None:
        self._use.check()


class ReducedTerm(_OfRows):
    """Term of a number for each chunk. `of_chunk`: computes it from rows (K, D), or numbers (K, D) whose sum it is ·
    `grads`: (C,), the gradients of the numbers of all chunks."""

    def __init__(
        self,
        use: WholeUse,
        chunks: list[tuple[int, int]],
        read: Callable[[int, int], torch.Tensor],
        of_chunk: Callable[[torch.Tensor], torch.Tensor],
        grads: torch.Tensor,
    ) -> None:
        super().__init__(use, (chunks[0][0], chunks[-1][1]), read)
        self._numbers = {start: i for i, (start, _) in enumerate(chunks)}
        self._of_chunk, self._grads = of_chunk, grads.clone()

    def chunk(self, start: int, stop: int) -> torch.Tensor:
        rows = self._read(start, stop).detach()
        with _recording():
            rows.requires_grad_()
            found: torch.Tensor
            made, grad = self._of_chunk(rows), self._grads[self._numbers[start]]
            (found,) = torch.autograd.grad(made, [rows], grad.to(made.dtype).expand(made.shape))
        found = found.to(torch.float32)
        if found.is_contiguous() and found.data_ptr() != grad.data_ptr():
            return found
        return found.clone(memory_format=torch.contiguous_format)  # for a sum of the rows it is one expanded number


def are_largest(rows: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Which elements equal the infinite norm, as in torch, where NaNs do. Bool (K, D)."""
    size = rows.abs()
    return (size == norm) | size.isnan()


class NormTerm(_OfRows):
    """Term of the `norm` of an `order`, above 0 or infinite, of all elements of the rows. `grad`: of the norm · `ties`:
    for an infinite order, how many elements equal the norm; float32 ()."""

    def __init__(
        self,
        use: WholeUse,
        rows: tuple[int, int],
        read: Callable[[int, int], torch.Tensor],
        order: float,
        norm: torch.Tensor,
        ties: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> None:
        super().__init__(use, rows, read)
        self._order, self._norm = order, norm
        grad = grad.to(torch.float32)
        if ties is not None:
            self._scale = grad / ties
        else:
            self._scale = (grad / norm ** (order - 1)).masked_fill(norm == 0, 0.0)

    def chunk(self, start: int, stop: int) -> torch.Tensor:
        rows, order = self._read(start, stop).detach().to(torch.float32), self._order
        if order == 2:
            return rows * self._scale
        signs = rows.sgn()
        if math.isinf(order):
            return signs * are_largest(rows, self._norm) * self._scale
        if order == 1:
            return signs * self._scale
        # for an order below 1 the gradient of a zero is zero, as in torch
        powers = rows.abs().pow_(order - 1).masked_fill_(rows == 0, 0.0)
        return signs * powers * self._scale


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Inside, gradients are recorded, even within an operation on a tensor subclass."""
    recorded = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(recorded, False), torch.enable_grad():
        yield


class WholeGradient:
    """The gradient of table number `table`, (rows, D), computed for a chunk of rows at a time."""

    def __init__(self, tables: TableSet, table: int) -> None:
        config, self._device = tables.config.tables[table], tables.config.device
        self._rows, self._width, self._chunk = config.num_embeddings, config.embedding_dim, chunk_rows(tables, table)
        self._terms: list[Term] = []
        # for each term, what its gradient was multiplied by since, and whether it was set to zero
        self._factors: list[tuple[torch.Tensor, torch.Tensor] | None] = []

    def add(self, term: Term) -> None:
        """Adds the term of a use. If the terms keep more memory than a dense gradient and the largest of them would,
        they are added up to one, so that many backwards before a step need no more memory than in torch."""
        self._terms.append(term)
        self._factors.append(None)
        held = sorted(each.held_bytes for each in self._terms)
        dense = 4 * self._rows * self._width
        if sum(held[:-1]) > dense:
            self._terms, self._factors = [DenseTerm(0, self.dense())], [None]

    def scale(self, factor: torch.Tensor, zeroed: torch.Tensor) -> None:
        """Multiplies it by a number, float32 (), or sets it to zero, bool (). Does not synchronise."""
        self._factors = [
            (factor, zeroed) if each is None else (each[0] * factor, each[1] | zeroed) for each in self._factors
        ]

    def check(self) -> None:
        """Raises `BackwardError` if it can no longer be computed."""
        for each in self._terms:
            each.check()

    def chunks(self, rows: RowSums | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """The gradient in chunks, plus the gradient `rows` of lookups: the first row, and float32 (K, D)."""
        for start, stop in spans(self._chunk, 0, self._rows):
            found = self._part(start, stop)
            if rows is not None and len(rows.ids):
                rows.add_to(found, start)
            yield start, found

    def _part(self, start: int, stop: int) -> torch.Tensor:
        found = None
        with torch.no_grad():
            for term, factor in zip(self._terms, self._factors, strict=True):
                low, high = max(start, term.first), min(stop, term.stop)
                if low >= high:
                    continue
                values = term.chunk(low, high)
                if factor is not None:
                    values = values.mul_(factor[0]).masked_fill_(factor[1], 0.0)
                if found is None and (low, high) == (start, stop):
                    found = values
                    continue
                if found is None:
                    found = self._zeros(stop - start)
                found[low - start : high - start] += values
        return self._zeros(stop - start) if found is None else found

    def _zeros(self, rows: int) -> torch.Tensor:
        return torch.zeros((rows, self._width), dtype=torch.float32, device=self._device)

    def dense(self, rows: RowSums | None = None) -> torch.Tensor:
        """The gradient as a tensor, float32 (rows, D), plus the gradient `rows` of lookups."""
        found = torch.empty((self._rows, self._width), dtype=torch.float32, device=self._device)
        for start, values in self.chunks(rows):
            found[start : start + len(values)] = values
        return found

    def by_row(self, rows: RowSums | None = None) -> GradientRows:
        """The gradient by row, for all rows, plus the gradient `rows` of lookups."""
        ids = torch.arange(self._rows, device=self._device)
        return GradientRows(ids, self.dense(rows), self._rows)

    def norm(self, order: float, rows: RowSums | None = None) -> torch.Tensor:
        """The norm of an order above 0 or infinite, float32 (), with the gradient `rows` of lookups added."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for _, values in self.chunks(rows):
            size = values.abs_().to(torch.float64)
            if math.isinf(order):
                total = torch.maximum(total, size.max())
            else:
                total += (size.square_() if order == 2.0 else size.pow_(order)).sum()
        if not math.isinf(order):
            total = total.sqrt() if order == 2.0 else total.pow(1.0 / order)
        return total.to(torch.float32)


def rows_of(tables: TableSet, collected: Collected) -> list[GradientRows]:
    """The gradient of each table by row, from calls and uses of whole tables. Waits for a GPU; see `rows_of_calls`."""
    whole: dict[int, WholeGradient] = {}
    for use, term in collected:
        if isinstance(use, WholeUse):
            whole.setdefault(use.table, WholeGradient(tables, use.table)).add(term)
    calls = [pair for pair in collected if not isinstance(pair[0], WholeUse)]
    return with_whole(rows_of_calls(tables, calls), whole)


def with_whole(found: list[GradientRows], whole: Mapping[int, WholeGradient]) -> list[GradientRows]:
    """The gradients of tables by row, plus those of `whole` tables."""
    return [whole[table].by_row(rows) if table in whole else rows for table, rows in enumerate(found)]
