"""What a program is given: tables, ids, offsets, weights and gradients, of streams that numpy keeps for all times."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import tieredemb as te
from golden.programs import Program

INFINITE_AT = 3  # the step in which a gradient is infinite, where a scaler has to skip one
WIDTHS = {"one": (8,), "two": (4, 8), "three": (4, 5, 16)}
MODES = {"sum": ("sum",), "mean": ("mean",), "max": ("max",), "all": ("sum", "mean", "max")}
ROWS = (40, 3, 200, 1, 17, 1000)
MOST_IDS = {"1 id": 1, "0 to 5 ids": 5, "0 to 200 ids": 200, "mostly empty": 12}
SAMPLES = {"1 id": 9, "0 to 5 ids": 7, "0 to 200 ids": 3, "mostly empty": 11}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Inputs(NamedTuple):
    """Of one forward. `members`: of which tables, in the order of the calls; None for all as one · `ids`, `offsets`,
    `weights`: as the face takes them · `upstream`: the gradient of each output."""

    members: list[int] | None
    ids: list[Tensor]
    offsets: list[Tensor | None]
    weights: list[Tensor | None]
    upstream: list[Tensor]


Batch = list[list[Inputs]]  # forwards of each part of a step, each of which has a backward of its own


class Draws:
    """The numbers of one program, on one of its ranks."""

    def __init__(self, program: Program, tables: list[te.TableConfig], rank: int = 0) -> None:
        self.program, self.tables, self.rank = program, tables, rank

    def batch(self, step: int) -> Batch:
        rng = np.random.RandomState(1_000_000 + 1000 * self.program.number + 10 * step + self.rank)
        calls = 2 if self.program.calls == "twice" else 1
        parts = int(self.program.accumulation)
        return [[self.forward(rng, step, part) for _ in range(calls)] for part in range(parts)]

    def forward(self, rng: np.random.RandomState, step: int, part: int) -> Inputs:
        tables, program = self.tables, self.program
        members: list[int] | None = None
        if program.face == "converted":
            members = list(range(len(tables)))
            if program.calls == "any order, some left out":
                members = [int(m) for m in rng.permutation(len(tables))][: int(rng.randint(1, len(tables) + 1))]
        elif program.face == "rows collection":
            members = list(range(len(tables)))
        chosen = [tables] if members is None else [[tables[m]] for m in members]
        samples = SAMPLES[program.bags] + (self.rank and self.rank - 2)
        found = Inputs(members, [], [], [], [])
        for its in chosen:
            self._add(found, rng, its, samples)
        if program.scaler == "one infinity" and (step, part) == (INFINITE_AT, 0) and found.upstream[0].numel():
            found.upstream[0].view(-1)[0] = torch.inf
        return found

    def _add(self, found: Inputs, rng: np.random.RandomState, tables: list[te.TableConfig], samples: int) -> None:
        of_sizes = rng if self.program.sizes_vary else np.random.RandomState(self.program.number)
        sizes = [self._sizes(of_sizes, samples) for _ in tables]
        ids = [self._ids(rng, int(n.sum()), table) for n, table in zip(sizes, tables, strict=True)]
        total = sum(map(len, ids))
        found.ids.append(on_device(np.concatenate(ids)))
        rows, width = samples, sum(table.embedding_dim for table in tables)
        if self.program.is_pooled:
            offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
            found.offsets.append(on_device(offsets))
        else:
            found.offsets.append(None)
            rows = total
        weights = None
        if self.program.weights != "none":
            weights = on_device(rng.standard_normal(total).astype(np.float32))
            if self.program.face in ("bag", "converted"):  # as torch's bags, which take those of the rows' dtype
                weights = weights.to(DTYPES[self.program.rows.split()[0]])
        found.weights.append(weights)
        upstream = rng.standard_normal((rows, width))
        if self.program.rows.startswith("float16"):
            upstream = upstream * 0.25
        found.upstream.append(on_device(upstream.astype(np.float32)))

    def _sizes(self, rng: np.random.RandomState, samples: int) -> np.ndarray[Any, Any]:
        most = MOST_IDS[self.program.bags]
        if most == 1:
            return np.ones(samples, np.int64)
        sizes = np.floor(rng.random_sample(samples) * (most + 1)).astype(np.int64)
        return sizes // most * 3 if self.program.bags == "mostly empty" else sizes

    @staticmethod
    def _ids(rng: np.random.RandomState, count: int, table: te.TableConfig) -> np.ndarray[Any, Any]:
        return np.floor(rng.random_sample(count) ** 3 * table.num_embeddings).astype(np.int64)

    def rates(self, step: int) -> float:
        """What the learning rate is multiplied by."""
        return 0.5 ** (step // 3) if self.program.schedule == "decays" else 1.0


def on_device(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.get_default_device())


def tables_of(program: Program) -> list[te.TableConfig]:
    widths, modes = WIDTHS[program.widths], MODES[program.modes]
    first = program.number % len(ROWS)
    return [
        te.TableConfig(
            name=f"t{t}",
            num_embeddings=ROWS[(first + t) % len(ROWS)],
            embedding_dim=widths[t % len(widths)],
            mode=modes[t % len(modes)],
            padding_idx=(None, 0)[t % 2],
        )
        for t in range(int(program.tables))
    ]
