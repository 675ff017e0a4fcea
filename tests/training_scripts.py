"""Training as a script of turns, which two models can play that should come to the same numbers.

Each turn trains one batch; before it rows are looked up, the cache is flushed, outputs are dropped or kept for a later
backward. `WholeTables` plays a script over plain arrays, obviously; a `Trainee` over a module, with or without prefetch
and a captured step. What they saw on the way is compared on the device and read once in many turns, so that no
synchronisation hides a race.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from devices import equal, idle
from torch import Tensor

import tieredemb as te
from tieredemb.errors import StorageError

TURNS_UNREAD = 50  # turns between two looks at what was seen

Inputs = tuple[Tensor, Tensor, Tensor | None]  # ids, offsets and per-sample weights of one forward of a collection


@dataclass
class Turn:
    """One training step, over tensors in host memory.

    `forwards`: inputs of each of its forwards · `upstream`: gradient of their outputs, (B, ΣD) · `rate`: what the
    learning rate is multiplied by · `before`: what is done first, with its arguments; inputs of None are those of the
    batch itself · `again`: the batch is the last turn's, the very tensors · `was`: the ids of its first forward when it
    was handed on, which are changed in place now · `leaves`: the loop over the batches is left after this turn, and
    another begins.
    """

    forwards: list[Inputs]
    upstream: Tensor
    rate: float = 1.0
    before: list[tuple[Any, ...]] = field(default_factory=list)
    again: bool = False
    was: Tensor | None = None
    leaves: bool = False

    @property
    def batch(self) -> dict[str, Any]:
        """The batch as it is handed on."""
        forwards = list(self.forwards)
        if self.was is not None:
            forwards[0] = (self.was, *forwards[0][1:])
        return {"forwards": forwards, "upstream": self.upstream}


def looked_up(batch: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """What `prefetch` may be told of a batch."""
    return [(ids, offsets) for ids, offsets, _ in batch["forwards"]]


class WholeTables:
    """The oracle of modules whose tables all have the mode "sum", trained by SGD: every row in one place, in float64,
    which is exact for integers. So are float32 sums of small ones in any order."""

    def __init__(self, tables: Sequence[te.TableConfig], weights: Sequence[Tensor]) -> None:
        self.tables = tables
        self.weights = [weight.cpu().double().numpy().copy() for weight in weights]
        self.seen: list[Tensor] = []
        self._kept: list[tuple[int, Inputs, Tensor]] = []

    def play(self, script: Sequence[Turn]) -> None:
        for number, turn in enumerate(script):
            for _, inputs, upstream in [kept for kept in self._kept if kept[0] == number]:
                self.learn(inputs, upstream, turn.rate)
            for what, *arguments in turn.before:
                if what == "weights":
                    self.seen += [torch.from_numpy(weight.astype(np.float32)) for weight in self.weights]
                elif what in ("evaluate", "keep"):
                    inputs = turn.forwards[0] if arguments[0] is None else arguments[0]
                    self.seen.append(self.look_up(inputs))
                    if what == "keep":
                        self._kept.append((number + arguments[2], inputs, arguments[1]))
            self.seen += [self.look_up(inputs) for inputs in turn.forwards]
            for inputs in turn.forwards:
                self.learn(inputs, turn.upstream, turn.rate)

    def look_up(self, inputs: Inputs) -> Tensor:
        """The pooled outputs, (B, ΣD)."""
        parts = []
        for weight, (ids, samples, shares, batch, _) in zip(self.weights, self._bags(inputs), strict=True):
            out = np.zeros((batch, weight.shape[1]))
            np.add.at(out, samples, weight[ids] * shares)
            parts.append(out)
        return torch.from_numpy(np.concatenate(parts, 1).astype(np.float32))

    def learn(self, inputs: Inputs, upstream: Tensor, rate: float) -> None:
        for weight, (ids, samples, shares, _, columns) in zip(self.weights, self._bags(inputs), strict=True):
            np.subtract.at(weight, ids, upstream.numpy()[samples, columns] * shares * rate)

    def _bags(self, inputs: Inputs) -> Iterator[tuple[Any, ...]]:
        """Of each table: the ids but padding, their samples, their weights, B, and its columns of the output."""
        ids, offsets, shares = (None if part is None else part.numpy() for part in inputs)
        batch, column = (len(offsets) - 1) // len(self.tables), 0
        for t, table in enumerate(self.tables):
            edges = offsets[t * batch : (t + 1) * batch + 1]
            at = np.arange(edges[0], edges[-1])
            at = at[ids[at] != table.padding_idx]
            share = np.ones((len(at), 1)) if shares is None else shares[at, None]
            samples = np.searchsorted(edges, at, side="right") - 1
            yield ids[at], samples, share, batch, slice(column, column + table.embedding_dim)
            column += table.embedding_dim


class Trainee:
    """A collection that plays scripts. With `micro` each forward of a turn has a backward of its own, which
    `accumulate()` makes one update; else their sum is backpropagated."""

    def __init__(self, model: te.TieredEmbeddingBagCollection, *, micro: bool = False) -> None:
        self.model = model
        self.micro = micro
        self.seen: list[Tensor] = []
        self.when: list[str] = []  # each was seen
        self._rate = model.fused_optimizer.param_groups[0]["lr"]
        self._kept: list[tuple[int, Tensor, Tensor]] = []

    def play(
        self,
        script: Sequence[Turn],
        *,
        depth: int = 0,
        graphed: bool = False,
        told: bool = False,
        from_host: bool = False,
        each: Callable[[], object] = lambda: None,
    ) -> None:
        """Trains, with prefetch if there is a `depth` and a captured step if `graphed`. `told`: whether prefetch is
        told what batches look up, or finds out · `from_host`: whether the batches come to it in host memory · `each`:
        called after each turn."""
        step: Callable[[dict[str, Any]], list[Tensor]] = self._step
        if graphed:
            step = te.graph_step(step, max_ids=_most_ids(script))
        number = 0
        while number < len(script):
            loop: Any = _batches(script[number:], in_place=bool(depth and from_host))
            if depth:
                loop = te.prefetch(loop, self.model, depth, ids_of=looked_up if told else None)
            for batch, turn in zip(loop, script[number:], strict=False):
                self._prepare(number, turn, batch)
                for out in step(batch):
                    self._see(out, number, "train")
                each()
                number += 1
                if turn.leaves:
                    break
        self._kept.clear()  # their backward never comes

    def _see(self, out: Tensor, number: int, what: str) -> None:
        self.seen.append(out.detach().clone())
        self.when.append(f"turn {number}, {what}")

    def _step(self, batch: dict[str, Any]) -> list[Tensor]:
        if self.micro:
            outs = []
            with self.model.accumulate():
                for inputs in batch["forwards"]:
                    outs.append(self.model(*inputs))
                    outs[-1].backward(batch["upstream"])
        else:
            outs = [self.model(*inputs) for inputs in batch["forwards"]]
            functools.reduce(torch.add, outs).backward(batch["upstream"])
        return [out.detach() for out in outs]

    def _prepare(self, number: int, turn: Turn, batch: dict[str, Any]) -> None:
        self.model.fused_optimizer.param_groups[0]["lr"] = self._rate * turn.rate
        due = [kept for kept in self._kept if kept[0] == number]
        self._kept = [kept for kept in self._kept if kept[0] != number]
        while due:
            _, out, upstream = due.pop(0)
            out.backward(upstream)
            del out
        if turn.was is not None:
            batch["forwards"][0][0].copy_(turn.forwards[0][0], non_blocking=True)
        for what, *arguments in turn.before:
            if what == "flush":
                self.model.flush()
            elif what == "stats":
                self.model.stats()
            elif what == "weights":
                for weight in self.model.state_dict().values():
                    self._see(weight, number, what)
            else:
                self._look_up(number, what, batch, *arguments)

    def _look_up(self, number: int, what: str, batch: dict[str, Any], inputs: Inputs | None, *later: Any) -> None:
        given = batch["forwards"][0] if inputs is None else tuple(map(copied, inputs))
        with torch.set_grad_enabled(what != "evaluate"):
            out = self.model(*given)
        if what != "drop":
            self._see(out, number, what)
        if what == "keep":
            upstream, turns = later
            self._kept.append((number + turns, out, copied(upstream)))


def copied(tensor: Tensor | None) -> Any:
    """A tensor of its own on the default device; the host does not wait for one that comes from pinned memory."""
    return None if tensor is None else tensor.to(torch.get_default_device(), copy=True, non_blocking=True)


def _most_ids(script: Sequence[Turn]) -> int:
    return max((len(ids) for turn in script for ids, _, _ in turn.forwards), default=0)


def _batches(script: Sequence[Turn], *, in_place: bool) -> Iterator[dict[str, Any]]:
    """The batches of a script: as new tensors each time, so that memory that is given back too early is soon another's,
    or where they are."""
    batch: dict[str, Any] | None = None
    for turn in script:
        if batch is None or not turn.again:
            batch = turn.batch if in_place else _copied_batch(turn.batch)
        yield batch


def _copied_batch(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "forwards": [tuple(map(copied, inputs)) for inputs in batch["forwards"]],
        "upstream": copied(batch["upstream"]),
    }


class Comparison:
    """What a trainee has seen, against what it should have: on the device, and the host asks for the result once in
    `TURNS_UNREAD` calls."""

    def __init__(self, trainee: Trainee, expected: Sequence[Tensor], context: str) -> None:
        self._trainee = trainee
        self._expected = expected
        self._context = context
        self._calls = self._checked = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls % TURNS_UNREAD == 0:
            self.check()

    def check(self) -> None:
        device, all_seen = torch.get_default_device(), self._trainee.seen
        seen, expected = all_seen[self._checked :], self._expected[self._checked : len(all_seen)]
        assert [out.shape for out in seen] == [out.shape for out in expected], self._context
        both = [torch.cat([out.to(device).flatten() for out in (*outs, torch.empty(0))]) for outs in (seen, expected)]
        if not torch.equal(*both):
            self._fail(seen, expected)
        self._checked = len(all_seen)

    def _fail(self, seen: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        wrong = [number for number, outs in enumerate(zip(seen, expected, strict=True)) if not equal(*outs)]
        ours, theirs = (outs[wrong[0]].cpu() for outs in (seen, expected))
        at = (ours != theirs).nonzero()
        raise AssertionError(
            f"{self._context}: {self._trainee.when[self._checked + wrong[0]]}: {len(at)} elements differ, from "
            f"{at[0].tolist()} on: {ours[tuple(at.T)][:8].tolist()}, not {theirs[tuple(at.T)][:8].tolist()}; so do "
            f"{len(wrong) - 1} of the {len(seen) - wrong[0] - 1} outputs after it that were looked at"
        )

    def finish(self) -> None:
        self.check()
        assert self._checked == len(self._expected), self._context


# --- locks ------------------------------------------------------------------------------------------------------------

MOST_SETS = 25  # of rows that are to be resident together: enough for a locked row to be in the way of one


def assert_rows_can_leave(model: te.TieredEmbeddingBagCollection) -> None:
    """No batch is in flight, and no row is locked: any rows get all the slots there are."""
    assert _at_rest(model)
    model.tables.division = None  # these lookups tell nothing of what rows are used for
    for group in model.tables.groups:
        cached = [int(t) for j, t in enumerate(group.space.tables) if j not in group.resident]
        tables = [(t, model.tables.config.tables[t]) for t in cached]
        rows = [(t, row) for t, table in tables for row in range(table.num_embeddings) if row != table.padding_idx]
        slots = group.slots - (group.space.rows - sum(table.num_embeddings for _, table in tables))
        others = len(rows) - slots
        if others <= 0:
            continue
        firsts = range(0, len(rows), others)  # each row is among the others once, and in the way if it cannot leave
        for first in firsts[:: len(firsts) // MOST_SETS + 1]:
            chosen = [rows[(first + n) % len(rows)] for n in range(slots)]
            before = model.stats()
            _look_up_rows(model, chosen)
            brought = model.stats()
            assert (brought - before).rows_overflow == 0, f"of {slots} slots some were locked"
            _look_up_rows(model, chosen)
            assert (model.stats() - brought).hits == slots
    assert _at_rest(model)


def _at_rest(model: te.TieredEmbeddingBagCollection) -> bool:
    """As `idle`, but garbage is collected, which takes 0.2 seconds, only where it may hold a batch in flight."""
    try:
        for group in model.tables.groups:
            group.cache.check_idle("test")
    except StorageError:
        return idle(model)
    return True


@torch.enable_grad()
def _look_up_rows(model: te.TieredEmbeddingBagCollection, rows: Sequence[tuple[int, int]]) -> None:
    """One bag a table with its rows of `rows`, (table, row) each, as for a backward: they come into slots."""
    ids = [row for _, row in sorted(rows)]
    counts = Counter(table for table, _ in rows)
    offsets = [sum(counts[t] for t in range(tables)) for tables in range(len(model.tables.config.tables) + 1)]
    model(torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets))
