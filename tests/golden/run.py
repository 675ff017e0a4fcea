"""Runs a program: builds its model, trains it, saves and loads it, and hashes what is left.

All numbers are drawn here, gradients too, and nothing is multiplied as a matrix, so that every processor has the same.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from following import KINDS
from torch import Tensor, nn
from training import NAMES, OPTIMIZERS

import tieredemb as te
from golden.digests import Saved, bytes_of, digest, loss_of, without
from golden.programs import Program

STEPS, RESUMED_AT, INTERRUPTED_AT, INFINITE_AT = 8, 4, 5, 3
EVALUATED_AT = (2, 6)
WIDTHS = {"one": (8,), "two": (4, 8), "three": (4, 5, 16)}
MODES = {"sum": ("sum",), "mean": ("mean",), "max": ("max",), "all": ("sum", "mean", "max")}
ROWS = (40, 3, 200, 1, 17, 1000)
MOST_IDS = {"1 id": 1, "0 to 5 ids": 5, "0 to 200 ids": 200, "mostly empty": 12}
SAMPLES = {"1 id": 9, "0 to 5 ids": 7, "0 to 200 ids": 3, "mostly empty": 11}
FUSED = dict(zip(NAMES, OPTIMIZERS, strict=True))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SECTIONS = ("outputs", "losses", "rows", "state", "scores", "manifest")


class Inputs(NamedTuple):
    """Of one forward. `members`: of which tables, in the order of the calls; None for all as one · `ids`, `offsets`,
    `weights`: as the face takes them · `upstream`: the gradient of each output."""

    members: list[int] | None
    ids: list[Tensor]
    offsets: list[Tensor | None]
    weights: list[Tensor | None]
    upstream: list[Tensor]


Batch = list[list[Inputs]]  # forwards of each part of a step, each of which has a backward of its own


# --- what is drawn ----------------------------------------------------------------------------------------------------


class Draws:
    """Numbers of one program, whose streams numpy keeps for all times (`RandomState`)."""

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
        sizes = [self._sizes(rng, samples) for _ in tables]
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


# --- models -----------------------------------------------------------------------------------------------------------


class Members(nn.Module):
    """Embeddings that a conversion replaces, each called by itself."""

    def __init__(self, tables: list[te.TableConfig], dtype: torch.dtype) -> None:
        super().__init__()
        self.members = nn.ModuleList()
        for t, table in enumerate(tables):
            member = nn.EmbeddingBag(
                table.num_embeddings, table.embedding_dim, mode=table.mode, include_last_offset=True,
                padding_idx=table.padding_idx,
            )  # fmt: skip
            values = np.random.RandomState(t).standard_normal((table.num_embeddings, table.embedding_dim))
            with torch.no_grad():
                member.weight.copy_(torch.from_numpy(values))
            self.members.append(member.to(dtype))


class Trained:
    """A model and what steps it. `optimizers`: whose learning rates are set, with what they begin at · `steps`: those
    that are called in a step."""

    def __init__(self, program: Program, directory: Path, *, resumed: bool) -> None:
        self.program = program
        self.tables = tables_of(program)
        dtype, *rounding = program.rows.split()
        self._dtype = DTYPES[dtype]
        self._keywords: dict[str, Any] = {
            "capacity": {"1 row": 1, "5 rows": 5, "half": 0.5, "all": 1.0}[program.capacity],
            "storage": {"default": None, "host": te.HostMemory(), "file": te.File(directory / f"rows-{resumed}")}[
                program.tier
            ],
            "rounding": {"stochastic": "stochastic"}.get("".join(rounding), "nearest"),
        }
        if resumed and program.resume == "of another capacity and tier":
            self._keywords |= {"capacity": 0.3, "storage": te.HostMemory()}
        self.model, self.follows = self._built()
        self.steps = [self.follows] if self.follows is not None else self._fused()
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self.steps]
        self.scaler = None
        if program.scaler != "none":
            self.scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
            for optimizer in self._fused() if self.follows is None else []:
                optimizer.attach_grad_scaler(self.scaler)

    def _built(self) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        program, keywords = self.program, self._keywords
        kind, options = None, dict[str, Any]()
        optimizer: Any = FUSED.get(program.optimizer)
        if program.follows:
            kind, options = KINDS[program.optimizer.removeprefix("follows ")]
            if program.step == "captured" and kind is not torch.optim.SGD and torch.get_default_device().type == "cuda":
                options = options | {"capturable": True}
            optimizer = kind
        if program.face == "converted":
            model = Members(self.tables, self._dtype)
            follows = None if kind is None else kind(model.parameters(), **options)
            te.replace_embedding_bags(model, optimizer=follows or optimizer, **keywords)
            return model, follows
        keywords = keywords | {"dtype": self._dtype, "optimizer": optimizer}
        if kind is None:
            return self._unconverted(keywords), None
        if program.number % 2 or program.face == "ranks" or program.tier == "file":  # it says which state rows have
            follows = kind([nn.Parameter(torch.zeros(1))], **options)
            return self._unconverted(keywords | {"optimizer": follows}), follows
        model = self._unconverted(keywords)
        follows = kind(model.parameters(), **options)
        te.follow(model, follows)
        return model, follows

    def _unconverted(self, keywords: dict[str, Any]) -> nn.Module:
        program, (table, *_) = self.program, self.tables
        if program.face == "bag":
            return te.TieredEmbeddingBag(
                table.num_embeddings, table.embedding_dim, mode=table.mode, include_last_offset=True,
                padding_idx=table.padding_idx, **keywords,
            )  # fmt: skip
        if program.face == "embedding":
            return te.TieredEmbedding(table.num_embeddings, table.embedding_dim, **keywords)
        if program.face == "collection":
            return te.TieredEmbeddingBagCollection(self.tables, **keywords)
        if program.face == "rows collection":
            return te.TieredEmbeddingCollection(self.tables, **keywords)
        sharding: Any = {"row-wise": te.RowWise(), "table-wise": te.TableWise()}.get(program.sharding)
        if sharding is None:
            sharding = {t.name: (te.RowWise(), te.TableWise())[n % 2] for n, t in enumerate(self.tables)}
        most = 250 * 3 * 6 if program.max_ids == "given" else None
        return te.ShardedTieredEmbeddingBagCollection(
            self.tables, sharding=sharding, average=False, max_ids=most, **keywords
        )

    def _fused(self) -> list[torch.optim.Optimizer]:
        modules = self.model.members if self.program.face == "converted" else [self.model]
        return [module.fused_optimizer for module in modules]

    @property
    def dense(self) -> torch.optim.Optimizer | None:
        """The optimizer as checkpoints of the model have it, where it was made of the model's parameters."""
        return self.follows if self.program.face == "converted" else None

    # --- a step -------------------------------------------------------------------------------------------------------

    def look_up(self, inputs: Inputs) -> list[Tensor]:
        if self.program.face == "rows collection":
            assert inputs.members is not None
            names = [self.tables[m].name for m in inputs.members]
            found = self.model(dict(zip(names, inputs.ids, strict=True)))
            return [found[name] for name in names]
        if inputs.members is not None:
            calls = zip(inputs.members, inputs.ids, inputs.offsets, inputs.weights, strict=True)
            return [self.model.members[m](*given) for m, *given in calls]
        if self.program.face == "embedding":
            return [self.model(inputs.ids[0])]
        return [self.model(inputs.ids[0], inputs.offsets[0], inputs.weights[0])]

    def step(self, batch: Batch, amid: Callable[[], None] = lambda: None) -> list[Tensor]:
        """Outputs, and gradients of weights that ask for one. `amid`: called before the first backward."""
        found: list[Tensor] = []
        if self.follows is not None:
            self.follows.zero_grad()
        with contextlib.ExitStack() as inside:
            if len(batch) > 1 and self.follows is None:
                for module in self.model.members if self.program.face == "converted" else [self.model]:
                    inside.enter_context(module.accumulate())
            for forwards in batch:
                outs, grads = [], []
                for inputs in forwards:
                    if self.program.weights == "with gradient":
                        weights = [each.clone().requires_grad_() for each in inputs.weights if each is not None]
                        inputs = inputs._replace(weights=[*weights])
                        found += weights
                    outs += self.look_up(inputs)
                    grads += inputs.upstream
                found += outs
                amid()
                if self.scaler is not None:
                    grads = [self.scaler.scale(each) for each in grads]
                torch.autograd.backward(outs, [grad.to(out.dtype) for out, grad in zip(outs, grads, strict=True)])
        if self.follows is not None:
            self._step_followed(self.follows)
        elif self.scaler is not None:
            called = {m for forwards in batch for inputs in forwards for m in inputs.members or ()}
            for number, optimizer in enumerate(self.steps):
                if self.program.face != "converted" or number in called:  # torch refuses one without a gradient
                    self.scaler.step(optimizer)
            self.scaler.update()
        return [each.grad if each.is_leaf and each.requires_grad else each.detach() for each in found]

    def _step_followed(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if self.program.clipping != "none":
            te.clip_grad_norm_(self.model, 1.0)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def set_rates(self, factor: float) -> None:
        for optimizer, rate in zip(self.steps, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor

    # --- what is left -------------------------------------------------------------------------------------------------

    def state(self) -> list[Any]:
        """Of the optimizers, at the current step; how far behind rows lie is no part of it."""
        found = []
        for optimizer in self.steps:
            state = optimizer.state_dict()["state"]
            found.append({key: _without_lag(entry) for key, entry in state.items()})
        return found


def _without_lag(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {name: value for name, value in entry.items() if not name.startswith("lagging")}


# --- the program ------------------------------------------------------------------------------------------------------


@dataclass
class Left:
    """What a program has left, on one rank."""

    outputs: list[Tensor]
    losses: list[float]
    rows: dict[str, Tensor]
    state: list[Any]


class InterruptedStepError(Exception):
    """What a program is interrupted by."""


def train(program: Program, directory: Path, rank: int = 0) -> Left:
    """Runs it in this process, which is that of a rank; its last checkpoint is in `directory`."""
    trained = Trained(program, directory, resumed=False)
    draws = Draws(program, trained.tables, rank)
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
            run = te.graph_step(trained.step)
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
            left = [train(program, directory)]
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
        return train(Program(**program), Path(directory), rank)


def _gathered(program: Program, directory: Path) -> Path:
    """The last checkpoint of ranks, as one process saves it: how rows lie over ranks is no part of the bits."""
    keywords = {"capacity": 1.0, "dtype": DTYPES[program.rows.split()[0]]}
    model = te.TieredEmbeddingBagCollection(tables_of(program), **keywords)
    te.load_checkpoint(model, directory / "last")
    te.save_checkpoint(model, directory / "gathered")
    model.close()
    return directory / "gathered"
