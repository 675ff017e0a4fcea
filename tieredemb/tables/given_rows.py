"""Initial rows that a function gives, in place of a distribution by which a row is generated when it is first used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from tieredemb.config import InitFunction, TableConfig, TablePart
from tieredemb.errors import ConfigError
from tieredemb.kernels.inference import no_inference

CHUNK = 1 << 16  # rows that the function fills at once; the values that it draws depend on this


def rows_of_part(
    table: TableConfig, function: InitFunction, seed: int, part: TablePart
) -> Iterator[tuple[int, torch.Tensor]]:
    """Of a table that is a `part` of a larger one the rows that this starts with: the first row of each chunk, and
    float32 (K, D). See `initial_rows`."""
    padding = None if table.padding_idx is None else part.first + part.step * table.padding_idx
    whole = replace(table, num_embeddings=part.rows, padding_idx=padding)
    for start, rows in initial_rows(whole, function, seed, part.number):
        first = (part.first - start) % part.step if start > part.first else part.first - start
        own = rows[first :: part.step] if first < len(rows) else rows[:0]
        if len(own):
            yield (start + first - part.first) // part.step, own


def initial_rows(
    table: TableConfig, function: InitFunction, seed: int, number: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """All rows of a table, number `number` of its set, in chunks of `CHUNK`: the first row of each, and float32 (K, D).

    `function` fills the rows that it is given, float32 (K, D) zeros on the CPU, or returns as many new ones. It draws
    from the generator that it is given, whose seed is made of `seed`, the number of the table and that of the chunk, so
    that the rows are the same each time. What depends on the shape, as `nn.init.xavier_uniform_` does, sees
    that of a chunk. The row of `padding_idx` starts as zeros. Raises `ConfigError` for a result of another shape.

    >>> from torch import nn
    >>> table = TableConfig(name="user", num_embeddings=1000, embedding_dim=4)
    >>> ((start, rows),) = initial_rows(table, lambda rows, generator: nn.init.normal_(rows, generator=generator), 0, 0)
    >>> start, rows.shape
    (0, torch.Size([1000, 4]))
    """
    for start in range(0, table.num_embeddings, CHUNK):
        count = min(CHUNK, table.num_embeddings - start)
        named = f"{seed} {number} {start // CHUNK}".encode()
        drawn = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little") >> 1  # as manual_seed takes it
        with torch.no_grad(), no_inference():
            rows = torch.zeros((count, table.embedding_dim), dtype=torch.float32, device="cpu")
            given = function(rows, torch.Generator("cpu").manual_seed(drawn))
        if given is not None and (not isinstance(given, torch.Tensor) or given.shape != rows.shape):
            description = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
            raise ConfigError(
                f"init of table {table.name!r} returned {description} for rows of shape {tuple(rows.shape)}; fill the "
                f"rows in place, as nn.init does, or return as many"
            )
        if given is not None and given is not rows:
            rows.copy_(given.detach())
        if table.padding_idx is not None and start <= table.padding_idx < start + count:
            rows[table.padding_idx - start] = 0
        yield start, rows
