"""The model of a program, and its step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from following import KINDS
from torch import Tensor, nn
from training import NAMES, OPTIMIZERS

import tieredemb as te
from golden.draws import DTYPES, Batch, Inputs, tables_of
from golden.programs import Program

FUSED = dict(zip(NAMES, OPTIMIZERS, strict=True))
MOST_IDS = 250 * 3 * 6  # of a forward


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
        most = MOST_IDS if program.max_ids == "given" else None
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
