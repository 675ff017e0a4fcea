"""One forward of a module on the CPU, and its update: numpy arrays, planned, pooled and updated at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.base import Cache
from tieredemb.cache.changes import Change
from tieredemb.cache.tickets import Ticket
from tieredemb.kernels.segments import segments_of_homes
from tieredemb.lookup.bags import Bags, make_bags
from tieredemb.lookup.embedding_bag import (
    NO_ARGMAX,
    NO_WEIGHTS,
    gradient_scale,
    has_max,
    pool,
    weights_gradient,
)
from tieredemb.lookup.optimizer import Gradient, Hyperparameters, limit_norms, update
from tieredemb.step.call import Call, inside_backward
from tieredemb.storage.base import CARRIERS
from tieredemb.tables.group import HostGroup
from tieredemb.tables.table_set import carrier_view

if TYPE_CHECKING:
    from tieredemb.kernels.cpu import Pass
    from tieredemb.modules.base import TieredModule

    Array = np.ndarray[Any, Any]


class _Together:
    """Passes over the hot rows of several groups that are all run, or none."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self._passes = passes
        self.rows_are_done = False

    @property
    def begun(self) -> bool:
        return self.rows_are_done or any(rows.begun for rows in self._passes)


class RowPass(Change):
    """A pass over hot rows of a group; `steps`: that its tables have taken then. Interrupted, it is ended if it, or one
    that belongs to it, has begun."""

    def __init__(self, group: HostGroup, rows: Pass, together: _Together, steps: Sequence[int]) -> None:
        self.group, self.rows = group, rows
        self._together, self._steps = together, steps

    def count(self) -> None:
        if self._steps:
            self.group.steps = list(self._steps)

    def settle(self, cache: Cache) -> None:
        if self._together.begun:
            self.rows.run()
            self.count()


def carry_out(passes: Sequence[tuple[HostGroup, Pass]], *, is_step: bool) -> None:
    """Runs passes that belong together, as one step of the optimizer or none: after an exception in between whoever
    uses the rows next ends them, if one has begun. The caller holds the locks of the groups' rows, and has checked
    them."""
    together = _Together([rows for _, rows in passes])
    changes = [
        RowPass(group, rows, together, [step + 1 for step in group.steps] if is_step else ()) for group, rows in passes
    ]
    entries = []
    for change in changes:
        entries.append(change.group.cache.changes.begin(change))
    for change in changes:
        change.rows.run()
    together.rows_are_done = True
    for change in changes:
        change.count()
    for change, entry in zip(changes, entries, strict=True):
        change.group.cache.changes.end(entry)


class HostGroupCall:
    """One forward in one group: its bags, its ticket, and what its gradient needs."""

    def __init__(self, group: HostGroup, bags: Bags) -> None:
        self.group = group
        self.bags = bags
        self.ticket: Ticket = group.cache.plan(bags.keys, score=not inside_backward())
        self.weights: Array = NO_WEIGHTS
        self.argmax: Array = NO_ARGMAX
        self.forward_rows: Array | None = None

    def limit_norms(self, max_norm: float, norm_type: float) -> Pass:
        """What scales the rows of this forward down to `max_norm`, where they are longer."""
        self.group.cache.check_rows()
        self.ticket.check()
        return limit_norms(self.group.cache.hot, self.ticket.unique_slots, max_norm, norm_type)

    def pool(self, out: Array, weights: Array | None, *, keep_argmax: bool, keep_rows: bool) -> None:
        """Pools into `out` (carrier (B, ΣD)); keeps what a backward will want to know of the forward."""
        homes, space = self.ticket.homes, self.group.space
        if weights is not None:
            position = self.bags.position
            self.weights = weights[: len(self.bags.keys)] if position is None else weights[position]
        if keep_argmax and has_max(space):
            self.argmax = np.full(out.shape, -1, np.int32)
        argmax = self.argmax if len(self.argmax) else None
        with self.group.cache.lock:  # an update on another thread would be seen half
            self.group.cache.check_rows()
            self.ticket.check()
            weight = self.group.cache.hot.weight
            pool(weight, homes, self.bags, space, None if weights is None else self.weights, out, argmax)
            if keep_rows:
                self.forward_rows = weight[np.maximum(homes, 0)]

    def weights_gradient(self, grad: Array, out: Array) -> None:
        """Writes the gradient of the per-sample weights to their positions in `out`, float32 (N,)."""
        assert self.forward_rows is not None
        homes = np.where(self.ticket.homes < 0, self.ticket.homes, np.arange(len(self.ticket.homes), dtype=np.int32))
        gradient = weights_gradient(self.forward_rows, homes, self.bags, self.group.space, grad)
        out[slice(len(gradient)) if self.bags.position is None else self.bags.position] = gradient

    def gradient(self, grad: Array, *, scale_by_freq: bool) -> Gradient:
        weights = self.weights if len(self.weights) else None
        scale = gradient_scale(self.bags, self.group.space, self.ticket.homes, weights)
        if scale_by_freq:
            inverse = self.ticket.inverse
            counts = np.maximum(np.bincount(inverse[inverse >= 0], minlength=1), 1)  # padding alone has no count
            share = np.where(inverse >= 0, 1 / counts[inverse].astype(np.float32), 0).astype(np.float32)
            scale = share if scale is None else scale * share
        return Gradient(grad, self.bags.sample, self.bags.table, NO_WEIGHTS if scale is None else scale, self.argmax)

    def untrained_key(self, padding_is_dropped: bool) -> int | None:
        """Key of the padding row where lookups read it but gradients must not reach it."""
        padding = int(self.group.space.padding[0])
        return None if padding_is_dropped or padding < 0 else padding


