"""Programs of ranks, run by any number of them and by one process, which trains the batches of all ranks as one, with
all rows resident and nothing planned ahead: ranks have its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from sharding.ranks import joined, parted
from torch import Tensor

import tieredemb as te
from golden import run
from golden.digests import bytes_of
from golden.draws import Batch, Draws, Inputs, tables_of
from golden.programs import ONE, Program

Split = Callable[[Tensor], list[Tensor]]  # of what a process has, the part of each rank


class JoinedDraws(Draws):
    """The numbers of all `ranks` of a program, as one process has them."""

    def __init__(self, program: Program, tables: list[te.TableConfig], ranks: int) -> None:
        super().__init__(program, tables)
        self.of_ranks = [Draws(program, tables, rank) for rank in range(ranks)]

    def batch(self, step: int) -> Batch:
        return [[self._join(forwards) for forwards in part] for part in self.batches(step)]

    def batches(self, step: int) -> list[list[tuple[Inputs, ...]]]:
        """Of each part of a step and each forward there, the inputs of every rank."""
        each = [draws.batch(step) for draws in self.of_ranks]
        return [[*zip(*parts, strict=True)] for parts in zip(*each, strict=True)]

    def _join(self, of_ranks: Sequence[Inputs]) -> Inputs:
        ids, offsets, weights, upstream = joined(self.tables, [_plain(each) for each in of_ranks])
        return Inputs(None, [ids], [offsets], [None if of_ranks[0].weights[0] is None else weights], [upstream])

    def rows_split(self, of_ranks: Sequence[Inputs]) -> Split:
        """Of the outputs of a forward."""
        return lambda out: [*out.split([len(each.upstream[0]) for each in of_ranks])]

    def weights_split(self, of_ranks: Sequence[Inputs]) -> Split:
        """Of the gradients of its weights."""
        return lambda grad: parted(self.tables, [_plain(each) for each in of_ranks], grad)

    def splits(self) -> Iterator[Split]:
        """Of each output of the program, in their order."""
        for step in range(run.STEPS):
            if step in self._evaluated:
                yield self.rows_split(self.batches(100 + step)[0][0])
            for part in self.batches(step):
                if self.program.weights == "with gradient":
                    yield from map(self.weights_split, part)
                yield from map(self.rows_split, part)
        if self._evaluated:
            yield self.rows_split(self.batches(100 + self._evaluated[0])[0][0])

    @property
    def _evaluated(self) -> Sequence[int]:
        return () if self.program.evaluation == "none" else run.EVALUATED_AT


def _plain(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, offsets, weights and gradients of a forward."""
    ids, offsets, weights, upstream = (each[0] for each in inputs[1:])
    return ids, offsets, torch.zeros(len(ids)) if weights is None else weights, upstream


def differences(ranks: int, program: Program, directory: Path, world: Callable[[int], Any]) -> dict[str, str]:
    """What of a program, run by so many ranks, has not the bits of one process: by its name, "differs"."""
    alone = replace(
        program, face="collection", capacity="all", tier="file", prefetch="0", ranks=ONE, sharding=ONE, max_ids=ONE
    )
    draws = JoinedDraws(program, tables_of(program), ranks)
    (directory / "alone").mkdir()
    one = run.train(alone, directory / "alone", draws)
    left = world(ranks).run(run.train_on_rank, asdict(program), str(directory))
    found = [name for name in ("rows", "state") if bytes_of(getattr(left[0], name)) != bytes_of(getattr(one, name))]
    for number, (split, whole) in enumerate(zip(draws.splits(), one.outputs, strict=True)):
        for rank, part in enumerate(split(whole)):
            if bytes_of(left[rank].outputs[number]) != bytes_of(part):
                found.append(f"output {number} of rank {rank}")
    return dict.fromkeys(found, "differs")
