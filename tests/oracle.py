"""The oracle: a dict-based LRFU cache, and whole tables trained by torch. Slow and obvious."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict

import torch
from torch import nn

import tieredemb as te


class OracleCache:
    """Which keys are resident after each batch, and how many lookups hit: LRFU in float64 over dicts.

    `half_life`: batches, `math.inf` for exact counts, 0 for LRU. Ties of score go to the older batch. `time`:
    the batches that have aged scores.
    """

    def __init__(self, slots: int, half_life: float, *, remember: bool = True, precision: float = 0.0) -> None:
        self.precision = precision
        self.ambiguous = False  # whether the last choice of victims hung on a difference within `precision`
        self.slots = slots
        self.half_life = half_life
        self.remember = remember
        self.resident: set[int] = set()
        self.score: dict[int, float] = {}
        self.last: dict[int, int] = {}
        self.batch = self.time = 0

    def plan(self, keys: list[int], *, ages: bool = True) -> int:
        """Serves one batch, with `ages=False` at the time of the one before; returns the lookups that hit."""
        self.batch += 1
        self.time = max(1, self.time + ages)
        hits = sum(key in self.resident for key in keys)
        unique = list(OrderedDict.fromkeys(keys))
        missed = [key for key in unique if key not in self.resident]
        for key in unique:
            self.last[key] = self.batch
        short = len(missed) - (self.slots - len(self.resident))
        if short > 0:
            unlocked = [key for key in self.resident if self.last[key] < self.batch]
            ranked = sorted(unlocked, key=lambda key: (self.score[key], self.last[key]))
            victims = ranked[:short]
            if short < len(ranked):
                gone, spared = ranked[short - 1], ranked[short]
                gap = self.score[spared] - self.score[gone]
                same_batch = self.last[spared] == self.last[gone] or not self.remember  # then the score alone decides
                self.ambiguous = gap < self.precision or (gap == 0 and same_batch)
            self.resident -= set(victims)
            if not self.remember:
                for key in victims:
                    del self.score[key]
        for key in unique:
            self.score[key] = self._raised(self.score.get(key))
        room = self.slots - len(self.resident)
        self.resident |= set(missed[:room])
        return hits

    def _raised(self, old: float | None) -> float:
        if self.half_life == 0:
            return float(self.time)
        if math.isinf(self.half_life):
            return (old or 0.0) + 1
        now = self.time / self.half_life
        return now if old is None else max(old, now) + math.log2(1 + 2 ** -abs(old - now))


class RowWiseAdagradReference(torch.optim.Optimizer):
    """Row-wise Adagrad on dense gradients, in float64 where it sums."""

    def __init__(self, params, lr: float, eps: float = 1e-8) -> None:  # type: ignore[no-untyped-def]
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                total = self.state[param].setdefault("sum", torch.zeros(len(param), 1, device=param.device))
                total += grad.double().square().mean(1, keepdim=True).float()
                param -= group["lr"] * grad / (total.sqrt() + group["eps"])


class RowMeanAdagradReference(torch.optim.Optimizer):
    """TorchRec's `RowWiseAdagrad`, as its `step()` has it: rows move by the means of their gradients. A vector, which
    TorchRec refuses, is one of rows of one element."""

    def __init__(  # type: ignore[no-untyped-def]
        self, params, lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, *,
        maximize=False, **unused,
    ) -> None:  # fmt: skip
        options = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay}
        start = {"initial_accumulator_value": initial_accumulator_value, "maximize": maximize}
        super().__init__(params, options | start)
        for group in self.param_groups:
            for param in group["params"]:
                total = torch.full((len(param), 1), float(initial_accumulator_value), device=param.device)
                self.state[param] |= {"step": torch.tensor(0.0), "sum": total}

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, mean = self.state[param], param.grad.reshape(len(param), -1).mean(1, keepdim=True)
                state["step"] += 1
                rate = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
                state["sum"] += mean.square()
                param -= (rate * mean / (state["sum"].sqrt() + group["eps"])).reshape(-1, *[1] * (param.ndim - 1))
        return loss


# as tables know TorchRec's, which need not be installed
RowMeanAdagradReference.__module__, RowMeanAdagradReference.__qualname__ = (
    "torchrec.optim.rowwise_adagrad",
    "RowWiseAdagrad",
)


class SparseLionReference(torch.optim.Optimizer):
    """Lion on the rows of sparse gradients, as its paper writes it."""

    def __init__(self, params, lr: float, betas: tuple[float, float], weight_decay: float) -> None:  # type: ignore[no-untyped-def]
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad.coalesce()
                rows, g = grad.indices()[0], grad.values()
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                m, w = momentum[rows], param[rows]
                c = beta1 * m + (1 - beta1) * g
                move = torch.where(c.isnan(), c, c.sign())  # torch's sign of NaN is 0
                if group["weight_decay"] != 0:
                    move = move + group["weight_decay"] * w
                param[rows] = w - group["lr"] * move
                momentum[rows] = beta2 * m + (1 - beta2) * g


NEEDS_SPARSE_GRADIENTS = (te.SparseAdam, te.SparseLion)  # they move the rows of the batch alone


def torch_optimizer(config: te.config.OptimizerConfig, params) -> torch.optim.Optimizer:  # type: ignore[no-untyped-def]
    """The torch optimizer that a config stands for."""
    if isinstance(config, te.SGD):
        return torch.optim.SGD(
            params,
            lr=config.lr,
            momentum=config.momentum,
            dampening=config.dampening,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
        )
    if isinstance(config, (te.Adam, te.AdamW)):
        kind = torch.optim.Adam if isinstance(config, te.Adam) else torch.optim.AdamW
        return kind(params, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
    if isinstance(config, te.Adagrad):
        return torch.optim.Adagrad(
            params,
            lr=config.lr,
            lr_decay=config.lr_decay,
            weight_decay=config.weight_decay,
            eps=config.eps,
            initial_accumulator_value=config.initial_accumulator_value,
        )
    if isinstance(config, te.Adamax | te.NAdam | te.RMSprop):
        return getattr(torch.optim, type(config).__name__)(params, **asdict(config))
    if isinstance(config, te.RowMeanAdagrad):
        return RowMeanAdagradReference(params, **asdict(config))
    if isinstance(config, te.RowWiseAdagrad):
        return RowWiseAdagradReference(params, lr=config.lr, eps=config.eps)
    if isinstance(config, te.SparseLion):
        return SparseLionReference(params, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    return torch.optim.SparseAdam(params, lr=config.lr, betas=config.betas, eps=config.eps)


class OracleCollection(nn.Module):
    """Whole tables: `nn.EmbeddingBag` for each table, called as the collection is."""

    def __init__(self, tables: list[te.TableConfig], *, sparse: bool, scale_grad_by_freq: bool = False) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode=table.mode,
                padding_idx=table.padding_idx,
                sparse=sparse,
                include_last_offset=True,
                scale_grad_by_freq=scale_grad_by_freq,
            )
            for table in tables
        )

    def load_from(self, collection: te.TieredEmbeddingBagCollection) -> OracleCollection:
        for bag, weight in zip(self.bags, collection.state_dict().values(), strict=True):
            bag.load_state_dict({"weight": weight})
        return self

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch = (len(offsets) - 1) // len(self.bags)
        parts = []
        for t, bag in enumerate(self.bags):
            edges = offsets[t * batch : (t + 1) * batch + 1]
            ids = indices[edges[0] : edges[-1]]
            shares = None if weights is None else weights[edges[0] : edges[-1]]
            parts.append(bag(ids, edges - edges[0], per_sample_weights=shares))
        return torch.cat(parts, 1)


def integer_weights(module: te.modules.base.TieredModule, low: int = -8, high: int = 9, seed: int = 0) -> None:
    """Gives every table small integer weights: float sums of them are exact in any order."""
    generator = torch.Generator("cpu").manual_seed(seed)
    state = {
        name: torch.randint(low, high, weight.shape, generator=generator, device="cpu").to(weight.dtype)
        for name, weight in module.state_dict().items()
    }
    module.load_state_dict(state)
