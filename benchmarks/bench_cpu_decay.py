"""Optimizers whose decay moves every row in every step: what a step costs whose rows come back after some steps, and
what reading the whole table costs after some steps."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import nn

import tieredemb
from benchmarks.conftest import Save
from benchmarks.record import Record, measured
from benchmarks.timing import Quantiles

DECAY = 1e-4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "NAdam, decoupled": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "RMSprop, momentum, centered": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
}
WIDTH, BATCH, GAPS, STEPS = 16, 256, (1, 10, 100, 1000), (10, 100, 1000, 10_000)
READ_ROWS, ROUNDS = 10_000, 7


def bench_cpu_decay(keep: Save, quick: bool) -> None:
    batch, gaps, steps, read_rows = (8, (1, 3), (2, 5), 50) if quick else (BATCH, GAPS, STEPS, READ_ROWS)
    keep(
        "cpu-decay",
        f"A table × {WIDTH} under torch optimizers with weight_decay={DECAY:g}, capacity 10 %: forward, backward and "
        f"`step()` of {batch} different rows, which were all used last as many steps ago; {ROUNDS} rounds.",
        [_returning(name, batch, gap) for name in OPTIMIZERS for gap in gaps],
    )
    found: list[Record] = []
    for name in OPTIMIZERS:
        found += _reading(name, read_rows, batch, steps)
    keep(
        "cpu-reading",
        f"`state_dict()` of {read_rows:,} rows × {WIDTH} under torch optimizers with weight_decay={DECAY:g}, "
        f"capacity 10 %, after as many steps of {batch} random rows, and then again without a step in between.",
        found,
    )


def _made(name: str, rows: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    kind, options = OPTIMIZERS[name]
    model = nn.Sequential(nn.EmbeddingBag(rows, WIDTH, mode="sum"))
    optimizer = kind(model.parameters(), lr=1e-3, weight_decay=DECAY, **options)
    tieredemb.replace_embedding_bags(model, capacity=0.1, optimizer=optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(ids[:, None]).square().mean().backward()
    optimizer.step()


def _returning(name: str, batch: int, gap: int) -> Record:
    """Rows are used in turn, block by block."""
    model, optimizer = _made(name, batch * gap)
    blocks = torch.arange(batch * gap).view(gap, batch)
    for block in (*blocks, *blocks[:3]):
        _step(model, optimizer, block)
    seconds = []
    for block in blocks.repeat(-(-(3 + ROUNDS) // gap), 1)[3 : 3 + ROUNDS]:
        start = perf_counter()
        _step(model, optimizer, block)
        seconds.append(perf_counter() - start)
    config = f"{name}, used {gap:,} {'step' if gap == 1 else 'steps'} ago"
    return measured("step", "tieredemb, converted", config, "ms", Quantiles.of(seconds), scale=1e3)


def _reading(name: str, rows: int, batch: int, steps: tuple[int, ...]) -> list[Record]:
    model, optimizer = _made(name, rows)
    random, taken, found = torch.Generator().manual_seed(0), 0, []
    for until in steps:
        for _ in range(until - taken):
            _step(model, optimizer, torch.randint(rows, (batch,), generator=random))
        taken = until
        first, *again = [_read_seconds(model) for _ in range(1 + ROUNDS)]
        note = f"the first read, which replays steps, {1e3 * first:.3g} ms"
        config = f"{name}, after {until:,} steps"
        found.append(
            measured("read again", "tieredemb, converted", config, "ms", Quantiles.of(again), scale=1e3, note=note)
        )
    return found


def _read_seconds(model: nn.Module) -> float:
    start = perf_counter()
    model.state_dict()
    return perf_counter() - start