class HostCall(Call):
    """One forward of a module. `ids`: int32 or int64 (N,) · `offsets`: checked, int64 (T·B + 1,)."""

    def __init__(self, module: TieredModule, ids: Array, offsets: Array, batch: int) -> None:
        super().__init__(module, batch)
        self.ids = len(ids)
        self.parts: list[HostGroupCall] = []
        options, groups = module.options, module.tables.groups
        # every id is checked before any group plans
        bags = [
            make_bags(ids, offsets, group.space, batch, padding_is_dropped=options.padding_is_dropped)
            for group in groups
        ]
        try:
            for group, its_bags in zip(groups, bags, strict=True):
                assert isinstance(group, HostGroup)
                self.parts.append(HostGroupCall(group, its_bags))
        except BaseException:
            self.release()
            raise

    def limit_norms(self) -> None:
        options = self.module.options
        if options.max_norm is not None:
            with self.module.tables.updating():
                passes = [(part.group, part.limit_norms(options.max_norm, options.norm_type)) for part in self.parts]
                carry_out(passes, is_step=False)

    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        tables = self.module.tables
        # numpy's memory comes in huge pages: faulting 27 MB in by 4 KiB pages costs as much as the lookup
        carrier = CARRIERS[tables.config.dtype]
        out = torch.from_numpy(np.empty((self.batch, tables.output_width), carrier)).view(tables.config.dtype)
        array = None
        if weights is not None:  # backward reads them again, and loaders reuse their buffers
            array = weights.detach().to(torch.float32, copy=differentiable).contiguous().numpy()
        for part in self.parts:
            part.pool(carrier_view(out), array, keep_argmax=differentiable, keep_rows=self.keeps_rows)
        return out

    def weights_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        array = np.zeros(self.ids, np.float32)
        for part in self.parts:
            part.weights_gradient(grad.numpy(), array)
        return torch.from_numpy(array)

    @staticmethod
    def apply(module: TieredModule, collected: list[tuple[Call, torch.Tensor]]) -> None:
        optimizer = module.check_trainable()
        todo: list[tuple[HostGroup, Pass]] = []
        with module.tables.updating():
            for group in module.tables.groups:
                group.cache.check_rows()
            for g, group in enumerate(module.tables.groups):
                assert isinstance(group, HostGroup)
                parts = [(call.parts[g], grad) for call, grad in collected if isinstance(call, HostCall)]
                for part, _ in parts:
                    part.ticket.check()
                numbers = optimizer.numbers(group, [grad for _, grad in parts])
                if numbers is None:
                    return
                todo.append((group, prepare_update(group, parts, numbers, module)))
            carry_out(todo, is_step=True)


def prepare_update(
    group: HostGroup, parts: list[tuple[HostGroupCall, torch.Tensor]], numbers: Hyperparameters, module: TieredModule
) -> Pass:
    """One optimizer step of a group for the calls of one backward pass, in forward order. The caller holds the lock."""
    options = module.options
    gradients = [part.gradient(grad.numpy(), scale_by_freq=options.scale_grad_by_freq) for part, grad in parts]
    if len(parts) == 1:
        part = parts[0][0]
        segments = part.ticket.segments(part.untrained_key(options.padding_is_dropped))
        gradient = gradients[0]
    else:
        homes = [_trained_homes(part, options.padding_is_dropped) for part, _ in parts]
        segments = segments_of_homes(np.concatenate(homes), len(group.cache.hot))
        gradient = _concatenate(gradients)
    return update(group.cache.hot, segments, gradient, group.space, numbers)


def _trained_homes(part: HostGroupCall, padding_is_dropped: bool) -> Array:
    key = part.untrained_key(padding_is_dropped)
    return part.ticket.homes if key is None else np.where(part.bags.keys == key, np.int32(-1), part.ticket.homes)


def _concatenate(gradients: list[Gradient]) -> Gradient:
    """Several batches as one: samples and winning occurrences count on."""
    samples = np.cumsum([0] + [len(g.grad) for g in gradients])
    occurrences = np.cumsum([0] + [len(g.sample) for g in gradients])
    scaled = any(len(g.scale) for g in gradients)
    scales = [g.scale if len(g.scale) else np.ones(len(g.sample), np.float32) for g in gradients]
    argmax = [np.where(g.argmax < 0, -1, g.argmax + first) for g, first in zip(gradients, occurrences, strict=False)]
    return Gradient(
        grad=np.concatenate([g.grad for g in gradients]),
        sample=np.concatenate([g.sample + first for g, first in zip(gradients, samples, strict=False)]).astype(
            np.int32
        ),
        table=np.concatenate([g.table for g in gradients]),
        scale=np.concatenate(scales) if scaled else NO_WEIGHTS,
        argmax=np.concatenate(argmax).astype(np.int32),
    )
