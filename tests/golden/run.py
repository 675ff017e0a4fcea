"""Runs a program: trains its model, saves and loads it, and hashes what is left.

Numbers are drawn, gradients too, and no matrices are multiplied: the bits do not depend on a processor's vector units.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tieredemb as te
from golden.digests import Saved, bytes_of, digest, loss_of, without
from golden.draws import DTYPES, Batch, Draws, tables_of
from golden.models import MOST_IDS, Trained
from golden.programs import Program

STEPS, RESUMED_AT, INTERRUPTED_AT = 8, 4, 5
EVALUATED_AT = (2, 6)


@dataclass
class Left:
    """What a program has left, on one rank."""

    outputs: list[Tensor]
    losses: list[float]
    rows: dict[str, Tensor]
    state: list[Any]


class InterruptedStepError(Exception):
    """What a program is interrupted by."""


def train(program: Program, directory: Path, draws: Draws) -> Left:
    """Runs it in this process with the numbers of `draws`; its last checkpoint is in `directory`."""
    trained = Trained(program, directory, resumed=False)
    outputs, losses, step = list[Tensor](), list[float](), 0
    ends = [RESUMED_AT, STEPS] if program.resume != "none" else [STEPS]
    for end in ends:
        if step:
            te.save_checkpoint(trained.model, directory / "between", optimizer=trained.dense)
            te.close(trained.model)
            trained = Trained(program, directory, resumed=True)
            te.load_checkpoint(trained.model, directory / "between", optimizer=trained.dense)
        run = trained.step
        if program.step == "captured":
            run = te.graph_step(trained.step, max_ids=MOST_IDS if program.sizes_vary else None)
        while step < end:
            try:
                for batch in _loop(program, trained, [draws.batch(number) for number in range(step, end)], step):
                    trained.set_rates(draws.rates(step))
                    outputs += _evaluated(trained, draws, step)
                    found = run(batch) if program.step == "captured" else run(batch, _amid(program, step))
                    outputs += [each.clone() for each in found]
                    losses += _losses(batch, found, program)
                    step += 1
            except InterruptedStepError:
                step += 1
    outputs += _evaluated(trained, draws, EVALUATED_AT[0])
    left = Left(outputs, losses, dict(trained.model.state_dict()), trained.state())
    te.save_checkpoint(trained.model, directory / "last", optimizer=trained.dense)
    te.close(trained.model)
    return left


def _loop(program: Program, trained: Trained, batches: list[Batch], step: int) -> Iterator[Batch]:
    def loader() -> Iterator[Batch]:
        for number, batch in enumerate(batches, step):
            if program.interrupt == "in the loader" and number == INTERRUPTED_AT and step < INTERRUPTED_AT:
                raise InterruptedStepError
            yield batch

    depth, told = int(program.prefetch), None
    if program.face == "ranks":  # whose first batch may have no ids, of which nothing can be learned
        told = _looked_up
    return iter(te.prefetch(loader(), trained.model, depth, ids_of=told)) if depth else loader()


def _looked_up(batch: Batch) -> list[tuple[Tensor, Tensor | None]]:
    return [(inputs.ids[0], inputs.offsets[0]) for forwards in batch for inputs in forwards]


def _amid(program: Program, step: int) -> Callable[[], None]:
    def amid() -> None:
        if program.interrupt == "amid a step" and step == INTERRUPTED_AT:
            raise InterruptedStepError

    return amid


def _evaluated(trained: Trained, draws: Draws, step: int) -> list[Tensor]:
    if draws.program.evaluation == "none" or step not in EVALUATED_AT:
        return []
    (first, *_), *_ = draws.batch(100 + step)
    with torch.no_grad():
        return [each.clone() for each in trained.look_up(first)]


def _losses(batch: Batch, found: list[Tensor], program: Program) -> list[float]:
    """The gradients of weights stand before the outputs of their part."""
    upstream = [each for part in batch for inputs in part for each in inputs.upstream]
    outs = [each for each in found if each.dim() > 1] if program.weights == "with gradient" else found
    return [loss_of(out, grad) for out, grad in zip(outs, upstream, strict=True)]


def run(program: Program, directory: Path, world: Callable[[int], Any]) -> dict[str, str]:
    """The digests of each section. `world`: of so many ranks, for programs of several."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan that no forward took, a captured step over a CPU
        if program.face != "ranks":
            left = [train(program, directory, Draws(program, tables_of(program)))]
            saved = Saved(directory / "last")
        else:
            left = world(int(program.ranks)).run(train_on_rank, asdict(program), str(directory))
            saved = Saved(_gathered(program, directory))
    sections = {
        "outputs": [bytes_of(each.outputs) for each in left],
        "losses": [bytes_of(each.losses) for each in left],
        "rows": [bytes_of(left[0].rows)],
        "state": [bytes_of(left[0].state)],
        "scores": [bytes_of(saved.scores)],
        "manifest": [bytes_of(saved.manifest)],
    }
    if program.scores_are_timed:
        del sections["scores"]
        sections["manifest"] = [bytes_of(without(saved.manifest, "batch"))]
    return {name: digest(values) for name, values in sections.items()}


def train_on_rank(rank: int, size: int, program: dict[str, Any], directory: str) -> Left:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        its = Program(**program)
        return train(its, Path(directory), Draws(its, tables_of(its), rank))


def _gathered(program: Program, directory: Path) -> Path:
    """The last checkpoint of ranks, as one process saves it: how rows lie over ranks is no part of the bits."""
    keywords = {"capacity": 1.0, "dtype": DTYPES[program.rows.split()[0]]}
    model = te.TieredEmbeddingBagCollection(tables_of(program), **keywords)
    te.load_checkpoint(model, directory / "last")
    te.save_checkpoint(model, directory / "gathered")
    model.close()
    return directory / "gathered"
